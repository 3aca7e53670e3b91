"""Mutants of a module, and the list of those that are equivalent to the code."""

import ast
import subprocess
import sys
from pathlib import Path

import mutation
import pytest

MODULE = '''"""Words."""
LIMIT = 1 << 15


@cached(3)
def f(a: Literal[1], b: float = 0.5) -> None:
    assert a > 1
    if not a < b and b:
        raise ValueError(f"{a + 1}")
    a += b
    g(max(a, -2))
    return x.sum() if a is None else True
'''
EXPECTED = {
    *("(1 >> 15)", "2", "(0)", "16", "(14)", "1.0", "(not (not a < b and b))", "(not a < b or b)", "(a < b)"),
    *("(a <= b)", "(a >= b)", "pass", "a -= b", "min(a, -2)", "(2)", "3", "(1)", "return None", "x.mean()"),
    *("(not (a is None))", "(a is not None)", "False"),
}


def test_mutants_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations, decorators, messages and assertions stay; every mutant is a program."""
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    (tmp_path / "mutated.py").write_text(MODULE)
    found = list(mutation.mutants("mutated.py"))
    assert {mutant.text for mutant in found} == EXPECTED
    assert sum(mutant.text == "pass" for mutant in found) == 3, "the refusal, the addition and the call"
    for mutant in found:
        ast.parse(mutant.applied())
        removed, added = (line for line in mutant.diff() if not line.startswith("@@"))
        assert (removed[0], added[0]) == ("-", "+")


def test_the_tests_of_every_critical_module_are_there() -> None:
    modules = mutation.tests_of()
    assert len(modules) >= len(mutation.TESTS)
    for tests in modules.values():
        assert all((mutation.ROOT / test).exists() for test in tests)


@pytest.mark.long
def test_what_is_listed_as_equivalent_is_still_in_the_code() -> None:
    known = mutation.equivalents()
    found = {
        (file, mutation.key(mutant.diff())) for file in {file for file, _ in known} for mutant in mutation.mutants(file)
    }
    assert set(known) <= found, "take out of bench/mutation_equivalents.json what the code no longer has"
    assert all(len(why) > 10 for why in known.values())


@pytest.mark.long
def test_mutants_are_killed_in_a_copy() -> None:
    file = mutation.ROOT / "caddie/report/units.py"
    before = file.read_bytes()
    command = [sys.executable, mutation.__file__, "--mutants", "3", "--only", "report/units", "--nice", "0"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "3 mutants: 0 equivalent, 3 killed, 0 survived" in done.stdout
    assert file.read_bytes() == before
