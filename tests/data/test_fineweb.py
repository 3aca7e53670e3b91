"""Fetching published shards, from a stand-in server on this machine."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from recording import RecordedProgress
from stand_in_hub import Hub, serving

from caddie.cli import app
from caddie.data import fineweb
from caddie.data.corpus import Corpus
from caddie.data.fineweb import Place, fetch_documents, fetch_fineweb
from caddie.data.hub import Origin
from caddie.data.shards import open_shard, split_documents, write_shard
from caddie.data.tokenizers import CaseOps, RawBytes, SentencePieceBPE, Tokenizer
from caddie.errors import UserError
from caddie.recipes.catalog import find
from caddie.run.resolve_corpus import describe, fetch_corpus
from caddie.run.stages import held_out_text
from caddie.runtime.progress import SILENT, Progress

pytest.importorskip("huggingface_hub")

ROOT = Path(__file__).resolve().parent.parent.parent
SHARDS = "datasets/datasets/fineweb10B_sp300/fineweb_"
MODEL = "datasets/tokenizers/fineweb_300_bpe.model"
WORDS = ["a", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dogs", "that", "rain", "made", "sleepy"]


def documents(seed: int) -> list[bytes]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, 40)).encode() for _ in range(30)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return SentencePieceBPE().build(300, lambda: documents(0))


@pytest.fixture(scope="module")
def published(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Path in the repository to content."""
    folder = tmp_path_factory.mktemp("shard")
    return {MODEL: tokenizer.serialize(), **shard_files(SHARDS, tokenizer, folder, train=3)}


def shard_files(prefix: str, tokenizer: Tokenizer, folder: Path, train: int = 1) -> dict[str, bytes]:
    """Path to content of a validation shard and of shards to train on, each of other documents."""
    files, path = dict[str, bytes](), folder / "shard.bin"
    for seed, name in enumerate(["val_000000", *(f"train_{number:06d}" for number in range(train))]):
        runs = [np.append(np.uint16(tokenizer.bos), ids) for ids in tokenizer.encode_many(documents(seed))]
        write_shard(path, np.concatenate(runs))
        files[f"{prefix}{name}.bin"] = path.read_bytes()
    return files


@pytest.fixture(autouse=True)
def small_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fineweb, "HELD_OUT", 30)
    monkeypatch.setitem(fineweb.VARIANTS, "sp300", fineweb._sentencepiece(300))


@pytest.fixture
def hub(published: dict[str, bytes]) -> Iterator[Hub]:
    with serving(published) as server:
        yield server


def fetch(hub: Hub, folder: Path, shards: int = 2, variant: str = "sp300", progress: Progress = SILENT) -> Corpus:
    return fetch_fineweb(variant, shards, folder, progress)


@pytest.mark.long
def test_the_first_shards_become_a_corpus(hub: Hub, tmp_path: Path, tokenizer: Tokenizer) -> None:
    told = RecordedProgress()
    found = fetch(hub, tmp_path / "out", progress=told)
    assert found.folder == tmp_path / "out"
    assert hub.fetched() == [
        "fineweb_300_bpe.model",
        "fineweb_val_000000.bin",
        "fineweb_train_000000.bin",
        "fineweb_train_000001.bin",
    ]
    assert any(line.startswith("fineweb_train_000001.bin") and line.endswith("bytes (3 of 3)") for line in told.notes)
    assert found.tokenizer().sha256 == tokenizer.sha256
    assert [shard.file for shard in found.manifest.validation.shards] == [f"{SHARDS}val_000000.bin"]
    assert len(found.train_shards()) == 2
    assert found.manifest.validation.source_bytes == sum(map(len, documents(0)))
    assert found.manifest.byte_source == "table"
    found.check_disjoint()
    assert found.manifest.origin == Origin("willdepueoai/parameter-golf", "main", "a" * 40)
    assert Corpus.load(found.folder).manifest == found.manifest


@pytest.mark.long
def test_complete_files_are_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path, 1)
    hub.asked.clear()
    assert len(fetch(hub, tmp_path, 1).train_shards()) == 1
    assert hub.asked == []
    assert len(fetch(hub, tmp_path, 3).train_shards()) == 3
    assert hub.fetched() == ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert len(fetch(hub, tmp_path, 2).train_shards()) == 2


