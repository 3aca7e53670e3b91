"""Runs on the hub: pushed in one commit, and pulled as an ARTIFACT whose bytes are checked."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TinyRun, call
from stand_in_hub import Hub, serving

from caddie.errors import UserError
from caddie.share.pull import DOWNLOADS, artifact_file, split_place
from caddie.share.push import run_files

NAME = "ada/tiny-lm"
PLACE = f"hf:{NAME}"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own upload


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub in place of the library's own, which takes uploads of whoever has the token."""
    from huggingface_hub import constants

    with serving({}, NAME, "model") as server:
        server.token = "hf_stand_in"
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a storage that no server here imitates
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv("HF_TOKEN", server.token)
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        yield server


def pushed(run: TinyRun, *options: str) -> dict[str, Any]:
    """Push a run, and return what was printed."""
    ended = call("push", run.folder, PLACE, "--json", *options)
    assert ended.err == ""
    return dict(json.loads(ended.out))


def front_matter(hub: Hub) -> dict[str, object]:
    return dict(yaml.safe_load(hub.files["README.md"].decode().split("---\n")[1]))


@pytest.mark.long
def test_a_pushed_run_has_its_score_from_the_hub(hub: Hub, tiny_run: TinyRun) -> None:
    facts = pushed(tiny_run)
    assert facts["files"].keys() == hub.files.keys()
    assert facts["commit"] == hub.branches["main"]
    assert len(hub.messages) == 1, "one commit holds all files"
    scored = call("score", PLACE, "--data", tiny_run.corpus, "--json", "--quiet")
    assert (scored.status, scored.err) == (0, "")
    assert json.loads(scored.out)["bits_per_byte"] == tiny_run.printed["bits_per_byte"]
    (artifact,) = DOWNLOADS.rglob("*.caddie")
    assert artifact.read_bytes() == tiny_run.artifact.read_bytes()
    assert artifact.parent.name == hub.branches["main"]


def test_every_verb_that_reads_an_artifact_takes_one_of_the_hub(hub: Hub, tiny_run: TinyRun) -> None:
    pushed(tiny_run)
    Path("file").write_text("abc abc abc")
    for words in (
        ["sample", PLACE, "--tokens", 4],
        ["compress", PLACE, "file"],
        ["decompress", f"{PLACE}@{hub.branches['main']}", "file.cz", "--out", "back"],
    ):
        ended = call(*words)
        assert ended.status == 0, (words, ended.err)
    assert Path("back").read_text() == "abc abc abc"
    assert call("sample", tiny_run.folder, "--tokens", 4).out == call("sample", tiny_run.artifact, "--tokens", 4).out


@pytest.mark.usefixtures("unprobed")
def test_verify_holds_it_against_the_cap_of_its_result(hub: Hub, tiny_run: TinyRun) -> None:
    pushed(tiny_run)
    cap = json.loads((tiny_run.folder / "result.json").read_text())["cap_bytes"]
    assert f"{cap:,}" in call("verify", PLACE).out


def test_the_card_says_what_it_is_and_how_to_check_it(hub: Hub, tiny_run: TinyRun) -> None:
    pushed(tiny_run, "--license", "mit", "--private")
    result = json.loads((tiny_run.folder / "result.json").read_text())
    data, text = front_matter(hub), hub.files["README.md"].decode()
    assert (data["library_name"], data["license"], data["pipeline_tag"]) == ("caddie", "mit", "text-generation")
    (model,) = data["model-index"]
    assert model["name"] == "tiny-lm"
    (metric,) = model["results"][0]["metrics"]
    assert (metric["type"], metric["name"]) == ("bits_per_byte", "bits per byte, sliding")
    assert metric["value"] == pytest.approx(result["bits_per_byte"], abs=1e-6)
    assert hub.visibility == "private"
    for part, size in result["ledger"]["parts"].items():
        assert f"| {part} | {size:,} |" in text
    for words in (f"caddie verify {PLACE}", f"caddie score {PLACE}", result["sha256"]["artifact"], result["why"]):
        assert words in text


def test_the_card_has_no_licence_unless_one_is_given(hub: Hub, tiny_run: TinyRun) -> None:
    pushed(tiny_run)
    assert "license" not in front_matter(hub)
    assert hub.visibility is None


