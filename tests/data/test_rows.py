"""Text from Parquet files and from data sets on the hub, which a server on this machine stands in for."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recording import RecordedProgress
from stand_in_hub import Hub, serving

from caddie.data import documents as sources
from caddie.data.hub import Origin
from caddie.data.prepare import prepare
from caddie.data.tokenizers import RawBytes
from caddie.errors import UserError
from caddie.runtime.progress import SILENT

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
from pyarrow import parquet  # noqa: E402

TEXTS = [f"document {number} é" for number in range(600)]
NAME = "me/texts"


def table(path: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=100)
    return path


def parquet_bytes(folder: Path, texts: list[str]) -> bytes:
    return table(folder / "made.parquet", text=texts).read_bytes()


def read(source: str | Path) -> list[str]:
    return [document.decode() for document in sources.find(source).documents()]


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", id=list(range(602)), text=[*TEXTS, "", None])
    assert read(path) == TEXTS
    other = table(tmp_path / "B.PARQUET", content=["of another name"], number=[1])
    assert read(other) == ["of another name"]
    (tmp_path / "c.txt").write_text("beside")
    assert read(tmp_path) == ["of another name", *TEXTS, "beside"]


@pytest.mark.parametrize(
    "texts",
    [
        pyarrow.array(["one", "two"]).dictionary_encode(),
        pyarrow.array([b"one", b"two"]),
        pyarrow.array([["one"], ["two"]]),
        pyarrow.nulls(2),
    ],
    ids=["dictionary", "bytes", "lists", "nothing"],
)
def test_no_other_column_is_taken_for_a_text_that_is_none(texts: Any, tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", url=["https://one", "https://two"], text=texts)
    with pytest.raises(UserError, match=r'the column "text" is no text; of text are: url \(data --column NAME\)$'):
        read(path)
    assert len(list(sources.find(path, "url").documents())) == 2


def test_a_column_s_name_may_hold_a_dot(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", **{"a": [{"b": "a part of another"}], "a.b": ["the column"]})
    assert list(sources.find(path, "a.b").documents()) == [b"the column"]


def test_the_text_may_stand_in_another_column(tmp_path: Path, caddie: Any) -> None:
    two = table(tmp_path / "two.parquet", title=["a"], body=[f"long {'x' * 80}"])
    lines = tmp_path / "two.jsonl"
    lines.write_text(json.dumps({"title": "a", "body": "of a line"}) + "\n")
    for column, texts in (("title", ["a", "a"]), ("body", ["of a line", f"long {'x' * 80}"])):
        assert [text.decode() for path in (lines, two) for text in sources.find(path, column).documents()] == texts
    assert len({sources.find(two, column).fingerprint() for column in (None, "title", "body")}) == 3
    with pytest.raises(UserError, match=r'no column "no" of text; of text are: title, body'):
        list(sources.find(two, "no").documents())
    with pytest.raises(UserError, match='must be an object with the key "no"'):
        list(sources.find(lines, "no").documents())
    many = table(
        tmp_path / "many.parquet", title=[f"t{at}" for at in range(40)], body=[f"body {at}" for at in range(40)]
    )
    settings = ("data.tokenizer=RawBytes", "model.vocabulary=257", "--column", "body", "--out", tmp_path / "out")
    ended = caddie("data", many, *settings, "--json", "--quiet")
    assert ended.status == 0, ended.err
    assert all(text.startswith(b"body") for text in sources.find(tmp_path / "out" / "validation.jsonl.zst").documents())
    (tmp_path / "plain.txt").write_text("no columns")
    for source, message in ((tmp_path / "plain.txt", "there is no Parquet"), (tmp_path / "out", "holds tokens")):
        ended = caddie("data", source, "--column", "body")
        assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err
        assert message in ended.err
    ended = caddie("data", "--fineweb", "sp1024", "--column", "body")
    assert (ended.status, ended.err.count("\n")) == (2, 1), ended.err


def test_parquet_is_read_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first document comes before the last rows are read, which are damaged."""
    path = table(tmp_path / "a.parquet", text=[f"{number} {'x' * 1_000}" for number in range(2_000)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40_000] = bytes(40_000)
    path.write_bytes(data)
    documents = sources.find(path).documents()
    assert next(documents).startswith(b"0 x")
    with pytest.raises(UserError, match=r"a.parquet: cannot be read \(.*\); save it again or leave it out") as caught:
        list(documents)
    assert "\n" not in str(caught.value)


def test_parquet_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = table(tmp_path / "two.parquet", title=["a"], body=["b"])
    numbers = table(tmp_path / "numbers.parquet", number=[1])
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and no more")
    cases = [
        (two, r'no column "text" of text, and not a single one; of text are: title, body \(data --column NAME\)'),
        (numbers, "of text are: none"),
        (tmp_path / "no.parquet", "cannot be read"),
    ]
    for path, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            read(path)
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install pyarrow"):
        read(two)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {
        "README.md": b"# texts",
        "data/train-00000-of-00002.parquet": parquet_bytes(tmp_path, TEXTS[:200]),
        "data/train-00001-of-00002.parquet": parquet_bytes(tmp_path, TEXTS[200:400]),
        "data/test-00000-of-00001.parquet": parquet_bytes(tmp_path, TEXTS[400:]),
        "other/extra.jsonl": json.dumps({"text": "one line"}).encode() + b"\n",
    }
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with serving(files, NAME) as server:
        yield server


def test_a_data_set_of_the_hub_is_a_text(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = RecordedProgress()
    arguments = {"folder": tmp_path / "out", "tokenizer_source": RawBytes(), "vocabulary": 257}
    found = prepare(f"hf:{NAME}", **arguments, validation_fraction=0.1, progress=told)  # type: ignore[arg-type]
    assert found.manifest.train.documents + found.manifest.validation.documents == 400
    assert found.manifest.origin == Origin(NAME, "main", "a" * 40)
    assert found.manifest.name == "texts"
    assert hub.fetched() == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert any(line.startswith("train-00001-of-00002.parquet") and "(2 of 2)" in line for line in told.notes)
    hub.asked.clear()
    prepare(f"hf:{NAME}", **arguments, validation_fraction=0.1, progress=SILENT)  # type: ignore[arg-type]
    assert hub.asked == [], "it is all there"
    first = sources.find(f"hf:{NAME}").fingerprint()
    monkeypatch.chdir(Path.cwd().rename(tmp_path / "moved"))
    assert sources.find(f"hf:{NAME}").fingerprint() == first, "a moved project has the same text"


def test_a_split_is_a_folder_or_the_beginning_of_a_name(hub: Hub) -> None:
    assert read(f"hf:{NAME}:test") == TEXTS[400:]
    assert hub.fetched() == ["test-00000-of-00001.parquet"]
    assert read(f"hf:{NAME}:other") == ["one line"]
    assert read(f"hf:{NAME}:data/train") == TEXTS[:400]
    with pytest.raises(UserError, match=r"me/texts has no split tra: its files are data/.*, other/extra.jsonl$"):
        read(f"hf:{NAME}:tra")


def test_a_data_set_without_training_split_is_taken_whole_and_says_so(hub: Hub) -> None:
    assert sources.find(f"hf:{NAME}").description.endswith(", train")
    hub.files = {name: data for name, data in hub.files.items() if "train" not in name}
    for kept in Path("data/hub").glob("*/source.json"):
        kept.unlink()
    assert sources.find(f"hf:{NAME}").description.endswith(", all files")


def test_files_come_as_they_are_read(hub: Hub) -> None:
    documents = sources.find(f"hf:{NAME}").documents()
    assert hub.fetched() == []
    next(documents)
    assert hub.fetched() == ["train-00000-of-00002.parquet"]


def test_a_data_set_without_rows_is_taken_from_its_conversion(hub: Hub) -> None:
    converted = {"default/train/0000.parquet": hub.files["data/test-00000-of-00001.parquet"]}
    hub.files = {"images.zip": b"x"}
    hub.branches["refs/convert/parquet"] = "b" * 40
    with pytest.raises(UserError, match=r"me/texts has no split train|no rows"):
        read(f"hf:{NAME}:train")
    for kept in Path("data/hub").glob("*--parquet/source.json"):
        kept.unlink()
    hub.files = converted
    assert read(f"hf:{NAME}:train") == TEXTS[400:]


def test_what_the_hub_does_not_have_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in (("me/absent", "the hub does not have the list of files"), ("a b", "no data set; name one")):
        with pytest.raises(UserError, match=message) as caught:
            read(f"hf:{name}")
        assert "\n" not in str(caught.value)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"cannot fetch the list of files .*; the same command continues") as caught:
        read("hf:me/other")
    assert "\n" not in str(caught.value)
