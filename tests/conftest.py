"""Options and fixtures shared by all tests."""

import contextlib
import gc
import inspect
import io
import json
import math
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from caddie.config import Config, variants
from caddie.errors import UserError

# The models of the tests are so small that more threads, which wait for each other, only slow them; read by PyTorch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent

# The browser, trackers and compilers that tests start keep files in the home folder; theirs is not the user's.
HOME = ROOT / ".tmp" / "home"
HOME.mkdir(parents=True, exist_ok=True)
os.environ["HOME"] = str(HOME)
for name in ("CONFIG", "CACHE", "DATA", "STATE"):
    os.environ.pop(f"XDG_{name}_HOME", None)

# A shell in the background ignores Ctrl-C, and so would every process that a test starts and stops.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all that is imported and collected is there: it stays


def pytest_addoption(parser: pytest.Parser) -> None:
    shared = ROOT.parent / "shared"
    parser.addoption("--parity", help="folder of a set of the public scripts' numbers, for those that are there")
    parser.addoption("--data", default=str(shared / "data"), help="folder of real text and tokenizers")
    parser.addoption("--kills", type=int, default=10, help="kills at random moments in tests/faults")
    parser.addoption("--update-golden", action="store_true", help="write golden files anew instead of comparing")


def pytest_sessionstart(session: pytest.Session) -> None:
    """The second process imports all files from the last to the first: each compiles half of what is not yet."""
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and not session.config.option.file_or_dir:
        for path in sorted((ROOT / "tests").rglob("test_*.py"), reverse=True):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # told when they are collected
                import_module(path.stem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Large files come first: files go whole to the processes, and for a long one at the end the others would wait."""
    mark_contracts(items)
    size = cache(lambda path: path.stat().st_size)
    items.sort(key=lambda item: -size(item.path))


def mark_contracts(items: list[pytest.Item]) -> None:
    """Mark the tests that try every variant of a socket, or every one-step variation of a model: `-m contract`."""
    tried: dict[tuple[Path, str], set[str]] = {}
    functions = [item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    for item in functions:
        for value in item.callspec.params.values():
            name = value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)
            tried.setdefault((item.path, item.originalname), set()).add(name)
    ours = {cls: variants(cls).items() for cls in sockets()}  # tests define variants of their own
    known = {cls: {name for name, one in found if one.__module__.startswith("caddie.")} for cls, found in ours.items()}
    for item in functions:
        names = tried[item.path, item.originalname]
        whole = any(len(found) > 1 and found <= names for found in known.values())
        if whole or (item.path.name == "test_gpt.py" and len(names) > 50):
            item.add_marker(pytest.mark.contract)


def sockets() -> list[type[Config]]:
    """Return the abstract classes of settings."""
    left, found = [Config], list[type[Config]]()
    while left:
        left += [cls for cls in left.pop().__subclasses__() if cls.__module__.startswith("caddie.") and cls not in left]
        found += [cls for cls in left if inspect.isabstract(cls) and cls not in found]
    return found


def pytest_collection_finish() -> None:
    """What was imported and collected lives as long as the process: no garbage collection need look at it again, nor at
    what tests make so often, which small tensors are many of."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def pytest_sessionfinish() -> None:
    """Garbage of the last tests is looked for once; pytest would go through all that lives five times."""
    gc.collect()
    gc.freeze()


def _folder(request: pytest.FixtureRequest, option: str) -> Path:
    folder = Path(request.config.getoption(option))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; name one with {option} DIR")
    return folder


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip a test where the system refuses namespaces, as containers may."""
    from caddie.verify.sandbox import run_in_sandbox

    if not (outcome := run_in_sandbox("", memory_bytes=1 << 29, seconds=20.0)).isolated:
        pytest.skip(outcome.isolation)


@pytest.fixture(params=[True, False], ids=["bfloat16", "imitated"])
def brain_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Once on a CPU that is said to multiply bfloat16, and once on one that is not, whatever this one is."""
    monkeypatch.setattr("caddie.ops.products.BFLOAT16_ON_CPU", request.param)
    return bool(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that need the public scripts' numbers take the full set where there is one, and the compact one."""
    if "parity" in metafunc.fixturenames:
        full, compact = ROOT.parent / "shared" / "reference" / "parity", ROOT / "tests" / "golden" / "parity"
        if given := metafunc.config.getoption("--parity"):
            sets = [pytest.param(Path(given).absolute(), id=Path(given).name)]
        elif full.is_dir():
            sets = [pytest.param(full, id="full"), pytest.param(compact, id="compact", marks=pytest.mark.long)]
        else:
            sets = [pytest.param(compact, id="compact")]
        metafunc.parametrize("parity", sets, indirect=True, scope="session")


@pytest.fixture(scope="session")
def parity(request: pytest.FixtureRequest) -> Path:
    """Folder with inputs and outputs of the public scripts."""
    return Path(request.param)


@pytest.fixture(scope="session")
def frontier(parity: Path) -> Path:
    """Folder with the numbers of the records after 1.0611, in sets that have them."""
    if not (parity / "frontier").is_dir():
        pytest.skip("this set of the public scripts' numbers has no folder frontier")
    return parity / "frontier"


@pytest.fixture(scope="session")
def real_data(request: pytest.FixtureRequest) -> Path:
    """Folder with real text and the contest's tokenizers."""
    return _folder(request, "--data")


@pytest.fixture
def same_as_kept(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare a text with the golden file or page that keeps it; with `--update-golden`, write that file anew."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        tests = f"{request.path.relative_to(ROOT)} -k {request.function.__name__}"
        assert text == path.read_text(), f'if this is meant: pytest {tests} -m "" --update-golden'

    return compare


@pytest.fixture(autouse=True)
def no_word_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Trainings of the tests say nothing of how busy the machine is, so that their notes are the same everywhere."""
    if "train" in request.path.parts:
        monkeypatch.setattr("caddie.train.hooks.BUSY_SECONDS", math.inf)


@pytest.fixture(scope="session", autouse=True)
def unsynchronized() -> Iterator[None]:
    """What tests write need not outlast a power cut, so no test waits for a busy disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda number: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def undistributed() -> Iterator[None]:
    """No test compares tensors that are spread over machines; to look for them PyTorch would import 460 modules."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:  # or it would be imported for this
            patch.setattr("torch.testing._comparison._HAS_DTENSOR", False, raising=False)
        yield


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    status: int
    out: str
    err: str


def call(*arguments: object) -> Ended:
    """`caddie ARGUMENTS` in this process; whatever it raises but its exit is raised."""
    from caddie import cli

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["caddie", *map(str, arguments)])
        patch.setattr(import_module("caddie.cli.exits"), "_leave", sys.exit)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return Ended(int(ended.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def caddie() -> Callable[..., Ended]:
    """The command line, called in this process."""
    return call


def fresh(
    artifact: Path,
    corpus: Path,
    world: int = 1,
    progress: object = None,
    parts: Sequence[Path] = (),
    documents: Path | None = None,
) -> dict[str, Any]:
    """Score in this process, for runs whose point is not that the file stands alone."""
    files = [*(f"--parts={path}" for path in parts), *([f"--documents={documents}"] if documents else [])]
    ended = call("score", artifact, "--data", corpus, *files, "--events", "--json")
    if ended.status > 128:  # a signal that was meant for this process
        signal.raise_signal(ended.status - 128)
    if ended.status and not ended.out:
        raise UserError(ended.err.splitlines()[-1].removeprefix("caddie: "))
    return dict(json.loads(ended.out))


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs score what they packed in this process, which has imported PyTorch already."""
    score_here(monkeypatch)


def score_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(import_module("caddie.run.run"), "score_in_new_process", fresh)


_ALIVE: set[tuple[str, str]] = set()


@pytest.fixture
def alive_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings without effect are looked for once in each recipe: what is found is the same in every run of it."""
    from caddie.run import dead_settings as liveness
    from caddie.run import run as line

    verify = liveness.check_settings_matter

    def once(recipe: Any) -> None:
        key = (recipe.name, recipe.sha256)
        if key not in _ALIVE:
            verify(recipe)
            _ALIVE.add(key)

    for module in (line, liveness):
        monkeypatch.setattr(module, "check_settings_matter", once)


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification of the file alone, without the process that probes its scorer."""
    probe_nothing(monkeypatch)


def probe_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(import_module("caddie.verify.verify"), "_probe_in_sandbox", lambda *given: ([], []))


@dataclass(frozen=True)
class TinyRun:
    """A finished run of the smallest recipe, and what it was made from; to be read, not changed."""

    folder: Path
    artifact: Path
    corpus: Path
    text: Path
    settings: tuple[str, ...]
    """What `caddie run tiny` was given besides the text."""
    printed: dict[str, Any]
    """What it printed."""


TINY = (
    "model.width=16",
    "model.depth=2",
    "model.block.attention.heads=2",
    "model.block.attention.key_value_heads=1",
    "model.block.mlp.hidden=16",
    "model.embedding.bigrams.buckets=64",
    "data.tokenizer=RawBytes",
    "model.vocabulary=257",
    "train.steps=2",
    "train.seconds=none",
    "train.batch_tokens=128",
    "train.sequence_length=32",
    "pack.calibration.tokens=512",
    "pack.fit=none",
    "pack.coding=Packed",
    "score.sequence_length=32",
    "score.stride=16",
)


def write_text(path: Path) -> Path:
    """100 KB of made-up text, the same each time."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 9))) for _ in range(300)]
    path.write_text("\n\n".join(" ".join(chance.choices(words, k=80)) for _ in range(200)))
    return path


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> TinyRun:
    """`caddie run` of two steps on 100 KB of made-up text, made by the first of the test processes for all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "tiny_run"
    text, printed = folder / "text.txt", folder / "printed.json"
    with FileLock(f"{folder}.lock"):
        if not printed.exists():
            folder.mkdir()
            write_text(text)
            with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
                score_here(patch)
                probe_nothing(patch)
                ended = call("run", "tiny", *TINY, "--data", text, "--out", folder / "run", "--json", "--quiet")
            assert (ended.status, ended.err) == (0, "")
            printed.write_text(ended.out)
    corpus = Path(json.loads((folder / "run" / "recipe.json").read_text())["corpus"])
    return TinyRun(
        folder / "run", folder / "run" / "artifact.caddie", corpus, text, TINY, json.loads(printed.read_text())
    )


@pytest.fixture(scope="module")
def artifact(tiny_run: TinyRun) -> Any:
    """The artifact of `tiny_run` with random weights of some size."""
    from samples import noisy

    from caddie.pack.artifact import load

    loaded = load(tiny_run.artifact)
    noisy(loaded.model.requires_grad_(False), 0.2, seed=0)
    return loaded


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the system refuse a step of the sandbox's launcher, or give one of the launcher's names another value."""
    from caddie.verify import sandbox

    def refuse(name: str, value: str = "no") -> None:
        patch = "import sandbox_launcher as it\ndef no(*_): raise PermissionError(1, 'Refused', 'step')\n"
        before, enter = sandbox._LAUNCHER.split("from ")
        monkeypatch.setattr(sandbox, "_LAUNCHER", f"{before}\n{patch}it.{name} = {value}\nfrom {enter}")

    return refuse
