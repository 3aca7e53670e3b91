"""Mutation testing: change the critical modules at random, one place at a time, and see whether a test fails.

    python bench/mutation.py [--mutants N] [--seed S] [--processes P] [--only PART ...]

Each mutant is a change of one expression or statement: an operator, a comparison, a constant, a condition, a return
value, a dropped call or refusal, `max` for `min`. It is written into a copy of the tree, never here, and the tests of
its module run there, those that reach the change first. A test that fails, or tests that take several times as long as
usual, have killed it. Prints what survived and the share killed of what is not equivalent to the code; exit status 1
below `WANTED`.
`mutation_equivalents.json` lists equivalent mutants, each with the reason.

Why no library: mutmut 3 leaves out constants of modules and whatever is decorated, and cosmic-ray changes files where
they stand, drops no call, and exchanges each operator for eleven others, nearly all of which any test kills.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, islice
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the tests set it, before PyTorch is imported

import hypothesis.extra.numpy  # noqa: F401  imported once for all mutants, as are the next three
import pytest
import scipy.special
import scipy.stats  # noqa: F401
import torch  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENTS = Path(__file__).with_name("mutation_equivalents.json")
WANTED = 0.97
SLOWER = 4
"""Times the usual duration, measured with coverage, after which the tests of a mutant are stopped."""

OPTIONS = ("-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
MEASURED = ("--cov=caddie", "--cov-context=test", "--cov-report=")
FORMATS = ("tests/pack/coding", "tests/pack/test_formats.py")
DECODED = ("tests/pack/test_artifact.py", "tests/pack/test_compress.py", "tests/pack/test_formats.py")
PROBED = ("tests/verify/test_changes.py", "tests/verify/test_probes.py")
TESTS = {
    "caddie/pack/coding/*.py": FORMATS,
    "caddie/pack/codecs.py": ("tests/pack/test_codecs.py", *FORMATS),
    "caddie/pack/container.py": ("tests/pack/test_container.py", "tests/pack/test_formats.py"),
    "caddie/pack/fit.py": ("tests/pack/test_fit.py", "tests/pack/test_compress.py"),
    "caddie/data/loaders.py": ("tests/data/test_loaders.py",),
    "caddie/data/corpus.py": (
        "tests/data/test_corpus.py",
        "tests/data/test_prepare.py",
        "tests/data/test_fineweb.py",
        "tests/data/test_library_tokenizers.py",
    ),
    "caddie/data/splits.py": ("tests/data/test_prepare.py",),
    "caddie/lab/stats.py": ("tests/lab/test_stats.py", "tests/lab/test_paired_documents.py"),
    "caddie/lab/verdicts.py": (
        "tests/lab/test_verdicts.py",
        "tests/lab/test_paired_documents.py",
        "tests/lab/test_studies.py",
    ),
    "caddie/pack/artifact.py": DECODED,
    "caddie/score/*.py": ("tests/score",),
    "caddie/verify/black_box.py": PROBED,
    "caddie/verify/changes.py": PROBED,
    "caddie/verify/own_model.py": PROBED,
    "caddie/verify/probes.py": PROBED,
    "caddie/inference/range_coder.py": ("tests/inference",),
    "caddie/report/units.py": ("tests/report/test_units.py",),
}
"""The critical modules, and the tests that must notice a change in each."""

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
FUNCTIONS = {"max": "min", "min": "max", "any": "all", "all": "any", "sorted": "list"}
METHODS = {"max": "min", "min": "max", "any": "all", "all": "any", "sum": "mean", "mean": "sum", "argmin": "argmax"}


class Mutant(NamedTuple):
    """One change of one module."""

    file: str
    begin: int
    """First byte that is replaced."""
    end: int
    text: str
    """Replacement of the original text."""

    def applied(self) -> bytes:
        """Return the module with the change."""
        whole = source(self.file)
        return whole[: self.begin] + self.text.encode() + whole[self.end :]

    def diff(self) -> list[str]:
        """Return the lines that are removed and added, without those around them."""
        before, after = (text.decode().splitlines() for text in (source(self.file), self.applied()))
        return list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]


@cache
def source(file: str) -> bytes:
    """Return a module as it was when it was first read, whatever is written meanwhile."""
    return (ROOT / file).read_bytes()


class Tree(NamedTuple):
    """A copy of the tree that mutants are written into."""

    root: Path

    def write(self, file: str, content: bytes) -> None:
        """Write a module and remove what Python compiled of it, which two mutants of a second would share."""
        path = self.root / file
        path.write_bytes(content)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()

    def test(self, tests: tuple[str, ...], mutant: Mutant | None) -> None:
        """Run tests in the copy, in this process, and end it with the status of pytest.

        Without a mutant the lines that each test reaches are written down; with one, tests that reach it come first.
        """
        os.setsid()  # so that what the tests start is stopped with them
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.chdir(self.root)
        sys.path.insert(0, str(self.root))
        os.environ |= {"PYTHONPATH": str(self.root), "TMPDIR": str(self.root / ".tmp")}
        tempfile.tempdir = None
        measured, plugin = self.root.parent / "-".join(tests).replace("/", "_"), First(mutant)
        if mutant:
            plugin.read(measured)
            os._exit(pytest.main([*OPTIONS, *tests], plugins=[plugin]))
        os.environ["COVERAGE_FILE"] = str(measured)
        status = pytest.main([*OPTIONS, *MEASURED, *tests], plugins=[plugin])
        measured.with_suffix(".json").write_text(json.dumps(plugin.seconds))
        os._exit(status)


class First:
    """Plugin of pytest: tests that reach the mutant come first, fastest first; the others follow."""

    def __init__(self, mutant: Mutant | None) -> None:
        """Know a mutant, but not yet what reaches it."""
        self.mutant, self.seconds, self.reaching = mutant, dict[str, float](), set[str]()

    def read(self, measured: Path) -> None:
        """Take what the tests reached and how long they took without a mutant."""
        from coverage import CoverageData  # of `make lint` and this: `make test` does without

        assert self.mutant
        self.seconds = json.loads(measured.with_suffix(".json").read_text())
        data = CoverageData(str(measured))
        data.read()
        content = source(self.mutant.file)
        begin, end = (content.count(b"\n", 0, place) + 1 for place in (self.mutant.begin, self.mutant.end))
        files = [file for file in data.measured_files() if file.endswith(self.mutant.file)]
        tests = (data.contexts_by_lineno(file).get(line, ()) for file in files for line in range(begin, end + 1))
        self.reaching = {context.rpartition("|")[0] for context in chain.from_iterable(tests)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up a test's seconds, fixtures included."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the tests in order."""
        if self.reaching:
            items.sort(key=lambda item: (item.nodeid not in self.reaching, self.seconds.get(item.nodeid, 0.0)))