def test_a_stopped_run_continues(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = hub.files[name := f"{SHARDS}train_000001.bin"]
    hub.files[name] = b"<html>busy</html>"
    with pytest.raises(UserError, match=r"train_000001.bin: not a token shard") as caught:
        fetch(hub, tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no corpus"):
        Corpus.load(tmp_path)
    (tmp_path / "source.json").unlink()  # which has its wrong size
    hub.files[name] = kept
    hub.asked.clear()
    assert len(fetch(hub, tmp_path).train_shards()) == 2
    assert hub.fetched() == ["fineweb_train_000001.bin"]


def test_a_file_that_the_hub_lost_is_one_line(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path, 1)
    del hub.files[f"{SHARDS}train_000001.bin"]
    with pytest.raises(UserError, match=r"the hub does not have datasets.*train_000001.bin of willdepueoai") as caught:
        fetch(hub, tmp_path, 2)
    assert "\n" not in str(caught.value)


def test_a_dropped_connection_resumes_within_the_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda seconds: None))
    name = f"{SHARDS}train_000000.bin"
    hub.drops[name] = 1500
    found = fetch(hub, tmp_path, 1)
    assert [wanted for method, path, wanted in hub.asked if method == "GET" and path == name] == [None, "bytes=1024-"]
    assert (tmp_path / name).read_bytes() == hub.files[name]
    found.check_shards("train")


def test_a_file_cut_short_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path, 1)
    path = tmp_path / f"{SHARDS}val_000000.bin"
    path.write_bytes(path.read_bytes()[:-10])
    hub.asked.clear()
    fetch(hub, tmp_path, 1)
    assert hub.fetched() == ["fineweb_val_000000.bin"]
    assert len(open_shard(path)) > 0


def test_what_cannot_be_had_is_one_line(hub: Hub, tmp_path: Path) -> None:
    cases = [
        (
            "sp9999",
            1,
            "no variant sp9999; there are byte260, .* and documents.*; a --repository or --local of yours may",
        ),
        ("caseops", 1, r"no variant caseops; there are byte260, .* and documents \(did you mean caseops8192"),
        ("sp300", 4, "has 3 training shards of sp300, not 4"),
    ]
    for variant, shards, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            fetch(hub, tmp_path, shards, variant)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="willdepueoai/parameter-golf has sp300, not fineweb10B_sp301"):
        fetch_fineweb("sp301", 1, tmp_path, SILENT, Place(repository="willdepueoai/parameter-golf"))
    del hub.files[MODEL]
    with pytest.raises(UserError, match=r"no file fineweb_300_bpe.model, the tokenizer of sp300"):
        fetch(hub, tmp_path / "other")


def test_a_repository_cannot_lead_out_of_the_folder(hub: Hub, tmp_path: Path) -> None:
    for number, path in enumerate(("../../escaped.model", "/etc/passwd")):
        hub.files[path] = b"x"
        with pytest.raises(UserError, match="leads out of the repository"):
            fetch(hub, tmp_path / str(number))
        del hub.files[path]


def test_all_files_are_of_the_commit_that_was_first_got(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path, 1)
    hub.branches["main"] = "b" * 40
    with pytest.raises(UserError, match=r"the hub does not have .*train_000001.bin"):
        fetch(hub, tmp_path, 2)  # the commit is gone: files of the next are not mixed in
    hub.branches["old"] = "a" * 40
    found = fetch(hub, tmp_path, 2)
    assert found.manifest.origin is not None
    assert (found.manifest.origin.revision, found.manifest.origin.commit) == ("main", "a" * 40)
    assert fetch_fineweb("sp300", 2, tmp_path, SILENT, Place(revision="a" * 40)).manifest == found.manifest
    for place in (Place(revision="old"), Place(repository="me/mine")):
        with pytest.raises(
            UserError, match=r"holds files of willdepueoai/parameter-golf at main \(aaaaaaaaaaaa\), not"
        ):
            fetch_fineweb("sp300", 1, tmp_path, SILENT, place)


