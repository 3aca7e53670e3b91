"""Labels of expressions: where validation text, targets and losses come together, by calls, indices and arithmetic."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from caddie.submit.review_scopes import (
    ALL,
    CHOICE,
    ENV,
    FILE,
    LIVE,
    LOOKUP,
    LOSS,
    PARAMETER,
    TARGET,
    TEXT,
    Call,
    Flow,
    Place,
    Scope,
    plain,
    union,
    without,
)
from caddie.submit.review_script import base_of, callee, chain, constant, last

_VALIDATION_FILE = re.compile(r"(?:^|[_/\-])val(?:id|idation)?(?:[_*./\-]|$)")
_VALIDATION_NAME = re.compile(r"(?:val|valid|validation)_(?:tokens|ids|files)")
_SIZES = {"shape", "device", "dtype", "numel", "size", "len", "dim", "ndim", "isinstance", "nonzero", "flatnonzero"}
"""Names that give a tensor's shape or indices into it, but none of its values."""
_SMALLER = {"amin", "sort", "min", "minimum", "fmin", "topk", "kthvalue", "clamp_max"}
_BETWEEN = {"clamp", "clamp_", "clip", "clip_"}
_SUMS = {"sum", "mean", "item"}
_GROW = {"append", "extend", "update", "add", "insert", "appendleft", "put"}
_WEIGHTS = {"data", "weight", "bias", "grad"}
NO_GRADIENT = {"no_grad", "inference_mode"}
_TARGETS = TARGET | TARGET << PARAMETER


