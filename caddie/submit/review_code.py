"""Signs of illegal scoring in a script's syntax tree. They tell a reviewer where to look and prove nothing."""

import ast
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import islice

from caddie.submit.review_flow import follow
from caddie.submit.review_rules import Findings
from caddie.submit.review_scopes import Place, Scope
from caddie.submit.review_script import RUNS, Script, constant, last

_HINTS = re.compile(r"(?:n_?gram_)?(?:within|word)\w*(?:boost|beta)", re.IGNORECASE)
_NETWORK = {"requests", "urllib.request", "http.client", "huggingface_hub", "httpx", "aiohttp", "boto3", "socket"}
_FETCHES = {"urlopen", "urlretrieve", "load_state_dict_from_url", "download_url_to_file", "hf_hub_download"}
_STARTS = {"run", "call", "check_call", "check_output", "Popen", "system"}
_FETCHING = re.compile(r"\b(?:curl|wget|git clone|pip install|apt-get)\b|https?://\S+\.(?:bin|pt|npz|zip|gz|tar)\b")
_OPENS = {"open", "load", "fromfile", "memmap", "Path", "read_bytes", "read_text", "load_file"}
_SWITCHES = {"enable_grad", "set_grad_enabled", "inference_mode"}
"""Names that may switch gradients on."""
_MOST = 1_000
"""Places of a function that are compared with each other."""
_MOST_CALLERS = 4
"""Callers of callers that are asked whether they scored before."""
_BY_LABELS = ("code-target", "code-mixture", "code-selection", "code-cut", "code-live")
"""Rules that a place breaks by its labels alone; places of this kind are noted under the rule."""
_SHARDS = ("fineweb_train_000000.bin", "fineweb_val_000000.bin")


def check_scripts(scripts: Sequence[Script], switched_off: Container[str], found: Findings) -> None:
    """Check the script that trains and the files that it names; `switched_off` are settings that logs say are 0."""
    scopes = follow(scripts)
    unscored = _check_order(scopes, found)
    for scope in scopes:
        for said, line in islice(_rescorings(scope, unscored), 1):
            scope.script.add("code-rescoring", said, line, found)
        for rule in _BY_LABELS:
            for place in scope.places[rule][:1]:
                scope.script.add(rule, place.what, place.line, found)
        if scope.places["hook"] and scope.places["feed"]:
            said = f"{scope.name or 'the script'} measures what a model makes of validation text"
            scope.script.add("code-calibration", said, scope.places["feed"][0].line, found)
    for script in scripts:
        _check_hints(script, switched_off, found)
        _check_outside(script, found)
    _check_spaces(scopes, found)


def _check_order(scopes: Sequence[Scope], found: Findings) -> set[Scope]:
    """Check that text is scored before parameters learn from it, callers included; return functions that break this.

    `bare` has each function's updates before any scoring: the place there, the function that trains, and its place.
    """
    bare: dict[Scope, list[tuple[Place, Scope, Place]]] = {}
    late: dict[Scope, Place] = {}
    called = {call.function for scope in scopes for call in scope.calls}
    failing = {scope: _need_gradients(scope) for scope in scopes if scope.places["backward"]}
    for _ in range(_MOST_CALLERS):
        for scope in scopes:
            events = [(place, scope, place) for place in scope.places["update"][:_MOST]]
            for call in scope.calls[:_MOST]:
                for update, source, place in bare.get(call.function, ())[:1] if call.function is not scope else ():
                    if call.no_gradient and place.line in failing.get(source, ()):
                        continue
                    inside = call.function.parent is scope and scope.name
                    if update.what == "found" or call.what or inside:  # it finds the text, or is handed it
                        what = "found" if update.what == "found" else call.what or "given"
                        events.append((replace(call, what=what), source, place))
            adds = _adds(scope)
            first = min((place.line for place in adds), default=None)
            events = [event for event in events if first is None or event[0].line <= first]
            scoring = {place.loop for place in adds if place.loop}
            late.update([(scope, here) for here, _, _ in events if here.loop in scoring][:1])
            bare[scope] = [event for event in events if event[0].loop not in scoring]
    for scope, place in late.items():
        said = f"{scope.name} adds up losses only after it has updated parameters on the same text"
        scope.script.add("code-update-first", said, place.line, found)
    for scope, trained in bare.items():
        if scope not in called:
            for _, source, place in trained[:1]:
                said = f"{source.name} trains on validation text, and neither it nor its caller scores that text before"
                source.script.add("code-trains-on-validation", said, place.line, found)
    return {scope for scope in scopes if late.get(scope) or bare[scope]}


def _need_gradients(scope: Scope) -> set[int]:
    """Return the lines of a function that fail where gradients are off, as it does not switch them on."""
    lines = {place.line for place in scope.places["backward"]}
    return set() if _SWITCHES & _names(scope.node) else lines


def _adds(scope: Scope) -> list[Place]:
    """Return where a function adds to totals, or hands text and totals to one that does."""
    helped = [
        call for call in scope.calls[:_MOST]
        if call.what and any(one.what in call.function.parameters for one in call.function.places["add"][:_MOST])
    ]  # fmt: skip
    return [*scope.places["add"][:_MOST], *helped]