def test_another_repository_and_revision(published: dict[str, bytes], tmp_path: Path) -> None:
    with serving(published, "me/mine") as hub:
        hub.branches = {"v2": "c" * 40}
        place = Place("me/mine", "v2")
        found = fetch_fineweb("sp300", 1, tmp_path, SILENT, place)
        assert found.manifest.origin == Origin("me/mine", "v2", "c" * 40)
        for wrong in (Place("me/mine"), Place("me/yours")):
            with pytest.raises(UserError, match=r"the hub does not have .*; check repository and revision") as caught:
                fetch_fineweb("sp300", 1, tmp_path / "other", SILENT, wrong)
            assert "\n" not in str(caught.value)


def test_a_copy_on_disk_is_used_where_it_lies(
    published: dict[str, bytes], tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)
    mirror = copy_of(published, tmp_path / "mirror")
    found = fetch_fineweb("sp300", 2, tmp_path / "out", SILENT, Place(local=mirror))
    assert found.manifest.origin is None
    assert found.manifest.source == str(mirror / SHARDS.rpartition("/")[0])
    assert found.manifest.validation.source_bytes == sum(map(len, documents(0)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "documents.npz",
        "manifest.json",
        "tokenizer.bin",
    ]
    with pytest.raises(UserError, match="no such folder"):
        fetch_fineweb("sp300", 1, tmp_path / "out", SILENT, Place(local=tmp_path / "absent"))
    (mirror / f"{SHARDS}train_000000.bin").unlink()
    with pytest.raises(UserError, match=r"mirror lacks shard 0 of train in fineweb10B_sp300"):
        fetch_fineweb("sp300", 1, tmp_path / "out", SILENT, Place(local=mirror))


def test_a_cut_validation_set_is_refused(published: dict[str, bytes], tmp_path: Path, tokenizer: Tokenizer) -> None:
    """By its header, and, where the header agrees, by the documents; the training shards are not read then."""
    mirror = copy_of(published, tmp_path / "mirror")
    path = mirror / f"{SHARDS}val_000000.bin"
    whole = open_shard(path).copy()
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"val_000000.bin: .* bytes, but its .* tokens need .*; copy it again"):
        fetch_fineweb("sp300", 1, tmp_path / "out", SILENT, Place(local=mirror))
    write_shard(path, whole[: np.flatnonzero(whole == tokenizer.bos)[10]])
    (mirror / f"{SHARDS}train_000000.bin").write_bytes(b"")
    with pytest.raises(UserError, match="holds out 10 documents, and the contest 30: a part of its validation set"):
        fetch_fineweb("sp300", 1, tmp_path / "out", SILENT, Place(local=mirror))


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000))
    with pytest.raises(UserError, match=r"has 0.0 GB free, and the files take 0.0 GB"):
        fetch(hub, tmp_path)
    assert hub.fetched() == []


def copy_of(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


# Variants


def test_the_table_names_one_place_for_each_variant() -> None:
    known = {"sp1024", "sp2048", "sp4096", "sp8192", "byte260", "caseops8192"}
    assert known == set(fineweb.VARIANTS) - {"sp300"}, "which is of these tests"
    for name, variant in fineweb.VARIANTS.items():
        assert variant.dataset.startswith("fineweb10B_")
        assert str(variant.vocabulary) in name
        assert re.fullmatch(r"[\w-]+/[\w-]+", variant.repository)


def test_bytes_as_the_contest_numbers_them(tmp_path: Path) -> None:
    tokenizer = RawBytes().build(260, list)
    files = shard_files("datasets/datasets/fineweb10B_byte260/fineweb_", tokenizer, tmp_path)
    found = fetch_fineweb("byte260", 1, tmp_path / "out", SILENT, Place(local=copy_of(files, tmp_path / "mirror")))
    assert (found.manifest.tokenizer.vocabulary, found.manifest.tokenizer.bos) == (260, 1)
    assert found.manifest.validation.source_bytes == sum(map(len, documents(0)))
    assert found.validation_tokens()[:2].tolist() == [1, documents(0)[0][0] + 4]


@pytest.fixture
def caseops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Tokenizer]:
    """A copy on disk of shards under CaseOps, whose side-car counts one byte more for one id."""
    variant = fineweb.VARIANTS["caseops8192"]
    tokenizer = CaseOps().build(300, lambda: documents(0))
    monkeypatch.setitem(fineweb.VARIANTS, "caseops8192", replace(variant, vocabulary=300))
    folder = f"datasets/datasets/{variant.dataset}"
    model = {f"datasets/tokenizers/{variant.tokenizer}": tokenizer.serialize()}
    mirror = copy_of(model | shard_files(f"{folder}/fineweb_", tokenizer, tmp_path), tmp_path / "mirror")
    counts = tokenizer.byte_lengths(open_shard(mirror / folder / "fineweb_val_000000.bin")).astype(np.uint16)
    counts[5] += 1
    write_shard(mirror / folder / "fineweb_val_bytes_000000.bin", counts)
    return mirror, tokenizer