class Values:
    """Labels of the expressions of a scope, in one pass over it."""

    def __init__(self, flow: Flow, scope: Scope) -> None:
        self.flow, self.scope = flow, scope
        self.loop: ast.AST | None = None
        self.no_gradient = any(last(callee(one)) in NO_GRADIENT for one in getattr(scope.node, "decorator_list", []))
        self.of_class = False
        self.known: dict[int, int] = {}
        self.now: dict[str, int] = {}
        """Labels of variables whose last assignment is plain; for others, the labels of all assignments count."""
        self.filled: dict[str, int] = {}
        """Target labels that a loop has put into variables so far: at its next iteration, they were scored before."""
        self.outer = set[str]()
        """Variables of a scope around this one that it assigns."""
        self.replaced: list[tuple[str, int]] = []
        """Variables assigned in a branch, and their labels before."""
        for name in scope.parameters:
            if not scope.called and _VALIDATION_NAME.fullmatch(name):
                scope.labels[name] |= TEXT << PARAMETER

    def note(self, kind: str, node: ast.expr | ast.stmt, what: str = "") -> None:
        """Note a place of interest."""
        self.scope.places[kind].append(Place(node.lineno, self.loop, what, self.no_gradient))

    def bind(self, target: ast.expr, marks: int, again: bool = False) -> None:
        """Give a target labels; with `again`, in addition to those that it has."""
        if isinstance(target, ast.Name):
            name, scope, held = target.id, self.scope, self.variable(target.id)
            self.replaced.append((name, held))
            self.now[name] = marks | held if again else marks
            in_loop = again and self.loop is not None
            scope.labels[name] |= without(marks, TARGET) if in_loop else marks
            filled = self.filled.get(name, 0) if again else 0
            self.filled[name] = filled | marks & _TARGETS if in_loop else filled
            scope.items.pop(name, None)
            scope.classes.pop(name, None)
            scope.changed |= {name} if again else set()
            if name in self.outer and scope.parent is not None:
                home = self.flow.home(name, scope.parent)
                home.labels[name] |= plain(marks)
                home.changed.add(name)
            if self.of_class:
                self.flow.attributes[name] |= marks & ALL
        elif isinstance(target, ast.Attribute):
            marks = without(marks, TARGET) if again else marks  # whether before or after scoring is not known
            for owner in (f"{self.scope.owner}.", "") if target.attr not in _WEIGHTS else ():
                self.flow.attributes[owner + target.attr] |= marks if len(owner) > 1 else marks & ALL
        elif isinstance(target, (ast.Subscript, ast.Starred)):
            index = self.value(target.slice) if isinstance(target, ast.Subscript) else 0
            picked = index & (TEXT | TEXT << PARAMETER | _TARGETS) if plain(index) & TARGET else 0
            self.bind(target.value, marks | picked, isinstance(target, ast.Subscript))
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self.bind(one, marks)

    def iterate(self, target: ast.expr, iterable: ast.expr) -> None:
        """Give a loop's target the labels of an element."""
        name = last(callee(iterable))
        marks = self.value(iterable)
        if isinstance(target, ast.Tuple) and isinstance(iterable, ast.Call):
            if name == "enumerate" and len(target.elts) == 2 and iterable.args:
                self.iterate(target.elts[1], iterable.args[0])
                return
            if name == "zip" and len(target.elts) == len(iterable.args):
                for one, values in zip(target.elts, iterable.args, strict=True):
                    self.iterate(one, values)
                return
        self.take(target, iterable, marks)

    def take(self, target: ast.expr, value: ast.expr, marks: int) -> None:
        """Give a target the labels of a value, or each of its parts those of what a function returns in its place."""
        if isinstance(target, (ast.Tuple, ast.List)) and (found := self.parts(value, len(target.elts))):
            for one, part in zip(target.elts, found, strict=True):
                self.bind(one, part)
        else:
            self.bind(target, marks)

    def adding(self, total: ast.expr, marks: int, node: ast.expr | ast.stmt) -> None:
        """Note that a loss or a table's bytes are added to a total."""
        known = plain(marks)
        if known & TEXT and (known & LOOKUP or self.no_gradient):
            self.note("add", node, last(base_of(total)))

    def change(self, target: ast.expr, marks: int, node: ast.expr | ast.stmt) -> None:
        """Note that a weight is changed in place by a value from the text."""
        names = {one.attr for one in ast.walk(target) if isinstance(one, ast.Attribute)}
        if plain(marks) & TEXT and names & _WEIGHTS:
            self.note("update", node, _whose(marks))

    # expressions

    def value(self, node: ast.expr) -> int:
        """Return the labels of an expression, which is looked at once a pass."""
        if id(node) not in self.known:
            self.known[id(node)] = self._looked_at(node)
        return self.known[id(node)]

    def _looked_at(self, node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            return self.variable(node.id)
        if isinstance(node, ast.Constant):
            return TEXT if isinstance(node.value, str) and _VALIDATION_FILE.search(node.value) else 0
        if isinstance(node, ast.Attribute):
            inner = self.value(node.value)
            if node.attr in _SIZES:
                return 0
            named = TEXT if _VALIDATION_NAME.fullmatch(node.attr) else ENV if node.attr == "environ" else 0
            own = f"{self.scope.owner}." if last(node.value) == "self" else ""
            if isinstance(node.value, ast.Name):
                kind = self.flow.home(node.value.id, self.scope).classes.get(node.value.id)
                if kind and f"{kind}.{node.attr}" in self.flow.attributes:
                    held = plain(self.flow.attributes[f"{kind}.{node.attr}"])
                    inner &= held | held << PARAMETER
            return inner | self.flow.attributes.get(own + node.attr, 0) | named
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.BinOp):
            left, right = self.value(node.left), self.value(node.right)
            self.meet(node, left, right)
            return left | right
        if isinstance(node, ast.Compare):
            marks = union(self.value(one) for one in (node.left, *node.comparators))
            return marks | CHOICE if plain(marks) & LOSS and plain(marks) & TEXT else marks
        if isinstance(node, ast.NamedExpr):
            marks = self.value(node.value)
            self.bind(node.target, marks)
            return marks
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            for one in node.generators:
                self.iterate(one.target, one.iter)
                for test in one.ifs:
                    self.value(test)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return union(self.value(one) for one in parts)
        if isinstance(node, ast.Dict):
            self.merge(node, node.values[0:1], node.values[1:] if None in node.keys[1:] else [])
        return union(self.value(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr))

    def variable(self, name: str) -> int:
        """Return the labels that a variable has here."""
        if name in self.now:
            return self.now[name] | self.filled.get(name, 0)
        return self.flow.home(name, self.scope).labels.get(name, 0) | self.filled.get(name, 0)

    def _subscript(self, node: ast.Subscript) -> int:
        marks = self.value(node.value)
        slices = [one for one in ast.walk(node.slice) if isinstance(one, ast.Slice)]
        index = self.value(node.slice)
        if isinstance(node.value, ast.Name):
            home, key = self.flow.home(node.value.id, self.scope), constant(node.slice)
            if node.value.id not in home.changed and key in home.items.get(node.value.id, {}):
                return home.items[node.value.id][key]
        if plain(marks) & TEXT and not self.scope.owner and any(_later(one.lower) for one in slices):
            marks |= TARGET
        if plain(index) & CHOICE and plain(marks) & LOSS:
            self.note("code-selection", node, "a token's loss decides whether it counts")
        if plain(index) & TEXT and not slices:
            marks |= LOOKUP | without(index, LOSS)
            if plain(self.value(node.value)) & TEXT and plain(index) & TARGET:
                marks = LOSS | without(marks, TARGET)
        return marks

    def arguments(self, node: ast.Call) -> list[int]:
        """Return the labels of each of a call's arguments."""
        return [self.value(one) for one in (*node.args, *(one.value for one in node.keywords))]

    def _call(self, node: ast.Call) -> int:
        name, of = last(node.func), node.func.value if isinstance(node.func, ast.Attribute) else node.func
        receiver = 0 if isinstance(node.func, ast.Name) else self.value(of)
        given = self.arguments(node)
        handed = union(given)
        marks = receiver | handed
        known = plain(marks)
        if name in _SIZES or name.endswith("_like"):
            return 0
        if name.endswith("_as"):
            return receiver
        is_number = name in {"int", "float"} and isinstance(node.func, ast.Name)
        if is_number or (name in _SUMS and len(node.args) <= (0 if receiver else 1)):
            return without(marks, TARGET)
        if name == "state_dict":
            return LIVE
        if name in {"load", "decompress", "read", "read_bytes"}:
            return marks | FILE
        if name == "getenv":
            return marks | ENV
        if "cross_entropy" in name or name in {"nll_loss", "NLLLoss"}:
            return self._loss(node)
        if name in {"gather", "take_along_dim", "take_along_axis"} and known & TEXT and known & TARGET:
            return LOSS | without(marks, TARGET)
        backwards = name == "roll" and any(isinstance(one, ast.USub) for one in ast.walk(node))
        if known & TEXT and (name == "flip" or backwards):
            return marks | TARGET
        if known & TEXT and name in {"backward", "grad"}:
            self.note("update", node, _whose(marks))
            self.note("backward", node)
        if known & TEXT and known & LOSS and (name in _SMALLER or _bounded(node, method=bool(receiver))):
            self.note("code-selection", node, "a loss is replaced by a smaller one")
        if isinstance(node.func, ast.Attribute):
            self._method(node.func.value, name, node, handed)
        if name.startswith("register_") and "hook" in name:
            self.note("hook", node)
        elif known & TEXT and handed and last(base_of(node.func)) in self.flow.models:
            self.note("feed", node, name)
        arguments = node.args
        if name == "partial" and arguments:
            name, arguments = last(arguments[0]), arguments[1:]
        known_functions = self.flow.functions(name)
        handed_names = [one.id for one in node.args if isinstance(one, ast.Name)]
        if not known_functions:
            self.meet(node, receiver, *given)
        models = frozenset(one for one in handed_names if one in self.flow.models)
        called = [(one, self._hand(one, arguments, node.keywords)) for one in known_functions]
        called += [(one, 0) for other in handed_names for one in self.flow.functions(other)[:1]]
        for function, defaults in called:
            whose = _whose(marks | defaults)
            self.scope.calls.append(Call(node.lineno, self.loop, whose, self.no_gradient, function, models))
        return marks | union(one.returns[None] for one in known_functions)

    def _hand(self, function: Scope, given: Sequence[ast.expr], named: Sequence[ast.keyword]) -> int:
        """Give a function's parameters the labels of a call's arguments; return those of the defaults that it takes."""
        spread, handed = 0, dict[str, int]()
        places = [*function.parameters, *function.rest[:1] * len(given)]
        for name, one in (*zip(places, given, strict=False), *((each.arg, each.value) for each in named)):
            mark = self.value(one)
            if name is None or isinstance(one, ast.Starred):
                spread |= mark
            elif name in function.parameters or function.rest:
                place = name if name in function.parameters else function.rest[-1]
                handed[place] = handed.get(place, 0) | mark
        left = {name: mark for name, mark in function.defaults.items() if name not in handed}
        every = dict.fromkeys((*function.parameters, *function.rest), spread) if spread else {}
        for place, mark in (*handed.items(), *left.items(), *every.items()):
            function.labels[place] |= plain(mark) << PARAMETER
        function.called |= bool(handed or every)
        return union(left.values())

    def parts(self, value: ast.expr, count: int) -> list[int]:
        """Return the labels of each of the `count` values that a script's function returns; empty if not known."""
        if not isinstance(value, ast.Call):
            return []
        known = [one for one in self.flow.functions(last(value.func)) if len(one.returns) > 1]
        passed = union(self.arguments(value)) & (TEXT | TEXT << PARAMETER | FILE | ENV)
        return [passed | union(one.returns[place] for one in known) for place in range(count)] if known else []

    def _method(self, of: ast.expr, name: str, node: ast.Call, marks: int) -> None:
        target = base if isinstance(base := chain(of), ast.expr) else of
        if name == "at" and node.args:  # a NumPy function's `at` changes its first argument
            self.bind(node.args[0], marks, True)
        if name in _GROW or (name.endswith("_") and not name.startswith("_")):
            if name == "update":
                self.merge(node, [target], node.args)
            self.bind(target, without(marks, LOOKUP) if name == "add_" else marks, True)
            if name == "add_" or (name == "append" and plain(marks) & (LOSS | LOOKUP)):
                self.adding(target, marks, node)
            if name not in _GROW:
                self.change(target, marks, node)
        if name == "zero_" and self.loop is not None:
            self.note("reset", node, last(target))

    def _loss(self, node: ast.Call) -> int:
        """Return the labels of a cross-entropy; note targets, and scores that depend on them."""
        scores = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "input")]
        targets = [*node.args[1:2], *(one.value for one in node.keywords if one.arg == "target")]
        waiting = [base.id for one in targets if isinstance(base := chain(one), ast.Name)]
        seen = set(waiting)
        while waiting:
            name = waiting.pop()
            self.bind(ast.Name(name), TARGET, True)
            self.scope.labels[name] |= TARGET
            waiting += self.scope.aliases[name] - seen
            seen |= self.scope.aliases[name]
        known = plain(self.value(scores[0])) if scores else 0
        if known & TARGET and known & TEXT:
            self.note("code-target", node, "what is scored depends on the target, or on a later place")
        return LOSS | without(union(self.arguments(node)), TARGET)

    def meet(self, node: ast.expr | ast.stmt, *marks: int) -> None:
        """Note a token's loss that is mixed with something else that depends on the target."""
        known = [plain(one) for one in marks]
        if any(one & LOSS and one & TEXT for one in known) and any(
            one & TEXT and one & (TARGET | LOOKUP) and not one & LOSS for one in known
        ):
            self.note("code-mixture", node, "a token's loss is combined with something that its target chose")
        if any(one & CHOICE for one in known) and any(one & LOSS and not one & CHOICE for one in known):
            self.note("code-selection", node, "a token's loss decides whether it counts, or for how much")

    def merge(self, node: ast.expr, first: Sequence[ast.expr], others: Sequence[ast.expr]) -> None:
        """Note weights that are read back from a file and then replaced by trained ones."""
        read = any(self.value(one) & FILE for one in first)
        apart = (self.value(one) & LIVE and not self.value(one) & FILE for one in others)
        if read and (any(apart) or any(last(callee(one)) == "load" for one in others)):
            self.note("code-live", node, "weights that were read back are replaced by others")


def _whose(marks: int) -> str:
    """Return where validation text comes from: found by the function, handed to it, or an empty string."""
    return "found" if marks & TEXT else "given" if plain(marks) & TEXT else ""


def _bounded(node: ast.Call, method: bool) -> bool:
    """True for a call that holds a loss below a bound; its exponential is a probability, which may be held below 1."""
    name, names = last(node.func), {one.arg for one in node.keywords}
    changed = node.func.value if method and isinstance(node.func, ast.Attribute) else (*node.args, node)[0]
    upper = {"max", "a_max"} & names or len(node.args) > (1 if method else 2)
    return name in _BETWEEN and bool(upper) and last(callee(changed)) != "exp"


def _later(node: ast.expr | None) -> bool:
    """True for 1 and `start + 1`, where a slice of targets begins."""
    return constant(node) == 1 or (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and constant(node.right) == 1
    )
