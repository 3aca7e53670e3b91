"""Flow of validation text, targets and losses through a script's syntax tree, by assignments, calls and returns.

A value carries labels. They start where a validation file is named and spread, whatever the names of variables are.
"""

import ast
from collections.abc import Iterator, Sequence

from caddie.submit.review_scopes import ALL, ENV, LOOKUP, LOSS, TEXT, Flow, Scope, plain, without
from caddie.submit.review_script import Script, callee, chain, constant, last
from caddie.submit.review_values import NO_GRADIENT, Values

_MOST_KEYS = 8
"""Most keys of a dict comprehension that are told apart."""
_MOST_PARAMETERS = 100
"""Most parameters of a function that are looked at."""
_MODEL = {"parameters", "named_parameters", "state_dict", "load_state_dict", "train", "eval", "modules"}
"""Methods that tell that a name is a model's."""
_ROUNDS = 7
"""Passes over the script while labels still spread; each follows any number of assignments in order."""


def follow(scripts: Sequence[Script]) -> list[Scope]:
    """Return all functions of the scripts, and each script's top level, with their labels and places."""
    flow = Flow()
    for script in scripts:
        _declare(flow, Scope("", script.tree, script, None))
    for _ in range(_ROUNDS):
        before = flow.size()
        for scope in flow.scopes:
            scope.places.clear()  # the last pass, which has all labels, notes them again
            scope.calls.clear()
            _Walk(flow, scope).block(getattr(scope.node, "body", []))
        if flow.size() == before:
            break
    return flow.scopes


def _declare(flow: Flow, scope: Scope) -> None:
    """Add a scope and those within it."""
    flow.scopes.append(scope)
    waiting: list[tuple[ast.AST, str]] = [(scope.node, "")]
    while waiting:
        at, owner = waiting.pop()
        for child in ast.iter_child_nodes(at):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = Scope(child.name, child, scope.script, scope, owner=owner or scope.owner)
                every = child.args
                names = [one.arg for one in (*every.posonlyargs, *every.args, *every.kwonlyargs)]
                inner.parameters = names[:_MOST_PARAMETERS]
                if inner.parameters[:1] == ["self"]:
                    del inner.parameters[0]
                inner.rest = [one.arg for one in (every.vararg, every.kwarg) if one]
                flow.of_node[child] = inner
                for name in (child.name, owner if child.name == "__init__" else ""):
                    flow.named[name] += [inner] if name else []
                _declare(flow, inner)
            else:
                if isinstance(child, ast.Attribute) and child.attr in _MODEL:
                    flow.models.add(last(child.value))
                waiting.append((child, child.name if isinstance(child, ast.ClassDef) else owner))


