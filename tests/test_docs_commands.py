"""Commands and programs of the README and the docs: each is parsed, and run where that takes seconds.

What runs is what stands there but for its size, by one rule that is written below; what is only parsed has a reason.
"""

import ast
import importlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import call, probe_nothing, score_here

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if path.name != "log.md" and path.parent.name != "results"  # records of a day, of what there was then
)
OTHER_PROGRAMS = {
    "git",
    "cd",
    "pip",
    "python",
    "python3",
    "export",
    "source",
    "sbatch",
    "srun",
    "torchrun",
    "ray",
    "cmp",
}
"""Programs of a machine's own, which are not checked further than that a script they are given is there."""
SLOW_VERBS = {
    "board": "serves until it is stopped",
    "study": "many runs; `tests/lab` runs studies",
    "ablate": "many runs",
    "sweep": "many runs",
    "doctor": "measures this machine",
    "submit": "makes the script for seconds; `tests/submit` does",
    "push": "needs the hub; `tests/share` pushes to a stand-in",
    "lm-eval": "fetches tasks; `tests/share` runs one of local data",
}
QUICK = (
    *("train.seconds=none", "train.steps=2", "train.batch_tokens=128", "train.sequence_length=32"),
    *("model.width=16", "model.block.attention.heads=2", "model.block.attention.key_value_heads=1"),
    *("model.block.mlp.hidden=16", "model.embedding.bigrams.buckets=64", "data.tokenizer=RawBytes"),
    *("model.vocabulary=257", "pack.calibration.tokens=512", "pack.fit=none", "pack.coding=Packed"),
    *("score.sequence_length=32", "score.stride=16"),
)
"""Put in front of a command's own settings, in place of its --seconds: the same command for a small model."""


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: Path
    words: tuple[str, ...]
    output: str | None = None
    """File that its standard output goes to."""

    @property
    def caddie(self) -> bool:
        return Path(self.words[0]).name == "caddie"

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {shlex.join(self.words)}"


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^[ ]*```(\w+)[^\n]*\n(.*?)^[ ]*```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def commands_of(page: Path) -> Iterator[Command]:
    """Yield each command of the page's shell blocks; in a console, what stands behind the prompt."""
    for language in ("sh", "bash", "shell", "console"):
        for block in blocks(page, language):
            for line in block.replace("\\\n", " ").splitlines():
                if language == "console":
                    if not line.lstrip().startswith("$ "):
                        continue
                    line = line.lstrip()[2:]
                for part in re.split(r"\s(?:&&|\|\||;|\|)\s", line):
                    words = shlex.split(part, comments=True)
                    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # of the environment
                        words.pop(0)
                    words, output = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
                    if words:
                        yield Command(page, tuple(word for word in words if word != "&"), output)


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))


@dataclass(frozen=True)
class Parsed:
    """A command of ours as click reads it."""

    verb: str
    command: click.Command
    options: dict[str, Any]


def parse(words: tuple[str, ...]) -> Parsed:
    """Read a command without doing anything; paths need not be there."""
    from caddie.cli import app

    context = click.Context(app, info_name="caddie", **app.context_settings)
    verb, command, rest = app.resolve_command(context, list(words[1:]) or ["--help"])
    assert command is not None
    inner = click.Context(command, context, verb, **command.context_settings)
    found, left, _ = command.make_parser(inner).parse_args(list(rest))
    assert not left, f"too many arguments: {left}"
    options = {name: value for name, value in found.items() if isinstance(value, str | bool | tuple | list) and value}
    for parameter in command.params:
        name = str(parameter.name)
        assert name in options or not (isinstance(parameter, click.Argument) and parameter.required), f"no {name}"
        if isinstance(parameter.type, click.types.IntParamType | click.types.FloatParamType | click.Choice):
            if isinstance(value := options.get(name), str):
                parameter.type.convert(value, parameter, None)
    return Parsed(str(verb), command, options)


def check(parsed: Parsed) -> None:
    """Check that recipes, settings and techniques named by a command are there."""
    from caddie.config import assignments
    from caddie.recipes.catalog import find

    own_file = re.compile(r"\.py(:|$)")
    settings = [value for value in parsed.options.get("settings", ()) if "=" in value]
    for name in ("recipe", "a", "b"):
        value = parsed.options.get(name)
        for recipe in (value,) if isinstance(value, str) else value or ():
            if isinstance(recipe, str) and not own_file.search(recipe) and not Path(recipe).suffix:
                found = find(recipe)
                if name == "recipe" and "SignedGate" not in str(settings):
                    found.but(assignments(tuple(settings)))


