"""The source that an artifact needs works alone, gives the same score, and is nothing but data to whoever reads it."""

import ast
import inspect
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packed_models import write_artifact
from processes import CONTEXT

from caddie.errors import UserError
from caddie.model import GPT
from caddie.pack import artifact as artifacts
from caddie.pack import container
from caddie.pack import source_bundle as bundle
from caddie.pack.artifact import Artifact
from caddie.pack.codecs import Brotli, Lzma, Stored
from caddie.pack.coding import Packed
from caddie.pack.compress import Pack
from caddie.pack.source_bundle import TRAINING, describe_source, installed_bytes, script, source_needed, unpack
from caddie.recipes.catalog import find
from caddie.score import Scoring

ROOT = Path(__file__).parent.parent.parent
SMALL = {
    "vocabulary": 257,
    "width": 16,
    "depth": 2,
    "block.attention.heads": 2,
    "block.attention.key_value_heads": 1,
    "block.mlp.hidden": 16,
}


PACKED = Pack(fit=None, coding=Packed())
"""Quickly done, for what does not ask how the weights are coded."""


def packed(path: Path, source: container.Section | None, config: Pack = Pack(fit=None)) -> Artifact:
    """An artifact of random weights."""
    return write_artifact(path, GPT().but(SMALL), config, scoring=Scoring(sequence_length=32, stride=8), source=source)


@pytest.fixture(scope="module")
def carrying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that carries its source."""
    path = tmp_path_factory.mktemp("bundle") / "artifact.caddie"
    return packed(path, source_needed().section(artifacts.SOURCE)).path


def told(path: Path) -> Any:
    """What a program says of an artifact: score of two documents, tokens, and the fields of every kind of setting."""
    import numpy as np

    from caddie.config import Config, field_types, variants
    from caddie.pack.artifact import load
    from caddie.score import Text, score

    artifact = load(path)
    documents = [b"What is scored here is not much, but it is scored.", b"And so is this, in a document of its own."]
    bos = artifact.tokenizer.bos
    tokens = np.concatenate([np.append(np.uint16(bos), ids) for ids in artifact.tokenizer.encode_many(documents)])
    size = sum(map(len, documents))
    found = score(artifact.model, Text(tokens, bos, size, size, size), artifact.scoring)
    kinds = {
        name: {field: repr(kind) for field, kind in field_types(cls).items()} for name, cls in variants(Config).items()
    }
    return found.bits_per_byte, found.tokens, kinds


def alone(folder: Path, artifact: Path, out: Path) -> None:
    """Write the same, and the files of caddie's modules, of a process whose only caddie is the one in `folder`."""
    for name in [name for name in sys.modules if name.split(".")[0] == "caddie"]:
        del sys.modules[name]
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
    sys.path = [str(folder), *(path for path in sys.path if path and not Path(path, "caddie").exists())]
    found = told(artifact)
    files = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "caddie"]
    out.write_text(json.dumps([found, files]))


FRESH = f"""
import json, sys
from pathlib import Path
from typing import Any

{inspect.getsource(told)}

{inspect.getsource(alone)}

alone(*map(Path, sys.argv[1:]))
"""


def forked(*given: Path) -> None:
    """`alone` in a process that has imported PyTorch already."""
    process = CONTEXT.Process(target=alone, args=given)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def fresh(*given: Path) -> None:
    """`alone` in a process that has imported nothing."""
    command = [sys.executable, "-I", "-c", FRESH, *map(str, given)]
    done = subprocess.run(command, cwd=given[0], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_was_bundled_comes_back(tmp_path: Path) -> None:
    files = {"caddie/__init__.py": "", "caddie/model/head.py": "NAMES = ('\u00e9',)\n" * 50}
    small = bundle.Bundle(files, (), json.dumps(files).encode())
    container.write(tmp_path / "file", [small.section(artifacts.SOURCE)])
    assert small.code_bytes < len(small.data) / 4
    unpack(container.read(tmp_path / "file").sections[artifacts.SOURCE], tmp_path / "carried")
    found = {path for path in (tmp_path / "carried").rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path / "carried").as_posix(): path.read_text("utf-8") for path in found} == files


@pytest.mark.long
@pytest.mark.parametrize("run", [forked, pytest.param(fresh, marks=pytest.mark.slow)])
def test_it_works_alone_and_gives_the_same_score(
    run: Callable[[Path, Path, Path], None], carrying: Path, tmp_path: Path
) -> None:
    unpack(container.read(carrying).sections[artifacts.SOURCE], tmp_path / "carried")
    run(tmp_path / "carried", carrying, tmp_path / "told")
    (bits, tokens, kinds), loaded = json.loads((tmp_path / "told").read_text())
    here_bits, here_tokens, here_kinds = told(carrying)
    assert (bits, tokens) == (here_bits, here_tokens)
    assert 4 < bits < 12
    assert tokens == 50 + 41 + 1
    assert len(kinds) > 10
    assert kinds.items() <= here_kinds.items(), "a setting lost its type"
    files = {Path(file).relative_to(tmp_path / "carried").as_posix() for file in loaded}
    assert "caddie/score/score.py" in files
    assert files <= set(source_needed().files)


