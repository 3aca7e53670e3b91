"""Files of earlier versions are read alike: artifacts by weights and scores, compressed texts by their text.

`make_formats.py` in `tests/golden/formats` wrote them, one for each quantizer, codec, tokenizer, scoring and size that
the formats know. They are never written anew: a change that breaks one needs a new format version that reads them.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from caddie.config import variants
from caddie.inference.text_codec import decompress
from caddie.pack import artifact as artifacts
from caddie.pack.artifact import Artifact
from caddie.pack.codecs import Codec
from caddie.pack.quantize import Quantizer

FOLDER = Path(__file__).parent.parent / "golden" / "formats"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
SLOW_TO_SCORE = {"scoring-chunks", "scoring-documents", "scoring-phases"}

sys.path.insert(0, str(FOLDER))
import make_formats as make  # noqa: E402


@cache
def read(name: str) -> Artifact:
    return artifacts.load(FOLDER / f"{name}.artifact")


@pytest.mark.parametrize("name", EXPECTED["artifacts"])
def test_an_artifact_has_the_weights_it_had(name: str) -> None:
    found = make.expected(FOLDER / f"{name}.artifact", scored=False)
    assert found["weights"] == EXPECTED["artifacts"][name]["weights"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in SLOW_TO_SCORE else ())
        for name, expected in EXPECTED["artifacts"].items()
        if "nats" in expected
    ],
)
def test_an_artifact_has_the_score_it_had(name: str) -> None:
    assert make.nats(read(name)) == pytest.approx(EXPECTED["artifacts"][name]["nats"], rel=1e-9)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW_TO_SCORE else ()) for name in EXPECTED["texts"]]
)
def test_a_compressed_text_is_the_text_it_was(name: str) -> None:
    text = decompress(read(EXPECTED["texts"][name]), (FOLDER / f"{name}.text").read_bytes())
    whole = b"".join(make.DOCUMENTS)
    assert text == (bytes(range(256)) if name == "stored" else whole if name.startswith("scoring") else make.TEXT)


def test_every_quantizer_codec_and_tokenizer_has_a_file() -> None:
    used: set[str] = set()

    def names(value: Any) -> None:
        used.add(type(value).__name__)
        for field in ("of", "codec"):
            if (inner := getattr(value, field, None)) is not None and not isinstance(inner, tuple):
                names(inner)

    for value in (*make.QUANTIZERS.values(), *make.CODINGS.values()):
        names(value)
    shipped = {*variants(Quantizer), *variants(Codec)}
    assert {name for name in shipped if variants_of_ours(name)} <= used
    kinds = {artifacts.load(FOLDER / f"tokenizer-{name}.artifact").tokenizer.kind for name in make.tokenizers()}
    assert len(kinds) == 3


def variants_of_ours(name: str) -> bool:
    cls = (variants(Quantizer) | variants(Codec))[name]
    return cls.__module__.startswith("caddie.")


def test_large_arrays_reach_what_small_ones_do_not() -> None:
    """Of a million integers: counts are halved and tiles are as large as they get."""
    from caddie.pack.coding import entropy_model

    _, _, borders = list(entropy_model._tiles(2048, 512))[-1]
    widths = {right - left for left, right in pairwise(borders)}
    rows = [bottom - top for top, bottom, _ in entropy_model._tiles(2048, 512)]
    assert max(rows) * max(widths) >= entropy_model._LARGEST_TILE // 2