def test_caseops_counts_the_bytes_of_its_side_car(caseops: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    mirror, tokenizer = caseops
    found = fetch_fineweb("caseops8192", 1, tmp_path / "out", SILENT, Place(local=mirror))
    split, text_bytes = found.manifest.validation, sum(map(len, documents(0)))
    assert found.manifest.byte_source == "sidecar"
    assert (split.source_bytes, split.normalized_bytes) == (text_bytes + 1, text_bytes)
    assert found.tokenizer().sha256 == tokenizer.sha256
    assert held_out_text(Corpus.load(found.folder)).source_bytes == text_bytes + 1
    assert describe(found).endswith("bytes by the side-cars (no text)")
    found.count_again()
    found.check_shards("validation")
    (shard,) = split.byte_counts
    changed = open_shard(Path(shard.file)).copy()
    changed[7] += 1
    write_shard(Path(shard.file), changed)
    with pytest.raises(UserError, match=f"states {text_bytes + 1:,} source_bytes for validation; there are"):
        Corpus.load(found.folder).count_again()
    with pytest.raises(UserError, match=r"val_bytes_000000.bin: changed since it was prepared"):
        found.check_shards("validation")


def test_a_side_car_that_does_not_fit_is_refused(caseops: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    mirror, _ = caseops
    (sidecar,) = mirror.rglob("fineweb_val_bytes_*.bin")
    write_shard(sidecar, open_shard(sidecar)[:-1].copy())
    with pytest.raises(UserError, match=r"byte counts for .* held-out tokens; fetch both again"):
        fetch_fineweb("caseops8192", 1, tmp_path / "out", SILENT, Place(local=mirror))
    sidecar.unlink()
    with pytest.raises(UserError, match="has 1 validation shards of caseops8192 and 0 side-cars"):
        fetch_fineweb("caseops8192", 1, tmp_path / "out", SILENT, Place(local=mirror))


def test_a_manifest_without_its_side_car_is_refused(caseops: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    found = fetch_fineweb("caseops8192", 1, tmp_path / "out", SILENT, Place(local=caseops[0]))
    path = found.folder / "manifest.json"
    facts = json.loads(path.read_text())
    facts["validation"]["byte_counts"] = []
    path.write_text(json.dumps(facts))
    with pytest.raises(UserError, match="bytes of sidecar, which do not fit its side-cars"):
        Corpus.load(found.folder)


def test_manifests_of_earlier_versions_are_read(hub: Hub, tmp_path: Path) -> None:
    found = fetch(hub, tmp_path, 1)
    facts = json.loads((tmp_path / "manifest.json").read_text())
    del facts["origin"], facts["train"]["byte_counts"], facts["validation"]["byte_counts"]
    (tmp_path / "manifest.json").write_text(json.dumps(facts))
    assert Corpus.load(tmp_path).manifest == replace(found.manifest, origin=None)


# Documents


def documents_of(texts: list[bytes], folder: Path, **facts: object) -> Path:
    """Return a copy on disk of a documents' file with its side-car."""
    lines = "".join(json.dumps({"text": text.decode()}) + "\n" for text in texts).encode()
    stated = {"docs_sha256": sha256(lines).hexdigest(), "docs_val": 30, **facts}
    files = {fineweb.DOCUMENTS: lines, fineweb.DOCUMENTS_FACTS: json.dumps(stated).encode()}
    return copy_of({f"datasets/{name}": content for name, content in files.items()}, folder)


def corpus_of(mirror: Path, folder: Path, shards: int = 1) -> Corpus:
    return fetch_documents(shards, folder, folder / "unused", RawBytes(), 257, SILENT, Place(local=mirror))


def test_the_first_documents_are_held_out_and_counted_in_bytes(tmp_path: Path) -> None:
    texts = [b"%03d " % number + b"text" * (number % 5) for number in range(100)]
    texts[60], texts[70] = texts[50], texts[3]  # one that is trained on already, one that is held out
    found = corpus_of(documents_of(texts, tmp_path / "mirror"), tmp_path / "out")
    assert found.validation_documents() == texts[:30]
    assert found.manifest.byte_source == "documents"
    assert found.manifest.validation.source_bytes == sum(map(len, texts[:30]))
    trained = [texts[number] for number in range(30, 100) if number not in (60, 70)]
    tokens = np.concatenate(found.train_shards())
    assert [run[1:].astype(np.uint8).tobytes() for run in split_documents([tokens], 256)] == trained
    assert (found.manifest.train.documents, found.manifest.duplicates_removed) == (68, 2)
    found.check_disjoint()
    found.count_again()


def test_a_corpus_in_a_named_folder_is_not_replaced(tmp_path: Path) -> None:
    recipe = find("tiny").but({"data.tokenizer": RawBytes(), "model.vocabulary": 257})
    given: dict[str, Any] = {"tokenizer": None, "out": tmp_path / "out", "progress": SILENT}
    one, other = (
        Place(local=documents_of([f"{name} {number}".encode() for number in range(60)], tmp_path / name))
        for name in ("one", "other")
    )
    first = fetch_corpus("documents", 1, recipe, place=one, **given)
    with pytest.raises(UserError, match=r"out holds a corpus of another text, .*; name another folder, or delete it$"):
        fetch_corpus("documents", 1, recipe, place=other, **given)
    assert Corpus.load(tmp_path / "out").manifest == first.manifest


def test_training_takes_so_many_full_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caddie.data.prepare.SHARD_TOKENS", 60)
    monkeypatch.setattr("caddie.data.prepare.BATCH_BYTES", 25)
    texts = [b"%09d" % number for number in range(60)]  # six to a shard, with BOS
    mirror = documents_of(texts, tmp_path / "mirror")
    found = corpus_of(mirror, tmp_path / "out", shards=2)
    assert [shard.tokens for shard in found.manifest.train.shards] == [60, 60]
    assert found.manifest.train.documents == 12
    assert found.manifest.validation.documents == 30
    found.check_disjoint()
    inode = (tmp_path / "out" / "manifest.json").stat().st_ino
    assert corpus_of(mirror, tmp_path / "out", shards=2).manifest == found.manifest
    assert (tmp_path / "out" / "manifest.json").stat().st_ino == inode
    assert len(corpus_of(mirror, tmp_path / "out", shards=9).train_shards()) == 5


def test_documents_that_are_not_those_of_the_side_car_are_refused(tmp_path: Path) -> None:
    texts = [b"%d" % number for number in range(40)]
    cases: list[tuple[dict[str, object], str]] = [
        ({"docs_sha256": "0" * 64}, "is not the file that docs_selected.source_manifest.json describes"),
        ({"docs_val": 10_000}, "holds out 10000 documents, and the contest 30"),
    ]
    for number, (facts, message) in enumerate(cases):
        with pytest.raises(UserError, match=message) as caught:
            corpus_of(documents_of(texts, tmp_path / str(number), **facts), tmp_path / "out")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    mirror = documents_of(texts[:30], tmp_path / "few")
    with pytest.raises(UserError, match="has 30 documents, and the first 30 are held out"):
        corpus_of(mirror, tmp_path / "out")
    (mirror / "datasets" / fineweb.DOCUMENTS_FACTS).write_text("[]")
    with pytest.raises(UserError, match="no side-car with docs_sha256"):
        corpus_of(mirror, tmp_path / "out")
    (mirror / "datasets" / fineweb.DOCUMENTS_FACTS).unlink()
    with pytest.raises(UserError, match=r"has no docs_selected.jsonl with its docs_selected.source_manifest.json"):
        corpus_of(mirror, tmp_path / "out")


def test_a_tokenizer_is_trained_on_what_is_not_held_out(tmp_path: Path) -> None:
    texts = [b"held out " * 20] * 1 + [b"HELD %d" % number for number in range(29)] + documents(0) + documents(1)
    mirror = documents_of(texts, tmp_path / "mirror")
    found = fetch_documents(
        1, tmp_path / "out", tmp_path / "docs", SentencePieceBPE(), 290, SILENT, Place(local=mirror)
    )
    assert found.tokenizer().sha256 == SentencePieceBPE().build(290, lambda: documents(0) + documents(1)).sha256


# The verb


def test_the_verb_fetches_shards_and_documents(
    published: dict[str, bytes], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy_of(published, Path("mirror"))
    documents_of(documents(0) + documents(1), Path("mirror"))
    copy_of({"own.model": tokenizer.serialize()}, Path())

    def data(*arguments: str) -> Corpus:
        printed = CliRunner().invoke(app, ["data", *arguments, "--local", "mirror", "--json", "--quiet"])
        assert printed.exception is None, printed.exception
        return Corpus.load(Path(json.loads(printed.stdout)["folder"]))

    shards = data("--fineweb", "sp300", "--shards", "2")
    assert shards.folder == tmp_path / "data" / "fineweb-sp300"
    assert len(shards.train_shards()) == 2
    own = data("--fineweb", "documents", "--tokenizer", "own.model")
    assert own.folder.parent == tmp_path / "data"
    assert own.validation_documents() == documents(0)
    assert own.tokenizer().sha256 == tokenizer.sha256
    raw = data("--fineweb", "documents", "data.tokenizer=RawBytes", "model.vocabulary=257", "--out", "mine")
    assert (raw.folder.name, raw.manifest.tokenizer.kind) == ("mine", "bytes")


# Without a network


def test_no_server_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*arguments: object, **settings: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", offline)
    message = r"\(no route\); the same command continues; without a network, .* --local DIR"
    with pytest.raises(UserError, match=message) as caught:
        fetch_fineweb("sp300", 1, tmp_path, SILENT)
    assert "\n" not in str(caught.value)


def test_the_library_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install huggingface_hub"):
        fetch_fineweb("sp300", 1, tmp_path, SILENT)


def test_the_environment_is_changed_for_the_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def download(*arguments: object, **settings: object) -> None:
        seen.extend(os.environ[name] for name in ("HF_HOME", "HF_XET_CACHE"))
        raise RuntimeError

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", download)
    monkeypatch.setenv("HF_HOME", "mine")
    monkeypatch.delenv("HF_XET_CACHE", raising=False)
    with pytest.raises(UserError, match="RuntimeError"):
        fetch_fineweb("sp300", 1, tmp_path, SILENT)
    assert [Path(value).is_relative_to(tmp_path) for value in seen] == [True, True]
    assert os.environ["HF_HOME"] == "mine"
    assert "HF_XET_CACHE" not in os.environ


@pytest.mark.long
def test_nothing_is_written_at_home(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    script = "import sys; from pathlib import Path; from caddie.data import fineweb; fineweb.HELD_OUT = 30\n"
    script += "from caddie.report.display import Display\n"
    script += "place = fineweb.Place(repository=sys.argv[2])\n"
    script += "fineweb.fetch_fineweb('sp300', 1, Path(sys.argv[1]), Display(quiet=True), place)"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment = {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url}
    command = [sys.executable, "-c", script, str(tmp_path / "out"), hub.repository]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(home.rglob("*")) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]
    assert all(path.startswith(("main", "datasets/")) for _, path, _ in hub.asked)