def _rescorings(scope: Scope, unscored: set[Scope]) -> Iterator[tuple[str, int]]:
    """Yield how and where text is scored again by a model that has learned from it: in a second call, pass or loop."""
    calls = [(call, call.function) for call in scope.calls[:_MOST] if _adds(call.function)]
    learning = [(call, one) for call, one in calls if one.places["update"] and one not in unscored]
    for call, learner in learning[:1]:
        if isinstance(call.loop, ast.For) and not _chooses(call.loop):
            said = f"the loop of line {call.loop.lineno} calls {learner.name} again, which learns from what it scores"
            yield said, call.line
        for later, scorer in calls:
            if later.line > call.line and call.models & later.models:
                said = f"{scorer.name} scores with the model that {learner.name} trained on the same text"
                yield f"{said} (line {call.line})", later.line
    totals = {place.what for place in scope.places["add"]}
    for place in scope.places["reset"][:_MOST]:
        if place.what in totals and _read_after(scope.node, place.what, getattr(place.loop, "end_lineno", 0)):
            said = f"{place.what} is set back within the loop that adds it up: what was scored before does not count"
            yield said, place.line
    for update in scope.places["update"][:1]:
        if isinstance(update.loop, ast.For) and any(one.loop is update.loop for one in _adds(scope)):
            if not _chooses(update.loop):
                said = f"the loop of line {update.loop.lineno} passes over the same text again and scores it"
                yield said, update.line


def _read_after(node: ast.AST, name: str, line: int) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name and one.lineno > line for one in ast.walk(node))


def _chooses(loop: ast.For) -> bool:
    """True if the loop's variable selects a part of the text: the body uses it other than in the conditions of ifs."""
    names = _names(loop.target)
    used = [one for part in loop.body for one in ast.walk(part) if isinstance(one, ast.Name) and one.id in names]
    tests = [one.test for part in loop.body for one in ast.walk(part) if isinstance(one, (ast.If, ast.IfExp))]
    in_tests = {id(one) for test in tests for one in ast.walk(test)}
    return any(id(one) not in in_tests for one in used)


def _check_spaces(scopes: Sequence[Scope], found: Findings) -> None:
    """Find bytes of a piece that count its leading space, in a script that adds that space again while it scores."""
    trees = {scope.script.file: scope.script.tree for scope in scopes}.values()
    added = any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd)
        and any(isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.Invert) for one in (node.left, node.right))
        and any(isinstance(one, ast.Subscript) for one in (node.left, node.right))
        for tree in trees for node in ast.walk(tree)
    )  # fmt: skip
    for scope in scopes if added else ():
        for node in ast.walk(scope.node):
            plus = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and constant(node.right) == 1
            length = node.left if plus and isinstance(node, ast.BinOp) else node
            if isinstance(length, ast.Call) and last(length.func) == "len" and "encode" in _names(length):
                calls = [one for one in ast.walk(length) if isinstance(one, ast.Call) and last(one.func) == "replace"]
                if plus or any(constant(one) == " " for call in calls for one in call.args[1:2]):
                    said = f"{scope.name} counts the space before a word, and scoring adds it again"
                    scope.script.add("code-bytes", said, length.lineno, found)
                    return


def _check_hints(script: Script, switched_off: Container[str], found: Findings) -> None:
    """Find boosts of hints inside a word and at its start that are on by default and in no log switched off."""
    for node in ast.walk(script.tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = last(target)
            default = next((one for one in map(constant, ast.walk(node.value)) if _positive(one)), None)
            if _HINTS.fullmatch(name) and default is not None and name not in switched_off:
                said = f"{name} is {default} by default: whether such a hint is given depends on the target"
                script.add("code-target-hints", said, node.lineno, found)


def _check_outside(script: Script, found: Findings) -> None:
    """Find what reaches beyond the folder and the data: network, other files, source that is built at run time."""
    nodes = list(ast.walk(script.tree))
    products = (node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult))
    counted = (node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "nargs")
    compared = (one for node in nodes if isinstance(node, ast.Compare) for one in (node.left, *node.comparators))
    printed = (one for node in nodes if isinstance(node, ast.Call) and last(node.func) == "print" for one in node.args)
    no_files = {*counted, *compared, *printed, *(one for node in products for one in (node.left, node.right))}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            for name in modules:
                if name in _NETWORK or name.split(".")[0] in _NETWORK:
                    script.add("code-network", f"it uses the network ({name})", node.lineno, found)
                versions = isinstance(node, ast.ImportFrom) and name == "importlib.metadata"
                if name.split(".")[0] == "importlib" and not versions:
                    script.add("code-hidden", "it imports a module whose name is built at run time", node.lineno, found)
        elif isinstance(node, ast.Call):
            _check_call(node, script, found)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "*" in node.value:
            stars = node in no_files and not node.value.strip("*")  # a line of stars, or as many words as there are
            if not stars and all(fnmatch(shard, node.value.rpartition("/")[2]) for shard in _SHARDS):
                said = f"{node.value} matches the shards of training and of validation"
                script.add("code-training-files", said, node.lineno, found)


def _check_call(node: ast.Call, script: Script, found: Findings) -> None:
    name = last(node.func)
    words = [text for one in ast.walk(node) if isinstance(text := constant(one), str)]
    fetched = _FETCHING.search(" ".join(words)) if name in _STARTS else None
    if fetched or name in _FETCHES or (isinstance(node.func, ast.Attribute) and last(node.func.value) == "hub"):
        script.add("code-network", f"it uses the network ({fetched[0] if fetched else name})", node.lineno, found)
    if isinstance(node.func, ast.Name) and name in RUNS:
        script.add("code-hidden", f"{name} runs code that is built at run time", node.lineno, found)
    if name in _OPENS:
        for one in (*node.args, *(keyword.value for keyword in node.keywords)):
            path = constant(one)
            if isinstance(path, str) and path.startswith("/") and not path.startswith(("/proc/", "/dev/", "/sys/")):
                script.add("code-outside", f"it reads {path}, which is not in the folder", node.lineno, found)


def _positive(value: object) -> bool:
    try:
        return isinstance(value, (str, int, float)) and not isinstance(value, bool) and float(value) > 0
    except (ValueError, OverflowError):
        return False


def _names(node: ast.AST) -> set[str]:
    return {last(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))}