class Trial(NamedTuple):
    """Tests that run in a copy of the tree, with a mutant or without one."""

    tree: Tree
    mutant: Mutant | None
    tests: tuple[str, ...]
    begun: float
    process: ForkProcess

    @classmethod
    def start(cls, tree: Tree, mutant: Mutant | None, tests: tuple[str, ...]) -> Trial:
        """Write the mutant and start the tests, in a fork, which need not import PyTorch and pytest again."""
        if mutant:
            tree.write(mutant.file, mutant.applied())
        process = multiprocessing.get_context("fork").Process(target=tree.test, args=(tests, mutant))
        process.start()
        return cls(tree, mutant, tests, time.monotonic(), process)

    def finish(self) -> bool:
        """End the tests and take the mutant back; return True if a test failed or the tests were not done."""
        failed = self.process.exitcode != 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        if self.mutant:
            self.tree.write(self.mutant.file, source(self.mutant.file))
        return failed


def run(
    trials: Iterable[tuple[Mutant | None, tuple[str, ...]]], trees: list[Tree], limits: dict[tuple[str, ...], float]
) -> Iterator[tuple[Trial, bool, float]]:
    """Run the tests of all, one at a time in each tree; yield each with True if it failed, and its seconds."""
    waiting, free, running = iter(trials), [*trees], list[Trial]()
    while True:
        running += [Trial.start(free.pop(), *given) for given in islice(waiting, len(free))]
        if not running:
            return
        wait([trial.process.sentinel for trial in running], 1.0)
        for trial in [*running]:
            seconds = time.monotonic() - trial.begun
            if trial.process.exitcode is not None or seconds > limits.get(trial.tests, math.inf):
                yield trial, trial.finish(), seconds
                running.remove(trial)
                free.append(trial.tree)


def mutants(file: str) -> Iterator[Mutant]:
    """Yield every mutant of a module; annotations, decorators, messages and assertions stay."""
    starts = [0]
    for line in source(file).splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(node: ast.expr | ast.stmt, text: str) -> Mutant:
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Mutant(file, starts[node.lineno - 1] + node.col_offset, end, text)

    def visit(node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.expr | ast.stmt):
            yield from (at(node, text) for text in replacements(node))
        if isinstance(node, ast.If | ast.IfExp):
            yield at(node.test, f"(not ({ast.unparse(node.test)}))")
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of `zip`, an assertion too
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    yield from visit(ast.parse(source(file)))


