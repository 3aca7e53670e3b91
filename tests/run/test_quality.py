"""A floor of quality: some seconds of training, packed into a file, beat counting bytes and beat no training."""

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_model import order_two_bits_per_byte
from conftest import call, probe_nothing, score_here

from caddie.data.corpus import Corpus
from caddie.model import build
from caddie.pack.artifact import Artifact, load
from caddie.run.stages import held_out_text
from caddie.score.score import score

pytestmark = pytest.mark.long  # a run of 120 steps
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "train.seconds=none",
    "train.steps=120",
    "train.batch_tokens=1024",
    "train.sequence_length=128",
    "train.precision=float32",
    "train.compile=never",
    "model.vocabulary=512",
    "model.width=64",
    "model.block.mlp.hidden=64",
    "model.embedding.bigrams.buckets=4096",
    "data.validation_fraction=0.05",
    "pack.fit=none",
    "pack.coding=Packed",
    "pack.calibration.tokens=2048",
    "score.sequence_length=128",
    "score.stride=128",
)
MARGIN = 2.0
"""Bits per byte that training must gain."""


@dataclass(frozen=True)
class Trained:
    """A run on the package's own source, and what it learned from."""

    result: dict[str, Any]
    artifact: Artifact
    corpus: Corpus


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("quality")
    (folder / "texts").mkdir()
    for path in sorted((ROOT / "caddie").rglob("[a-m]*.py")):
        shutil.copy(path, folder / "texts" / f"{path.parent.name}-{path.stem}.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        score_here(patch)
        probe_nothing(patch)
        patch.setattr(import_module("caddie.run.run"), "check_settings_matter", lambda recipe: None)
        ended = call("run", "tiny", *SETTINGS, "--data", "texts", "--out", "run", "--json", "--quiet")
        assert (ended.status, ended.err) == (0, "")
        artifact = load(Path("run") / "artifact.caddie")
        (corpus,) = map(Corpus.load, Path("data").resolve().glob("texts-*"))  # that of the run
        return Trained(json.loads(ended.out), artifact, corpus)


def documents(trained: Trained, shards: list[np.ndarray]) -> Iterator[bytes]:
    tokenizer = trained.artifact.tokenizer
    ids = np.concatenate(shards)
    for begin, end in itertools.pairwise([*np.flatnonzero(ids == tokenizer.bos), len(ids)]):
        yield tokenizer.decode(ids[begin + 1 : end])


def test_a_short_run_beats_counts_of_the_same_text(trained: Trained) -> None:
    held_out = list(documents(trained, [trained.corpus.validation_tokens()]))
    text = held_out_text(trained.corpus)
    assert sum(map(len, held_out)) == text.source_bytes, "both are charged for the same bytes"
    counted = order_two_bits_per_byte(documents(trained, trained.corpus.train_shards()), held_out)
    assert 2.0 < counted < 4.0, "as such counts do on source code"
    assert trained.result["bits_per_byte"] < counted


def test_training_gains_more_than_the_margin(trained: Trained) -> None:
    text = held_out_text(trained.corpus)
    untrained = build(trained.artifact.model.config, seed=1)
    before = score(untrained, text, trained.artifact.scoring).bits_per_byte
    assert trained.result["bits_per_byte"] < before - MARGIN


def test_counts_by_hand() -> None:
    # after training on "aa": P(a) = (2 + 1/256) / 3, and a after a (1 + P(a)) / 2
    first = (2 + 1 / 256) / 3
    expected = -(np.log2(first) + np.log2((1 + first) / 2)) / 2
    assert order_two_bits_per_byte([b"aa"], [b"aa"]) == pytest.approx(expected)
    assert order_two_bits_per_byte([b"aa"], [b"b"]) == pytest.approx(-np.log2(1 / 256 / 3))