@pytest.mark.long
def test_every_assertion_stays_and_no_docstring_does() -> None:
    for name, text in source_needed(TRAINING).files.items():
        stripped = list(ast.walk(ast.parse(text)))
        kinds = Counter(map(type, stripped))
        whole = Counter(map(type, ast.walk(ast.parse((ROOT / name).read_text()))))
        for kind in (ast.Assert, ast.Raise):
            if text:
                assert kinds[kind] == whole[kind], name
        for node in stripped:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                assert ast.get_docstring(node) is None, name
            if isinstance(node, ast.FunctionDef):
                assert node.returns is None, name


@pytest.mark.long
def test_bytes_are_those_of_the_smaller_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    found = source_needed()
    sizes = {codec: len(codec.encode(found.data)) for codec in (Brotli(), Lzma())}
    assert found.code_bytes == sizes[found.section("source").codec] == min(sizes.values())
    assert json.loads(found.data) == found.files
    written = sum((ROOT / name).stat().st_size for name in found.files)
    assert 0.1 * written < found.code_bytes < 0.25 * written
    for name in ("Brotli", "Lzma"):
        monkeypatch.setattr(bundle, name, Stored)  # made again, it is the same before any codec
    assert source_needed.__wrapped__().data == found.data


@pytest.mark.long
def test_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_strip", str)  # which takes long and changes nothing here
    needed = source_needed.__wrapped__
    files = set(needed().files)
    assert {f"caddie/{name}.py" for name in ("pack/artifact", "pack/container", "pack/codecs")} <= files
    assert {
        "caddie/pack/quantize/waterfilling.py",
        "caddie/pack/coding/entropy_model.py",
        "caddie/data/tokenizers/__init__.py",
    } <= files
    assert {"caddie/model/__init__.py", "caddie/score/score.py", "caddie/score/windows.py"} <= files
    for name in ("compress", "candidates", "fit", "calibrate"):
        assert f"caddie/pack/{name}.py" not in files, f"{name} is not needed to read"
    for folder in ("train", "inference", "verify", "recipes", "run", "lab", "board", "doctor", "cli"):
        assert not any(name.startswith(f"caddie/{folder}/") for name in files), folder
    for name in ("pack/source_bundle", "report/page", "report/display", "data/corpus"):
        assert f"caddie/{name}.py" not in files, name
    assert {"brotli", "constriction", "numpy", "sentencepiece", "torch", "zstandard"} <= set(needed().libraries)
    whole = set(needed(TRAINING).files)
    assert files < whole
    assert {f"caddie/{name}.py" for name in ("train/optim/muon", "submit/script", "ops/loss_kernels")} <= whole
    for folder in ("inference", "verify", "lab", "board", "doctor", "cli"):
        assert not any(name.startswith(f"caddie/{folder}/") for name in whole), folder
    for name in ("run/run", "recipes/catalog", "report/page", "submit/submit", "pack/source_bundle", "data/prepare"):
        assert f"caddie/{name}.py" not in whole, name
    assert not {"click", "jinja2", "rich", "scipy", "python_minifier"} & set(needed(TRAINING).libraries)


def test_imports_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "caddie"
    modules = {
        "__init__": "from caddie import whole_program",
        "whole_program": "",
        "start": "from caddie.deep.inner import A\nfrom caddie.wide import B\nif TYPE_CHECKING:\n import caddie.typed",
        "deep/__init__": "from caddie.deep import beside",
        "deep/inner": "class A:\n def late(self):\n  from caddie import lazy\n  import zlib, torch.nn as nn",
        "deep/beside": "",
        "wide/__init__": "from caddie.wide.part import B",
        "wide/part": "class B: pass",
        "lazy": "import caddie.start",
        "typed": "",
    }
    for name, text in modules.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(f'"""Words."""\n{text}\n')
    monkeypatch.setattr(bundle, "_PACKAGE", package)
    found = source_needed.__wrapped__(("caddie.start",))
    names = {name.removeprefix("caddie/").removesuffix(".py") for name in found.files}
    assert names == {"__init__", "start", "deep/__init__", "deep/inner", "lazy", "wide/__init__", "wide/part"}
    assert found.files["caddie/__init__.py"] == found.files["caddie/deep/__init__.py"] == ""
    assert found.files["caddie/wide/__init__.py"]
    assert found.libraries == ("torch",)