def parse_only(parsed: Parsed) -> str | None:
    """Return why a command is not run here, None if it is."""
    if parsed.verb in SLOW_VERBS:
        return SLOW_VERBS[parsed.verb]
    given = parsed.options
    if any("fineweb" in str(name) and value for name, value in given.items()) or "hub" in str(given.get("data")):
        return "downloads"
    if "hf:" in str(given.get("artifact")):
        return "needs the hub; `tests/share` pulls from a stand-in"
    if str(given.get("gpus") or "1") != "1":
        return "needs GPUs"
    if parsed.verb in ("run", "train") and given.get("recipe") != "tiny":
        return "a recipe that is not tiny"
    if parsed.verb == "review" and "submission" in map(str, given.values()):
        return "needs the folder that `submit` writes; `tests/submit` reviews one"
    if re.search(r"\w+\.py\b|\w+\.toml|SignedGate", str(given)):
        return "needs a file that its page tells to write"
    if re.search(r"studies/", str(given)):
        return "needs a study that was run"
    if given.get("compare"):
        return "packs by all quantizers; `tests/run/test_compare_packings.py` does"
    return None


def reason(command: Command) -> str | None:
    return parse_only(parse(command.words)) if command.caddie else "another program"


# Parsed


def test_the_pages_have_commands() -> None:
    assert sum(command.caddie for command in COMMANDS) > 10
    assert any(not reason(command) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_there_with_its_options_recipes_and_settings(command: Command) -> None:
    program = Path(command.words[0]).name
    if command.caddie:
        parsed = parse(command.words)
        check(parsed)
        return
    if program == "make":
        targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        wanted = [word for word in command.words[1:] if not word.startswith("-") and "=" not in word]
        assert not set(wanted) - set(targets), f"no such target in the Makefile of {targets}"
        return
    assert program in {*OTHER_PROGRAMS, "pytest", "mkdocs", "sphinx-build"}, "a program that nothing checks"
    for word in command.words[1:]:
        if re.fullmatch(r"(bench|tests|studies|docs)/[\w/.-]+", word):
            assert (ROOT / word).exists(), f"no {word}"


@pytest.mark.parametrize(
    "words",
    [
        "caddie walk tiny",
        "caddie run",
        "caddie run tinny",
        "caddie run tiny --sconds 3",
        "caddie run tiny model.dpeth=3",
        "caddie diff baseline bestrecord",
    ],
)
def test_a_command_that_is_not_there_is_found(words: str) -> None:
    from caddie.errors import UserError

    with pytest.raises((click.ClickException, UserError, AssertionError)):
        check(parse(tuple(words.split())))


# Run


@pytest.fixture(scope="module")
def made(tiny_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's text in it, and runs on the text."""
    folder = tmp_path_factory.mktemp("docs")
    paragraphs = tiny_run.text.read_text().split("\n\n")
    for name in ("my_texts", "other_texts"):
        (folder / name).mkdir()
        for number in range(20):
            chosen = paragraphs[number::20] if name == "my_texts" else paragraphs[number::40][::-1]
            (folder / name / f"{number}.txt").write_text("\n\n".join(chosen))
    shutil.copy(folder / "my_texts" / "0.txt", folder / "FILE")
    (folder / "train_small.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in paragraphs))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        score_here(patch)
        probe_nothing(patch)
        for seed in range(6):
            made = ("--data", "my_texts", "--out", f"made/{seed}", "--seed", seed, "--quiet")
            ended = call("run", "tiny", *QUICK, *made)
            assert (ended.status, ended.err) == (0, "")
    return folder


@pytest.fixture
def desk(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, to work in."""
    shutil.copytree(made, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    return tmp_path / "desk"


def prepared(word: str, desk: Path) -> list[str]:
    """Return a word as the shell gives it, with the run that it names beside it."""
    if not (match := re.fullmatch(r"(runs/[^/]+)(/.*)?", word)):
        return [word]
    folders = [match[1].replace("*", number) for number in "12"] if "*" in match[1] else [match[1]]
    for folder in folders:
        if not (desk / folder).exists():  # the next of the runs that were made, each of another seed
            (desk / folder).parent.mkdir(exist_ok=True)
            shutil.move(min((desk / "made").iterdir()), desk / folder)
    return [folder + (match[2] or "") for folder in folders]


RUN = [command for command in COMMANDS if command.caddie]


@pytest.mark.long
@pytest.mark.usefixtures("one_process", "unprobed", "alive_once")
@pytest.mark.parametrize("page", sorted({command.page for command in RUN}), ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, desk: Path) -> None:
    """One after the other in one folder, so that a command finds what one before it made."""
    for command in (command for command in RUN if command.page == page):
        parsed = parse(command.words)
        if parse_only(parsed):
            continue
        words = list(command.words[1:])
        out = parsed.options.get("out")
        for flag in ("--seconds",):
            if flag in words:
                del words[words.index(flag) : words.index(flag) + 2]
        given = [part for word in words for part in ([word] if word == out else prepared(word, desk))]
        if parsed.verb in ("run", "train"):
            at = given.index(parsed.options["recipe"]) + 1
            given[at:at] = [*QUICK, *(() if "--data" in given else ("--data", "my_texts"))]
            given = [word for word in given if not word.startswith("model.depth=")]
        if parsed.verb == "score" and "--data" not in given:
            given += ["--data", "my_texts"]
        if out and (desk / out).exists():
            shutil.rmtree(desk / out)
        ended = call(*given)
        allowed = {0, 1} if parsed.verb in ("verify", "compare") else {0}  # 1: a check failed, as it does for two steps
        assert ended.status in allowed, f"{command}\n{ended.err}"
        if command.output:
            (desk / command.output).write_text(ended.out)


# Programs


PROGRAMS = [(page, number, text) for page in PAGES for number, text in enumerate(blocks(page, "python", "py"))]


@pytest.mark.parametrize(
    "text", [text for *_, text in PROGRAMS], ids=[f"{page.stem}-{number}" for page, number, _ in PROGRAMS]
)
def test_a_program_takes_what_caddie_has(text: str) -> None:
    """It is Python, and all that it takes from caddie is there; `test_readme.py` runs those of the README."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "caddie":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "caddie":
            assert hasattr(importlib.import_module("caddie"), node.attr), f"caddie has no {node.attr}"


NEEDS = {
    "AutoModelForCausalLM": "needs transformers; `tests/share` runs such a program",
    "load_file(": "needs an export; `tests/share` loads one",
    "artifact.tokenizer.bos": "goes on with the one before it; `test_readme.py` runs both",
    "caddie.run(": "trains; `test_readme.py` runs it",
    "Study(...": "a part of a definition",
    "audit(tokenizer, documents)": "needs a tokenizer and documents of the reader's own",
}
"""Programs that are not run here, by a piece of them, and why."""
DEFINITIONS = {
    f"{page.stem}-{number}": text for page, number, text in PROGRAMS if not any(piece in text for piece in NEEDS)
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_program_defines_what_a_verb_takes(
    name: str, tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file of recipes, of a study or of a scorer is run, and what it defines is built."""
    import torch

    from caddie import Recipe, Study, load
    from caddie.config.userfile import execute
    from caddie.score import Scorer, TokenScorer

    artifact = load(tiny_run.artifact)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "page_program.py"
    path.write_text(DEFINITIONS[name])
    found = execute(path)
    classes = [value for value in found.values() if isinstance(value, type) and value.__module__ == found["__name__"]]
    recipes = [value for value in found.values() if isinstance(value, Recipe)]
    recipes += [study.base for study in found.values() if isinstance(study, Study)]
    scorers = [one for one in classes if issubclass(one, Scorer | TokenScorer)]
    assert recipes or scorers
    for recipe in recipes:
        with torch.device("meta"):
            assert sum(one.numel() for one in recipe.model.build().parameters()) == recipe.parameters
    for scorer in scorers:
        assert isinstance(scorer(artifact.model, artifact.tokenizer), Scorer | TokenScorer)


def test_every_reason_is_needed() -> None:
    assert all(any(piece in text for *_, text in PROGRAMS) for piece in NEEDS)