def replacements(node: ast.AST) -> Iterator[str]:
    """Yield what may stand in place of an expression or a statement."""
    match node:
        case ast.BinOp(op=op) if type(op) in BINARY:
            yield f"({ast.unparse(ast.BinOp(node.left, BINARY[type(op)](), node.right))})"
        case ast.AugAssign(op=op) if type(op) in BINARY:
            yield ast.unparse(ast.AugAssign(node.target, BINARY[type(op)](), node.value))
            yield "pass"
        case ast.Compare(ops=[op]):
            for other in COMPARISONS[type(op)]:
                yield f"({ast.unparse(ast.Compare(node.left, [other()], node.comparators))})"
        case ast.BoolOp(op=op):
            yield f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), node.values))})"
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield from (str(value + 1), f"({value - 1})")
        case ast.Constant(value=float(value)):
            yield repr(2 * value or 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            yield ast.unparse(ast.Call(ast.Name(FUNCTIONS[name]), node.args, node.keywords))
        case ast.Call(func=ast.Attribute(value=of, attr=name)) if name in METHODS:
            yield ast.unparse(ast.Call(ast.Attribute(of, METHODS[name]), node.args, node.keywords))
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            yield "return None"
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield "pass"


def tests_of() -> dict[str, tuple[str, ...]]:
    """Return the critical modules with their tests."""
    return {path.relative_to(ROOT).as_posix(): tests for pattern, tests in TESTS.items() for path in ROOT.glob(pattern)}


def equivalents() -> dict[tuple[str, str], str]:
    """Return the reasons of known equivalent mutants by file and diff."""
    listed = json.loads(EQUIVALENTS.read_text())
    return {(one["file"], key(one["diff"])): one["why"] for one in listed}


def key(diff: list[str]) -> str:
    """Return a diff without line numbers and indentation."""
    return "\n".join(line[0] + line[1:].strip() for line in diff if not line.startswith("@@"))


def copy_tree(root: Path) -> Tree:
    """Copy what is or will be tracked."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    (root / ".tmp").mkdir()
    return Tree(root)


def main() -> int:
    """Draw mutants, try each, and print what survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=300, metavar="N", help="mutants drawn (default 300)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (default 0)")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="mutants tried at once (default 1)")
    parser.add_argument(
        "--only", nargs="*", default=[""], metavar="PART", help="only modules whose path contains a PART"
    )
    parser.add_argument("--nice", type=int, default=10, metavar="N", help="added to the niceness (default 10)")
    given = parser.parse_args()
    os.nice(given.nice)
    modules = {file: tests for file, tests in sorted(tests_of().items()) if any(part in file for part in given.only)}
    every = [mutant for file in modules for mutant in mutants(file)]
    drawn = random.Random(given.seed).sample(every, min(given.mutants, len(every)))
    known = equivalents()
    tried = [mutant for mutant in drawn if (mutant.file, key(mutant.diff())) not in known]
    print(f"{len(drawn)} of {len(every):,} mutants of {len(modules)} modules, seed {given.seed}", flush=True)
    survived, limits = 0, dict[tuple[str, ...], float]()
    with tempfile.TemporaryDirectory() as folder:
        trees = [copy_tree(Path(folder) / str(number)) for number in range(given.processes)]
        for trial, failed, seconds in run([(None, tests) for tests in {modules[one.file] for one in tried}], trees, {}):
            if failed:
                print(f"the tests fail without a mutant: pytest {' '.join(trial.tests)}")
                return 2
            limits[trial.tests] = SLOWER * seconds
        for number, (trial, killed, _) in enumerate(run([(one, modules[one.file]) for one in tried], trees, limits), 1):
            print(f"{number} of {len(tried)}", end="\r", file=sys.stderr)
            if not killed and trial.mutant:
                survived += 1
                print(f"\nsurvived: {trial.mutant.file}", *trial.mutant.diff(), sep="\n", flush=True)
    rate = 1 - survived / len(tried) if tried else 1.0
    counts = f"{len(drawn) - len(tried)} equivalent, {len(tried) - survived} killed, {survived} survived"
    print(f"\n{len(drawn)} mutants: {counts}")
    print(f"{100 * rate:.1f} % of what is not equivalent were killed (wanted: {100 * WANTED:.0f} %)")
    return 0 if rate >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