def test_a_public_repository_gets_nothing_that_should_be_private(hub: Hub, tiny_run: TinyRun) -> None:
    pushed(tiny_run)
    refused = call("push", tiny_run.folder, PLACE, "--private")
    assert refused.status == 2
    assert "is public: make it private in its settings on the hub, or leave out --private" in refused.err
    assert len(hub.messages) == 1
    pushed(tiny_run)
    assert len(hub.messages) == 2


def test_a_private_repository_stays_so(hub: Hub, tiny_run: TinyRun) -> None:
    for _ in range(2):
        pushed(tiny_run, "--private")
    assert (hub.visibility, len(hub.messages)) == ("private", 2)


def test_the_recipe_goes_without_the_path_of_its_text(hub: Hub, tiny_run: TinyRun) -> None:
    from caddie.recipes.catalog import find

    pushed(tiny_run)
    Path("recipe.json").write_bytes(hub.files["recipe.json"])
    assert str(tiny_run.corpus) not in Path("recipe.json").read_text()
    kept = json.loads((tiny_run.folder / "result.json").read_text())["sha256"]["recipe"]
    assert find("recipe.json").sha256 == kept


def test_a_changed_byte_is_refused(hub: Hub, tiny_run: TinyRun) -> None:
    pushed(tiny_run)
    data = bytearray(hub.files["artifact.caddie"])
    data[len(data) // 2] ^= 1
    hub.files["artifact.caddie"], hub.history = bytes(data), {}
    refused = call("score", PLACE, "--data", tiny_run.corpus, "--quiet")
    assert (refused.status, refused.out) == (2, "")
    assert re.fullmatch(r"caddie: hf:ada/tiny-lm: artifact.caddie is not the file whose SHA-256 .*\n", refused.err)


def test_a_file_that_was_changed_here_is_refused_too(hub: Hub, tiny_run: TinyRun) -> None:
    pushed(tiny_run)
    artifact = artifact_file(Path(PLACE))
    data = bytearray(artifact.read_bytes())
    data[-1] ^= 1
    artifact.write_bytes(data)
    with pytest.raises(UserError, match="changed or damaged"):
        artifact_file(Path(PLACE))
    shutil.rmtree(artifact.parent)
    assert artifact_file(Path(PLACE)).read_bytes() == tiny_run.artifact.read_bytes()


def test_a_revision_is_what_it_was(hub: Hub, tiny_run: TinyRun) -> None:
    pushed(tiny_run)
    first = hub.branches["main"]
    pushed(tiny_run, "--license", "mit")
    second = hub.branches["main"]
    assert first != second
    assert [artifact_file(Path(place)).parent.name for place in (PLACE, f"{PLACE}@{first}")] == [second, first]
    hub.asked.clear()
    hub.token = "another"
    assert artifact_file(Path(f"{PLACE}@{first}")).exists(), "a commit that is here needs no network"
    assert hub.asked == []


def test_what_is_not_there_is_one_line(hub: Hub, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(place: str = PLACE) -> str:
        ended = call("sample", place)
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
        return ended.err

    assert "must hold one artifact (*.caddie), beside the result.json that scored it; it has none" in line()
    pushed(tiny_run)
    assert "the hub does not have the list of files of ada/other at main" in line("hf:ada/other")
    assert "the hub does not have the list of files of ada/tiny-lm at v9; check name and rev" in line(f"{PLACE}@v9")
    assert "hf:tiny is no place on the hub; write hf:USER/NAME" in line("hf:tiny")
    hub.files["second.caddie"], hub.history = hub.files["artifact.caddie"], {}
    shutil.rmtree(DOWNLOADS)
    assert "it has artifact.caddie, second.caddie" in line()
    monkeypatch.delenv("HF_TOKEN")
    assert "a private one needs a token, HF_TOKEN or `hf auth login`" in line()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "cannot fetch the list of files of ada/tiny-lm at main (" in line()


def test_what_cannot_be_pushed_is_one_line(
    hub: Hub, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(run: Path = tiny_run.folder, place: str = PLACE) -> str:
        ended = call("push", run, place)
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
        return ended.err

    assert "name the folder of a finished run" in line(tmp_path)
    for name, edit, message in (
        ("artifact.caddie", b"x", "is not the file that"),
        ("recipe.json", b"{}", "is missing or damaged"),
        ("report.html", None, "caddie report"),
    ):
        kept = tmp_path / name
        shutil.copytree(tiny_run.folder, kept)
        (kept / name).unlink()
        if edit is not None:
            (kept / name).write_bytes(edit)
        assert message in line(kept)
    assert "leave out @v2" in line(place=f"{PLACE}@v2")
    assert "cannot push to ada/other" in line(place="hf:ada/other")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "cannot push to ada/tiny-lm (" in line()
    monkeypatch.delenv("HF_TOKEN")
    assert "pushing needs a token that may write: set HF_TOKEN" in line()
    assert hub.messages == []


def test_nothing_that_is_pulled_is_run(hub: Hub, tiny_run: TinyRun) -> None:
    pushed(tiny_run)
    hub.files["parts/mine.py"] = b"raise SystemExit('run')"
    hub.files["sitecustomize.py"] = b"raise SystemExit('run')"
    hub.history = {}
    artifact = artifact_file(Path(PLACE))
    assert (artifact.parent / "parts" / "mine.py").is_file(), "for the reader, who may name it by --parts"
    assert not (artifact.parent / "sitecustomize.py").exists()
    assert call("sample", PLACE, "--tokens", 2).status == 0


def test_places() -> None:
    assert split_place("hf:a/b") == ("a/b", "main")
    assert split_place("hf:a/b-c.d@refs/pr/1") == ("a/b-c.d", "refs/pr/1")
    for wrong in ("hf:a", "hf:a/b/c", "hf:a/b@", "a/b", "hf:a/b:train"):
        with pytest.raises(UserError, match="no place on the hub"):
            split_place(wrong)


def test_the_users_token_is_found_where_the_library_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from caddie.data.hub import hub_library

    def path() -> str:
        with hub_library(tmp_path, False, "", "", ""):
            return os.environ["HF_TOKEN_PATH"]

    for name in ("HF_HOME", "HF_TOKEN_PATH", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert path() == str(Path("~/.cache/huggingface/token").expanduser())
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert path() == "/x/huggingface/token"
    monkeypatch.setenv("HF_HOME", "/h")
    assert path() == "/h/token"
    monkeypatch.setenv("HF_TOKEN_PATH", "/t")
    assert path() == "/t"
    assert os.environ["HF_TOKEN_PATH"] == "/t"


def test_a_folder_that_somebody_else_made_publishes_nothing_of_mine(tiny_run: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    for change, says in (
        ("link", r"report.html: cannot be read"),
        ("score", r"states 0.5000 bits per byte, and its sums come to"),
        ("part", "parts/x.py: cannot be read"),
    ):
        run = tmp_path / change
        shutil.copytree(tiny_run.folder, run)
        (run / "parts").mkdir()
        (run / "parts" / "unstated.py").symlink_to(tmp_path / "secret")
        assert "parts/unstated.py" not in run_files(run)
        if change == "link":
            (run / "report.html").unlink()
            (run / "report.html").symlink_to(tmp_path / "secret")
        elif change == "score":
            result = json.loads((run / "result.json").read_text())
            (run / "result.json").write_text(json.dumps(result | {"bits_per_byte": 0.5}))
        else:
            about = json.loads((run / "recipe.json").read_text())
            (run / "recipe.json").write_text(json.dumps(about | {"parts": [{"name": "x.py", "sha256": "0" * 64}]}))
            (run / "parts" / "x.py").symlink_to(tmp_path / "secret")
        with pytest.raises(UserError, match=says):
            run_files(run)


def test_a_command_to_copy_names_a_folder_with_spaces(tiny_run: TinyRun, tmp_path: Path) -> None:
    run = tmp_path / "my run"
    shutil.copytree(tiny_run.folder, run)
    (run / "report.html").unlink()
    with pytest.raises(UserError, match=re.escape(f"make it by: caddie report '{run}'")):
        run_files(run)
    (run / "result.json").unlink()
    with pytest.raises(UserError, match=re.escape(f"with: caddie run '{run}' --out '{run}'")):
        run_files(run)
    (run / "artifact.caddie").unlink()
    (run / "weights.safetensors").touch()
    with pytest.raises(UserError, match=re.escape(f"make it with: caddie pack '{run}'")):
        artifact_file(run)
