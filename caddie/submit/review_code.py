"""Signs of illegal scoring in a script's syntax tree. They tell a reviewer where to look and prove nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from caddie.submit.review_rules import Findings
from caddie.submit.review_script import Script

_VALIDATION = re.compile(r"(?:val|valid|validation)_(?:tokens|ids)")
"""Names of the validation text."""
_BYTES = re.compile(r"byte|bpb|bits", re.IGNORECASE)
"""In names of what is added up while tokens are scored."""
_CACHE = re.compile(r"n_?gram|ppm|backoff|_ng\b", re.IGNORECASE)
_SCHEDULE = re.compile(r"momentum|warm|decay|frac|(?:^|_)lr(?:_|$)")
"""In names of what is blended over the run, as momentum is; not a probability."""
_CALIBRATION = re.compile(r"calib|hessian|awq|collect_act", re.IGNORECASE)
_HINTS = re.compile(r"(?:n_?gram_)?(?:within|word)\w*(?:boost|beta)", re.IGNORECASE)
_NETWORK = {"requests", "urllib.request", "http.client", "huggingface_hub", "httpx", "aiohttp", "wget", "boto3"}
_STARTS = {"run", "call", "check_call", "check_output", "Popen", "system"}
_FETCHING = re.compile(r"\b(?:curl|wget|git clone|pip install|apt-get)\b|https?://\S+\.(?:bin|pt|npz|zip|gz|tar)\b")
HELD_OUT = 50_000
_MOST = 1_000
"""Loops, lines or calls of a function that are compared with each other."""


def check_scripts(scripts: Sequence[Script], switched_off: Container[str], found: Findings) -> None:
    """Check the script that trains and the files that it names; `switched_off` are settings that logs say are 0."""
    functions = {one.name: one for script in scripts for one in _functions(script)}
    _check_order(functions, found)
    for script in scripts:
        _check_hints(script, switched_off, found)
        _check_network(script, found)
    _check_spaces(functions, found)
    for one in functions.values():
        _check_mixture(one, found)
        if one.calibrates:
            said = f"{one.name} measures inputs on validation text: quantization would be calibrated on it"
            one.script.add("code-calibration", said, one.calibrates[0], found)


def check_preparation(tree: ast.Module, file: str, found: Findings) -> None:
    """Check how many documents a script of the folder that prepares data holds out unless told otherwise."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(_constant(one) == "--val-docs" for one in node.args):
            default = next((_constant(one.value) for one in node.keywords if one.arg == "default"), None)
            if isinstance(default, int) and default < HELD_OUT:
                said = f"--val-docs is {default:,} by default, of {HELD_OUT:,} in the set: training text would hold the"
                said += " others, and the log cannot show whether it was given"
                found.add("held-out-default", file, said, node.lineno)


@dataclass
class _Function:
    """A function: where it reads validation text, updates parameters and adds up bytes, and what it calls."""

    name: str
    node: ast.FunctionDef
    script: Script
    reads: list[int] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    adds: list[int] = field(default_factory=list)
    loops: list[range] = field(default_factory=list)
    """Lines of each loop."""
    calibrates: list[int] = field(default_factory=list)
    """Lines of calls that measure inputs or Hessians on validation text."""
    calls: list[tuple[int, str, frozenset[str]]] = field(default_factory=list)
    """Line, function and names of models among the arguments of each call, functions that are arguments included."""

    @cached_property
    def lessons(self) -> list[tuple[int, bool, bool]]:
        """Loops that read validation text and then update: line of the update; if bytes are added up before, and after.

        Only loops inside no other loop count: a legal one scores a chunk and then makes several passes over it.
        """
        found, end = [], 0
        for loop in sorted(self.loops, key=lambda loop: loop.start)[:_MOST]:
            if loop.start < end:
                continue
            end = loop.stop
            reads, adds = ([line for line in lines[:_MOST] if line in loop] for lines in (self.reads, self.adds))
            updates = [line for line in self.updates[:_MOST] if line in loop and reads and line >= min(reads)]
            if updates:
                first = min(updates)
                found.append((first, any(line < first for line in adds), any(line >= first for line in adds)))
        return found


def _functions(script: Script) -> Iterator[_Function]:
    for node in ast.walk(script.tree):
        if isinstance(node, ast.FunctionDef):
            one = _Function(node.name, node, script)
            parts = [part for part in ast.walk(node) if isinstance(part, (ast.stmt, ast.expr))]
            texts: set[str] = set()
            for part in sorted(parts, key=lambda part: part.lineno):
                _look(part, one, texts)
            yield one


