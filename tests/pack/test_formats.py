"""Files of earlier versions are read alike: artifacts by weights and scores, compressed texts by their text.

`make_formats.py` in `tests/golden/formats` wrote them, one for each quantizer, codec, tokenizer, scoring and size that
the formats know. They are never written anew: a change that breaks one needs a new format version that reads them.
"""

import json
import sys
from dataclasses import fields
from functools import cache
from inspect import isabstract
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from caddie.config import Config, field_types, variants
from caddie.data.tokenizers import Tokenizer
from caddie.errors import UserError
from caddie.inference import text_codec
from caddie.inference.text_codec import decompress
from caddie.pack import artifact as artifacts
from caddie.pack import container
from caddie.pack.artifact import Artifact
from caddie.pack.codecs import Codec
from caddie.pack.coding import ArrayCodec, entropy_model
from caddie.pack.quantize import LowRank, Quantizer
from caddie.score.ttt_sgd import TestTimeTraining

FOLDER = Path(__file__).parent.parent / "golden" / "formats"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
SLOW_TO_SCORE = {"scoring-chunks", "scoring-documents", "scoring-phases"}

sys.path.insert(0, str(FOLDER))
import make_formats as make  # noqa: E402


@cache
def read(name: str) -> Artifact:
    return artifacts.load(FOLDER / f"{name}.artifact")


@pytest.mark.long
@pytest.mark.parametrize("name", EXPECTED["artifacts"])
def test_an_artifact_has_the_weights_it_had(name: str) -> None:
    found = make.expected(FOLDER / f"{name}.artifact", scored=False)
    assert found["weights"] == EXPECTED["artifacts"][name]["weights"]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, expected in EXPECTED["artifacts"].items() if "nats" in expected])
def test_an_artifact_has_the_score_it_had(name: str) -> None:
    assert make.nats(read(name)) == pytest.approx(EXPECTED["artifacts"][name]["nats"], rel=1e-9)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW_TO_SCORE else ()) for name in EXPECTED["texts"]]
)
def test_a_compressed_text_is_the_text_it_was(name: str) -> None:
    text = decompress(read(EXPECTED["texts"][name]), (FOLDER / f"{name}.text").read_bytes())
    whole = b"".join(make.DOCUMENTS)
    assert text == (bytes(range(256)) if name == "stored" else whole if name.startswith("scoring") else make.TEXT)


def classes(value: object) -> set[type]:
    """Return the classes of settings within a value."""
    if isinstance(value, Config):
        return {type(value)}.union(*(classes(getattr(value, field.name)) for field in fields(value)))
    return set().union(*map(classes, value)) if isinstance(value, tuple) else set()


@pytest.mark.parametrize(
    ("socket", "files"),
    [
        (Quantizer, make.QUANTIZERS),
        (Codec, make.CODINGS),
        (ArrayCodec, make.CODINGS),
        (TestTimeTraining, make.SCORINGS),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_every_variant_has_a_file(socket: type[Config], files: dict[str, Config]) -> None:
    shipped = {one for one in variants(socket).values() if one.__module__.startswith("caddie.")}
    assert shipped <= set().union(*map(classes, files.values()))
    names = {name.partition("-")[2] for name in EXPECTED["artifacts"]}
    assert set(files) <= names


def test_every_tokenizer_and_form_of_low_rank_has_a_file() -> None:
    kinds = {read(f"tokenizer-{name}").tokenizer.kind for name in make.tokenizers()}
    direct = Tokenizer.__subclasses__()
    every = [*direct, *(below for one in direct for below in one.__subclasses__())]
    shipped = {one.kind for one in every if one.__module__.startswith("caddie.") and not isabstract(one)}
    assert shipped == kinds
    forms = get_args(field_types(LowRank)["form"])
    assert {one.form for one in make.QUANTIZERS.values() if isinstance(one, LowRank)} == set(forms)


def test_the_versions_that_are_written_have_files() -> None:
    """A new version of a format needs files of its own; those of the old one stay, or are refused by their version."""
    versions = {int.from_bytes(path.read_bytes()[6:8], "little") for path in FOLDER.glob("*.artifact")}
    assert max(versions) == container.VERSION
    assert {path.read_bytes()[:8] for path in FOLDER.glob("*.text")} == {b"caddie:%d" % text_codec.VERSION}


def test_a_later_version_is_refused_by_its_number(tmp_path: Path) -> None:
    later = bytearray((FOLDER / "scoring-plain.artifact").read_bytes())
    later[6] += 1
    (tmp_path / "later.artifact").write_bytes(later)
    with pytest.raises(UserError, match="format version 2, this caddie reads 1; upgrade caddie"):
        artifacts.load(tmp_path / "later.artifact")
    text = (FOLDER / "scoring-plain.text").read_bytes()
    for later_text in (b"caddie:2" + text[8:], b"caddie:2"):
        with pytest.raises(UserError, match="format version 2, this caddie reads 1; upgrade caddie"):
            decompress(read("scoring-plain"), later_text)


def test_large_arrays_reach_what_small_ones_do_not() -> None:
    """Of a million integers: counts are halved and tiles are as large as they get."""
    _, _, borders = list(entropy_model._tiles(2048, 512))[-1]
    widths = {right - left for left, right in pairwise(borders)}
    rows = [bottom - top for top, bottom, _ in entropy_model._tiles(2048, 512)]
    assert max(rows) * max(widths) >= entropy_model._LARGEST_TILE // 2