@pytest.mark.long
def test_the_ledger_counts_what_is_carried(carrying: Path, tmp_path: Path) -> None:
    plain, with_source = packed(tmp_path / "plain.caddie", None), artifacts.load(carrying)
    assert "source" not in plain.ledger
    assert with_source.ledger["source"] == source_needed().code_bytes
    assert with_source.file_bytes == carrying.stat().st_size
    extra = {name: size - plain.ledger.get(name, 0) for name, size in with_source.ledger.items()}
    assert {name for name, size in extra.items() if size} == {"source", "container"}
    assert 0 < extra["container"] < 50


@pytest.mark.long
def test_what_is_carried_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    poison = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nraise SystemExit\n".encode()
    for data in (poison, json.dumps({"caddie/pack/artifact.py": poison.decode()}).encode(), b"\xff\x00", b""):
        assert packed(tmp_path / "odd.caddie", container.Section(artifacts.SOURCE, data, Stored()), PACKED)
    assert not marker.exists()


def test_what_is_carried_is_bounded(tmp_path: Path) -> None:
    most = container.Section(artifacts.SOURCE, bytes(1 << 20), Brotli())
    assert packed(tmp_path / "most.caddie", most, PACKED).ledger["source"] < 100
    more = replace(most, data=bytes((1 << 20) + 1))
    with pytest.raises(UserError, match="carries 1,048,577 bytes of source, over the limit of 1,048,576"):
        packed(tmp_path / "more.caddie", more, PACKED)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff", "not a bundle"),
        (b"[" * 100_000, "not a bundle"),
        (b"[]", "not a bundle"),
        (b'{"caddie/a.py": 1}', "not a bundle"),
        (b'{"caddie/a.py": "", "caddie/../../evil.py": ""}', "not a module of caddie; nothing was written"),
        (b'{"/caddie/a.py": ""}', "not a module"),
        (b'{"caddie/a/.py": ""}', "not a module"),
        (b'{"caddie/a.pth": ""}', "not a module"),
        (b'{"torch/a.py": ""}', "not a module"),
        (b'{"caddie/a.py\\n": ""}', "not a module"),
    ],
)
def test_what_is_no_bundle_is_not_unpacked(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        unpack(data, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(UserError, match="in use"):
            unpack(b'{"caddie/a.py": "x=1"}', folder)
    unpack(b'{"caddie/a.py": "x=\\"\\u00e4\\"", "caddie/b/__init__.py": ""}', tmp_path / "new")
    assert (tmp_path / "new" / "caddie" / "a.py").read_text(encoding="utf-8") == 'x="ä"'
    assert (tmp_path / "new" / "caddie" / "b" / "__init__.py").read_bytes() == b""


def test_a_folder_that_cannot_be_made_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    long = json.dumps({f"caddie/{'a' * 300}/b.py": ""}).encode()
    for data, folder in ((b'{"caddie/a.py": ""}', tmp_path / "mine.txt" / "new"), (long, tmp_path / "new")):
        with pytest.raises(UserError, match=r"cannot make .*; name another folder"):
            unpack(data, folder)


def test_libraries_are_as_large_as_their_files() -> None:
    files = metadata.files("brotli")
    assert files is not None
    listed = [file for file in files if file.size is not None]
    assert installed_bytes("brotli") == sum(Path(str(file.locate())).stat().st_size for file in listed) > 100_000
    assert installed_bytes("a-library-that-nobody-has") is None


def test_a_process_speaks_of_one_program_while_its_source_is_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept beside the source for later processes would else be of neither program."""
    package = tmp_path / "caddie"
    kept = package / "__pycache__"
    kept.mkdir(parents=True)
    for name in ("__init__", "start"):
        (package / f"{name}.py").write_text("x = 1\n")
    monkeypatch.setattr(bundle, "_PACKAGE", package)
    monkeypatch.setattr(bundle, "source_needed", lambda roots: source_needed.__wrapped__(("caddie.start",)))
    monkeypatch.setattr(bundle, "_encoded_source", lambda: "")
    first = describe_source({})
    (package / "start.py").write_text("x = 'longer than before'\n")
    assert [path.name.split("-")[0] for path in kept.iterdir()] == ["source"]
    assert describe_source({}) == first
    bundle._modules.cache_clear()
    later = describe_source({})
    assert later["program_sha256"] != first["program_sha256"]
    assert later["needed_bytes"] > first["needed_bytes"]


@pytest.mark.long
def test_the_result_says_what_the_source_takes() -> None:
    recipe = find("best_record").to_json()
    found = describe_source(recipe)
    assert found["needed_bytes"] == source_needed().code_bytes
    assert found["needed_bytes"] + found["training_bytes"] == len(script(recipe))
    assert found["training_bytes"] - describe_source(find("tiny").to_json())["training_bytes"] > 500, "its settings"
    assert not found.keys() & {"other_script_bytes"}
    assert found["modules"]["caddie/pack/artifact.py"] == len(source_needed().files["caddie/pack/artifact.py"].encode())
    assert set(found["decoders"]) == set(source_needed().libraries)