def _defaults(every: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Yield each parameter that has a default, and that default."""
    placed = [*every.posonlyargs, *every.args]
    for one, default in zip(placed[len(placed) - len(every.defaults) :], every.defaults, strict=True):
        yield one.arg, default
    for one, named in zip(every.kwonlyargs, every.kw_defaults, strict=True):
        if named is not None:
            yield one.arg, named


class _Walk(Values):
    """One pass over a scope's statements, in order."""

    by_setting = False
    """True inside an `if` whose condition is a setting."""

    def block(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            self.statement(node)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = self.flow.of_node[node]
            inner.defaults = {name: self.value(one) for name, one in _defaults(node.args) if name in inner.parameters}
        elif isinstance(node, ast.ClassDef):
            self.of_class, before = True, self.of_class
            self.block(node.body)
            self.of_class = before
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            if node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.assign(target, node.value)
        elif isinstance(node, ast.AugAssign):
            self.augment(node)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            outer, self.loop = self.loop, self.loop or node
            self.now.clear()
            if isinstance(node, ast.While):
                self.value(node.test)
            else:
                self.iterate(node.target, node.iter)
            self.block(node.body)
            self.loop = outer
            self.block(node.orelse)
        elif isinstance(node, ast.If):
            self.branch(node)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            before = self.no_gradient
            for item in node.items:
                self.no_gradient |= last(callee(item.context_expr)) in NO_GRADIENT
                self.no_gradient &= last(callee(item.context_expr)) != "enable_grad"
                marks = self.value(item.context_expr)
                if item.optional_vars is not None:
                    self.bind(item.optional_vars, marks)
            self.block(node.body)
            self.no_gradient = before
        elif isinstance(node, ast.Return) and node.value is not None:
            self.give(node.value)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            self.outer.update(node.names)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self.statement(child)
                elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                    self.block(child.body)
                elif isinstance(child, ast.expr):
                    self.value(child)

    def _looked_at(self, node: ast.expr) -> int:
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            if node.value is not None:
                self.give(node.value)
            return 0
        return super()._looked_at(node)

    def give(self, node: ast.expr) -> None:
        self.scope.returns[None] |= self.value(node) & ALL
        if isinstance(node, ast.Tuple):
            for place, one in enumerate(node.elts):
                self.scope.returns[place] |= self.value(one) & ALL
        self.cut(node, None)

    def branch(self, node: ast.If) -> None:
        marks = plain(self.value(node.test))
        adds, by_setting = len(self.scope.places["add"]), self.by_setting
        self.by_setting |= bool(marks & ENV)
        for body in (node.body, node.orelse):  # perhaps neither is run
            before, self.replaced = self.replaced, []
            self.block(body)
            for name, held in self.replaced:
                self.now[name] = self.variable(name) | held
            before += self.replaced
            self.replaced = before
        self.by_setting = by_setting
        leaves = any(isinstance(one, (ast.Continue, ast.Break)) for one in (*node.body, *node.orelse))
        if marks & LOSS and marks & TEXT and (leaves or len(self.scope.places["add"]) > adds):
            self.note("code-selection", node, "a token is added up or not, by its own loss")

    # assignments

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            if len(target.elts) == len(value.elts):
                for left, right in zip(target.elts, value.elts, strict=True):
                    self.assign(left, right)
                return
        marks = self.value(value)
        if isinstance(target, ast.Name):
            if isinstance(base := chain(value), ast.Name):
                self.scope.aliases[target.id].add(base.id)
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
                if isinstance(value.left, ast.Name) and value.left.id == target.id:
                    self.adding(target, self.value(value.right), target)
                    marks = without(marks, LOOKUP)
            if self.loop is not None and (isinstance(value, ast.Constant) or last(callee(value)) == "zeros"):
                self.note("reset", target, target.id)
        if isinstance(target, ast.Subscript) and plain(marks) & LOSS:
            self.adding(target, marks, target)
        self.cut(value, target)
        self.take(target, value, marks)
        if isinstance(target, ast.Name):
            if held := self.items(value):
                self.scope.items[target.id] = held
                if self.scope.made.setdefault(target.id, id(value)) != id(value):
                    self.scope.changed.add(target.id)
            called = last(callee(value)) if isinstance(value, ast.Call) else ""
            if any(one.owner == called for one in self.flow.functions(called)):
                self.scope.classes[target.id] = called

    def items(self, value: ast.expr) -> dict[object, int]:
        """Return the labels of a dict's values by their constant keys; empty if it is not known."""
        if isinstance(value, ast.Dict) and value.keys and all(constant(key) is not None for key in value.keys):
            return {constant(key): self.value(one) for key, one in zip(value.keys, value.values, strict=True)}
        if isinstance(value, ast.DictComp) and len(value.generators) == 1:
            loop = value.generators[0]
            if isinstance(loop.iter, (ast.Tuple, ast.List)) and last(value.key) == last(loop.target) != "":
                return {
                    constant(key): self.with_key(loop.target, key, value.value) for key in loop.iter.elts[:_MOST_KEYS]
                }
        return {}

    def with_key(self, target: ast.expr, key: ast.expr, value: ast.expr) -> int:
        """Return the labels of an expression in which a target is `key`."""
        self.bind(target, self.value(key))
        self.known, before = {}, self.known
        marks = self.value(value)
        self.known = before
        return marks

    def augment(self, node: ast.AugAssign) -> None:
        marks = self.value(node.value)
        self.meet(node, self.value(node.target), marks)
        if isinstance(node.op, ast.Add):
            self.adding(node.target, marks, node)
        self.change(node.target, marks, node)
        self.bind(node.target, without(marks, LOOKUP), True)

    def cut(self, value: ast.expr, target: ast.expr | None) -> None:
        """Note validation text that a setting may cut short."""
        if self.loop is not None:
            return
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice):
            again = isinstance(target, ast.Name) and last(value.value) == target.id
            end = value.slice.upper
            stated = end is not None and self.value(end) & ENV and not isinstance(end, ast.BinOp)
            whole = plain(self.value(value.value)) & TEXT
            if whole and ((again and (self.by_setting or stated)) or (stated and isinstance(end, ast.Call))):
                self.note("code-cut", value, "a setting decides how much validation text is scored")
        if isinstance(value, ast.IfExp) and self.value(value.test) & ENV:
            sides = [one for one in (value.body, value.orelse) if plain(self.value(one)) & TEXT]
            if len(sides) == 2 and any(isinstance(one, ast.Subscript) for one in sides):
                self.note("code-cut", value, "a setting decides how much validation text is scored")
