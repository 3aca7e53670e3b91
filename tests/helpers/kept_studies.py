"""What `test_studies` asks of every study below `studies/`.

A process of its own, for a study's file may define classes, which stay known to a process as long as it lives.
"""

import json
import re
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from processes import CONTEXT

from caddie.config.userfile import execute
from caddie.data.loaders import SequentialStream
from caddie.lab.study import Study
from caddie.pack.quantize import Rows
from caddie.run.run import check_recipe

ROOT = Path(__file__).resolve().parent.parent.parent / "studies"


def facts(study: Study) -> dict[str, Any]:
    """What a study is; every label is built."""
    recipes = {label: study.recipe(label) for label in study.labels}
    for recipe in recipes.values():
        check_recipe(recipe)
    return {
        "described": study.to_json(),
        "shown": {label: study.shown(label) for label in study.labels},
        "runs": [recipe.sha256 for recipe in recipes.values()],
        "steps": {label: recipe.train.steps for label, recipe in recipes.items()},
    }


def hardest_first(loader: Any) -> dict[str, Any]:
    """How many different ids stand in each batch of a text that is partly noise, in the order of the loader."""
    noise = np.random.default_rng(0).integers(0, 1000, 4096)
    text = np.concatenate([np.zeros(4096, int), noise, np.arange(4096) % 7]).astype(np.uint16)
    settings = {"tokens": 256, "sequence_length": 64, "seed": 1, "bos": 1}
    stream = loader(of=SequentialStream(), batches=40, shards=5).build([text], **settings)
    plain = SequentialStream().build([text], **settings)
    same = [
        bool((stream.micro_batch(index).inputs == plain.micro_batch(other).inputs).all())
        for index, other in [*enumerate(stream.order), (41, 41)]
    ]
    ids = [len(np.unique(stream.micro_batch(index).inputs)) for index in range(40)]
    return {"order": stream.order, "same": same, "ids": ids}


def hardest_and_pruned(defined: dict[str, Any]) -> dict[str, Any]:
    """Results of the classes of one study."""
    integers = np.array([[1, -1, 2, 0], [1, 1, -3, 1]], np.int8)
    arrays = {"integers": integers, "steps": np.array([0.5, 0.25], np.float32)}
    stored = SimpleNamespace(quantizer=SimpleNamespace(dequantizer=Rows()), arrays=arrays)
    candidates = SimpleNamespace(
        make=lambda quantizers: SimpleNamespace(weights={"w": stored}), changed=lambda candidate, arrays: arrays
    )
    pruned = {
        share: defined["PruneShare"](share=share).fit(candidates, {}, 0).candidate["w"]["integers"].tolist()
        for share in (0.0, 0.5, 1.0)
    }
    return {"hardest": hardest_first(defined["HardestFirst"]), "pruned": pruned}


def tell(pipe: Connection, folders: str = ".*", only: str = "") -> None:
    """Send what the studies of these folders are whose names begin with `only`, and what the classes of one do."""
    files = [file for file in sorted(ROOT.glob("*/study.py")) if re.fullmatch(folders, file.parent.name)]
    held = {str(file.relative_to(ROOT).parent): execute(file) for file in files}
    studies = {
        (folder if name == "study" else f"{folder}/{name}"): facts(value)
        for folder, values in held.items()
        for name, value in values.items()
        if isinstance(value, Study) and name.startswith(only)
    }
    told = {"studies": studies, **hardest_and_pruned(held["negative_results"])}
    pipe.send(json.loads(json.dumps(told)))


def ask(*which: str) -> dict[str, Any]:
    """Return a process's facts of the studies; `which` as in `tell`."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=tell, args=(theirs, *which))
    process.start()
    theirs.close()
    told: dict[str, Any] = ours.recv()
    process.join()
    return told
