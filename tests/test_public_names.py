"""The names of `import caddie`, whatever was imported before."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import caddie
from caddie.config import assignments

CALLS = """
import caddie
for name in ("run", "score", "verify"):
    for _ in range(2):  # the first use imports the folder of that name, which must not take the function's place
        try:
            getattr(caddie, name)(no_such_argument=0)
        except TypeError as error:
            assert "no_such_argument" in str(error), error
"""


ANEW = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "caddie"]:
    del sys.modules[name]
import caddie.run.policy, caddie.score.windows, caddie.verify.probes
"""


@pytest.mark.long
def test_verbs_stay_callable_beside_the_folders_of_their_names() -> None:
    """Call the verbs twice in one process: with nothing of caddie imported, and after the folders were imported."""
    done = subprocess.run([sys.executable, "-c", CALLS + ANEW + CALLS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    for name in caddie.__all__:
        assert callable(getattr(caddie, name)) or name == "SILENT"
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = caddie.rum


def test_a_session_can_look_around() -> None:
    assert {"run", "load", "Recipe", "__version__"} <= set(dir(caddie))
    assert caddie.__version__ == version("caddie")


def test_paths_and_prompts_may_be_plain_strings(tiny_run: Any) -> None:
    artifact = caddie.load(str(tiny_run.artifact))
    text = caddie.sample(artifact, "ab", tokens=2)
    assert text.startswith(b"ab")
    assert text == caddie.sample(artifact, b"ab", tokens=2)


def test_numbers_may_be_those_of_numpy(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = caddie.load(tiny_run.artifact)
    tokens, seed = np.int64(2), np.int64(3)
    assert caddie.sample(artifact, tokens=tokens, seed=seed) == caddie.sample(artifact, tokens=2, seed=3)
    with pytest.raises(caddie.UserError, match="seed must be from 0 to 4,294,967,295, not 18446744073709551616"):
        caddie.sample(artifact, seed=1 << 64)

    def ends(*given: object, **named: object) -> None:
        raise caddie.CheckFailed("begun")

    monkeypatch.setattr("caddie.run.run.train", ends)
    monkeypatch.setattr("caddie.run.run.check_settings_matter", lambda recipe: None)
    recipe = caddie.find("tiny").but(assignments(tiny_run.settings))
    with pytest.raises(caddie.CheckFailed, match="begun"):
        caddie.run(recipe, tiny_run.corpus, seed=seed, folder=tmp_path, progress=caddie.SILENT)  # type: ignore[arg-type]
    assert json.loads((tmp_path / "recipe.json").read_text())["seed"] == 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_without_probabilities_writes_no_text(tiny_run: Any, temperature: float) -> None:
    artifact = caddie.load(tiny_run.artifact)
    with torch.no_grad():
        next(artifact.model.parameters()).fill_(torch.nan)
    with pytest.raises(caddie.UserError, match="the model gives no probabilities"):
        caddie.sample(artifact, temperature=temperature)


@pytest.mark.parametrize(
    ("recipe", "source", "seed", "says"),
    [
        ("tiny", None, 1, "the recipe cannot be 'tiny'; find one, as caddie.find\\("),
        (None, None, -1, "seed must be from 0 to 4,294,967,295, not -1"),
        (None, None, 1 << 33, "seed must be from 0 to"),
        (None, None, "1", "seed must be a whole number, not the text '1'"),
        (None, "", 1, "the path of the text is empty"),
        (None, "none.txt", 1, "none.txt"),
        (None, ["a.txt"], 1, "the text cannot be \\['a.txt'\\]; name a file"),
    ],
)
def test_a_run_in_python_is_refused_before_it_makes_a_folder(
    recipe: Any, source: str | None, seed: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(caddie.UserError, match=says):
        caddie.run(recipe or caddie.find("tiny"), source, seed=seed, folder=tmp_path / "run", progress=caddie.SILENT)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: caddie.sample("a.caddie"), "the artifact cannot be 'a.caddie'; read one, as caddie.load"),
        (lambda: caddie.open_for_scoring("a.caddie", None), "the artifact cannot be 'a.caddie'"),
        (lambda: caddie.verify("a.caddie", 1_000_000), "the artifact cannot be 'a.caddie'"),
        (lambda: caddie.score(None, "text", None), "the text cannot be 'text'; take it from a corpus"),
        (lambda: caddie.load(None), "the path cannot be None; name the file"),
        (lambda: caddie.load("a.caddie", device="gpu"), "the device cannot be 'gpu'; write cpu, cuda"),
        (lambda: caddie.load("a.caddie", device="mps:3"), r"the device mps:3 cannot be used here \(.*\); take cpu"),
    ],
)
def test_an_argument_of_another_kind_is_one_line(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(caddie.UserError, match=says):
        call()


def test_a_cap_is_a_number(tiny_run: Any) -> None:
    with pytest.raises(caddie.UserError, match="cap_bytes must be a whole number"):
        caddie.verify(caddie.load(tiny_run.artifact), "1MB")


@pytest.mark.long
@pytest.mark.usefixtures("one_process", "unprobed", "alive_once")
def test_a_run_in_python_shows_its_progress_unless_told_not_to(
    tiny_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = caddie.find("tiny").but(assignments(tiny_run.settings))
    made = caddie.run(recipe, tiny_run.corpus, folder=str(tmp_path / "run"))
    assert made["artifact_bytes"] == (tmp_path / "run" / "artifact.caddie").stat().st_size
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == ("", "prepare")
    assert "100%  step " in err
    caddie.run(recipe, str(tiny_run.corpus), folder=tmp_path / "silent", progress=caddie.SILENT)
    assert capsys.readouterr() == ("", "")
