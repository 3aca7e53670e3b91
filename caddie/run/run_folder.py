"""The folder of a run: what lies in it under which name, and who may begin or go on there."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from caddie.data.corpus import Corpus
from caddie.errors import UserError
from caddie.recipes.recipe import Recipe
from caddie.train.checkpoint import CHECKPOINT

RECIPE, LOG, WEIGHTS = "recipe.json", "log.jsonl", "weights.safetensors"
ARTIFACT, RESULT = "artifact.caddie", "result.json"


def run_folder(recipe: Recipe, seed: int) -> Path:
    """Where a run goes unless another folder is named."""
    return Path("runs") / f"{recipe.name}-{recipe.sha256[:8]}-s{seed}"


def check_folder(folder: Path) -> None:
    """Refuse a folder that no run can begin or go on in, such as that of somebody's texts."""
    try:
        place = next(place for place in (folder, *folder.parents) if place.exists())
        held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    if not place.is_dir():
        raise UserError(f"{place} is a file; name a folder")
    if held and not held & {RECIPE, LOG, CHECKPOINT, WEIGHTS, RESULT}:
        raise UserError(f"{folder} holds other files, such as {min(held)}; name an empty folder, or that of a run")


def read_run(folder: Path) -> tuple[Recipe, int, Corpus]:
    """Recipe, seed and corpus of a run folder."""
    if folder.is_file():
        raise UserError(f"{folder} is a file; name the folder of a run, as {folder.parent}")
    try:
        told = json.loads((folder / RECIPE).read_text())
        return Recipe.from_json(told["recipe"]), int(told["seed"]), Corpus.load(Path(told["corpus"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{folder} is not a run folder, for its {RECIPE} is missing or damaged; name one that caddie train wrote"
        ) from None


def run_weights(folder: Path, recipe: Recipe, corpus: Corpus) -> dict[str, Tensor]:
    """The weights of a run folder, which must be those of this model and text."""
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            found = file.metadata()
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read ({error}); train again with: caddie train") from None
    if found != identity(recipe, corpus):
        raise UserError(f"{folder / WEIGHTS} are not those of this model and text; train again with: caddie train")
    return weights


def identity(recipe: Recipe, corpus: Corpus) -> dict[str, str]:
    """What a run's weights belong to."""
    train = corpus.manifest.train
    data = train.document_set_sha256 if train else ""
    return {"model": recipe.model.key(), "train": recipe.train.key(), "data": data}


def end_line(log: Path) -> None:
    """End the line that a killed run left unfinished, so that the next event has its own."""
    if log.exists() and not log.read_bytes().endswith(b"\n"):
        with log.open("a") as file:
            file.write("\n")