def _look(part: ast.AST, one: _Function, texts: set[str]) -> None:
    """Note what a part of a function's tree does; `texts` grows by other names of validation text."""
    if isinstance(part, ast.Assign) and not (
        isinstance(part.value, ast.Call) and isinstance(part.value.func, ast.Name)
    ):
        if any(_is_text(name, texts) for name in _names(part.value)):
            texts.update(target.id for target in part.targets if isinstance(target, ast.Name))
    if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call) and "val_files" in _names(part.value):
        if re.search("loader|stream", _last(part.value.func), re.IGNORECASE):
            texts.update(target.id for target in part.targets if isinstance(target, ast.Name))
    if isinstance(part, ast.Subscript) and _is_text(_last(part.value), texts):
        one.reads.append(part.lineno)
    elif isinstance(part, (ast.For, ast.While)):
        one.loops.append(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    elif isinstance(part, ast.AugAssign) and _BYTES.search(_last(part.target)):
        one.adds.append(part.lineno)
    elif isinstance(part, ast.Call):
        _look_at_call(part, one, texts)


def _look_at_call(call: ast.Call, one: _Function, texts: set[str]) -> None:
    name = _last(call.func)
    arguments = [argument for argument in call.args if isinstance(argument, (ast.Name, ast.Attribute))]
    models = frozenset(_last(argument) for argument in arguments if "model" in _last(argument))
    one.calls += [(call.lineno, called, models) for called in (name, *map(_last, arguments))]
    if name == "backward" or (name == "grad" and "autograd" in ast.dump(call.func)):
        one.updates.append(call.lineno)
    added = isinstance(call.func, ast.Attribute) and name == "add_" and _BYTES.search(_last(call.func.value))
    if added or re.search("accumulate.*bp|score_chunk", name):
        one.adds.append(call.lineno)
    if _CALIBRATION.search(name) and any(_is_text(_last(argument), texts) for argument in arguments):
        one.calibrates.append(call.lineno)


def _is_text(name: str, texts: set[str]) -> bool:
    return name in texts or bool(_VALIDATION.fullmatch(name))


def _check_order(functions: dict[str, _Function], found: Findings) -> None:
    """Check that validation text is scored before parameters learn from it, and not again afterwards."""
    unscored = {
        called
        for caller in functions.values()
        for line, called, _ in caller.calls
        if called in functions and line <= min(caller.adds, default=line)
    }
    called = {name for caller in functions.values() for _, name, _ in caller.calls}
    for one in functions.values():
        for line, before, after in one.lessons:
            if not before and after:
                said = f"{one.name} adds up bytes only after it has updated parameters on the same text"
                one.script.add("code-update-first", said, line, found)
            elif not before and (one.name in unscored or one.name not in called):
                said = f"{one.name} trains on validation text, and neither it nor its caller scores that text before"
                one.script.add("code-trains-on-validation", said, line, found)
        _check_rescoring(one, functions, found)


def _check_rescoring(one: _Function, functions: dict[str, _Function], found: Findings) -> None:
    """Find a call that scores with the model that an earlier call has trained while scoring."""
    calls = [call for call in one.calls if call[1] in functions]
    learning = [call for call in calls if any(before for _, before, _ in functions[call[1]].lessons)]
    scoring = [call for call in calls if functions[call[1]].adds]
    for line, learner, models in learning[:_MOST]:
        for later, scorer, others in scoring[:_MOST]:
            if later > line and models & others:
                said = f"{scorer} scores with the model that {learner} trained on the same text (line {line})"
                one.script.add("code-rescoring", said, later, found)
                return


def _check_mixture(one: _Function, found: Findings) -> None:
    """Find (1 - a) p + a q in a function that speaks of n-grams or PPM."""
    if not any(_CACHE.search(name) for name in {one.name, *_names(one.node)}):
        return
    for node in ast.walk(one.node):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _is_blend(node):
            if not any(_SCHEDULE.search(name) for name in _names(node)):
                said = (
                    "the model's probability is blended with a cache's: does the blend sum to one over the vocabulary?"
                )
                one.script.add("code-mixture", said, node.lineno, found)
                return


def _check_spaces(functions: dict[str, _Function], found: Findings) -> None:
    """Find bytes of a piece that count its leading space, in a script that adds that space again while it scores."""
    added = any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd)
        and re.search("space", " ".join(_names(node.left))) and re.search("boundary", " ".join(_names(node.right)))
        for one in functions.values() for node in ast.walk(one.node)
    )  # fmt: skip
    for one in functions.values() if added else ():
        for node in ast.walk(one.node):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _constant(node.right) == 1:
                if {"len", "encode"} <= _names(node.left) and any("bytes" in name for name in _names(one.node)):
                    said = f"{one.name} counts the space before a word, and scoring adds it again"
                    one.script.add("code-bytes", said, node.lineno, found)
                    return


def _is_blend(node: ast.BinOp) -> bool:
    sides = [_factors(node.left), _factors(node.right)]
    for rests, weights in (sides, sides[::-1]):
        rest = [one.right for one in rests if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub)
                and _constant(one.left) in (1, 1.0)]  # fmt: skip
        if {ast.dump(one) for one in rest} & {ast.dump(one) for one in weights}:
            return True
    return False


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [node.left, node.right]
    return []


def _check_hints(script: Script, switched_off: Container[str], found: Findings) -> None:
    """Find boosts of hints inside a word and at its start that are on by default and in no log switched off."""
    for node in ast.walk(script.tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = _last(target)
            default = next((one for one in map(_constant, ast.walk(node.value)) if _positive(one)), None)
            if _HINTS.fullmatch(name) and default is not None and name not in switched_off:
                said = f"{name} is {default} by default: whether such a hint is given depends on the target"
                script.add("code-target-hints", said, node.lineno, found)


def _check_network(script: Script, found: Findings) -> None:
    for node in ast.walk(script.tree):
        used: list[str] = []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            used = [name for name in modules if name in _NETWORK or name.split(".")[0] in _NETWORK]
        elif isinstance(node, ast.Call) and _last(node.func) in _STARTS:
            words = " ".join(str(text) for one in ast.walk(node) if isinstance(text := _constant(one), str))
            used = [fetched[0] for fetched in [_FETCHING.search(words)] if fetched]
        if used and isinstance(node, (ast.stmt, ast.expr)):
            script.add("code-network", f"it uses the network ({used[0]})", node.lineno, found)


def _positive(value: object) -> bool:
    try:
        return isinstance(value, (str, int, float)) and not isinstance(value, bool) and float(value) > 0
    except ValueError:
        return False


def _names(node: ast.AST) -> set[str]:
    return {_last(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))}


def _last(node: ast.AST) -> str:
    """Return the last name of `a.b.c`, or an empty string."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _constant(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None
