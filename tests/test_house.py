"""The house rules: what imports what, what is documented, how long things are, and what never stands in the code."""

import ast
import importlib
import inspect
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from caddie.config import Config, variants
from caddie.recipes.catalog import find, shipped
from caddie.recipes.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "caddie"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Dotted name below `caddie` to file; a package goes by its own name, the root by `__init__`."""

ORDER = (
    *("errors", "files", "config", "runtime", "ops", "data", "report", "model", "score", "pack", "train", "inference"),
    *("verify", "recipes", "run", "lab", "submit", "share", "board", "doctor", "cli"),
)
"""Folders of the package, and its two shared files, from the ground up: each imports only from those before it."""
DOORS = {"__init__", "__main__"}
"""Files that lead into the package from outside; nothing imports them."""

TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CADDIE_LAUNCHED"}
TORCHRUN |= {"CUDA_VISIBLE_DEVICES"}
"""Variables that are read: torchrun's, that by which `launch` is told from it, and the one that hides GPUs."""
ENVIRONMENT = {
    ("run.run", "score_in_new_process"),
    ("data.hub", "hub_library"),
    ("verify.sandbox", "_environment"),
    ("lab.executors", "Local"),
    ("runtime.child_process", "child_environment"),
    ("doctor.host", "environment"),
}
"""Functions outside `distributed` that touch the environment: four hand it on to a child process, one keeps a library
from writing into the home folder and puts everything back, one is looked at by the doctor and decides nothing."""

FILE_LINES = 450
FUNCTION_LINES = 90


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    """All of a module's tree."""
    return tuple(ast.walk(tree(module)))


def dotted(node: ast.AST) -> str:
    """The names of `a.b.c`; nothing of what begins with anything but a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def part(module: str) -> str:
    """The file or package directly below `caddie` that a module belongs to."""
    return module.split(".")[0]


def imports(statements: Iterable[ast.AST]) -> Iterator[str]:
    """Modules of caddie that these statements import, whether as such or by name."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            assert not statement.level, f"line {statement.lineno}: relative import"
            # `from caddie import X` imports the module X; so may `from caddie.model import X`
            names = [f"{statement.module}.{alias.name}" for alias in statement.names]
        elif isinstance(statement, ast.Call) and _called(statement).endswith("import_module"):
            names = [name.value for name in statement.args if isinstance(name, ast.Constant)]
        else:
            continue
        for name in names:
            parents = name.split(".")
            if parents[0] == "caddie" and len(parents) > 1:
                while ".".join(parents[1:]) not in MODULES:
                    parents.pop()
                yield ".".join(parents[1:])


def _called(call: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


@cache
def imported(module: str) -> frozenset[str]:
    """What a module imports anywhere."""
    return frozenset(imports(nodes(module)))


def functions(node: ast.AST, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ast.AST]]:
    """Classes and functions with their dotted position, also nested ones."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield (*path, child.name), child
            yield from functions(child, (*path, child.name))
        elif not isinstance(child, ast.expr):  # in which none can stand
            yield from functions(child, path)


@cache
def definitions(module: str) -> tuple[tuple[tuple[str, ...], ast.AST], ...]:
    """The classes and functions of a module."""
    return tuple(functions(tree(module)))


def owner(module: str, line: int) -> str:
    """Name of the outermost function or class around a line, or an empty string."""
    around = [
        path[0] for path, node in definitions(module) if len(path) == 1 and node.lineno <= line <= node.end_lineno
    ]
    return around[0] if around else ""


def project_files() -> list[Path]:
    """What is or will be tracked."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("no git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


# Order


def test_every_folder_has_its_place_in_the_order() -> None:
    assert {part(module) for module in MODULES} == {*ORDER, *DOORS}
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= 5


def test_the_architecture_page_names_the_same_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (line,) = re.findall(r"^ {4}(errors < .*)$", page, re.MULTILINE)
    assert tuple(line.split(" < ")) == ORDER


def test_modules_import_only_from_folders_before_theirs() -> None:
    place = {name: number for number, name in enumerate(ORDER)}
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        for name in imported(module)
        if part(module) in place and part(name) != part(module) and place[part(name)] > place[part(module)]
    ]
    assert not wrong


def test_no_module_imports_itself_by_a_detour() -> None:
    assert not tangled({module: imported(module) - {module} for module in MODULES})


def tangled(wanted: dict[str, set[str]]) -> set[str]:
    """Names that need one another, directly or not, and whatever needs those."""
    while free := {name for name, needed in wanted.items() if not needed & set(wanted)}:
        wanted = {name: needed for name, needed in wanted.items() if name not in free}
    return set(wanted)


def test_tangles_are_found() -> None:
    assert not tangled({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    assert tangled({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}


def test_no_module_is_a_drawer() -> None:
    assert not {"utils", "util", "common", "core", "helpers", "misc"} & {
        name for module in MODULES for name in module.split(".")
    }


def test_kernels_alone_import_triton_and_are_imported_by_name() -> None:
    for module in MODULES:
        names = {
            name
            for node in nodes(module)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        }
        assert any(name.split(".")[0] == "triton" for name in names) == module.endswith("_kernels"), module
        assert not any(name.endswith("_kernels") for name in names), module


# What happens at import


def modules_loaded_by(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{statement}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_settings_and_tokenizers_do_without_torch() -> None:
    light = ("errors", "files", "config", "data.tokenizers", "pack.codecs", "pack.container", "report")
    loaded = modules_loaded_by("import " + ", ".join(f"caddie.{module}" for module in light))
    assert "caddie" in loaded
    assert "torch" not in loaded


def test_importing_caddie_and_its_command_line_is_light() -> None:
    heavy = {"torch", "numpy", "sentencepiece", "rich", "jinja2", "huggingface_hub", "safetensors"}
    assert not heavy & modules_loaded_by("import caddie")
    assert not heavy & modules_loaded_by("import caddie.cli")


def test_nothing_happens_at_import() -> None:
    definition = ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef
    for module in set(MODULES) - {"__main__"}:
        for statement in tree(module).body:
            place = f"{module}, line {statement.lineno}"
            if isinstance(statement, ast.If):
                assert ast.unparse(statement.test) == "TYPE_CHECKING", place
            elif isinstance(statement, ast.Expr):
                assert isinstance(statement.value, ast.Constant), f"{place}: a call at import"
            else:
                assert isinstance(statement, definition), place


def test_the_environment_is_read_for_torchrun_alone() -> None:
    read: set[str] = set()
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                assert not {"environ", "environb", "getenv"} & {alias.name for alias in node.names}, module
            if not (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")):
                continue
            if module == "runtime.distributed":
                continue
            assert (module, owner(module, node.lineno)) in ENVIRONMENT, f"{module}, line {node.lineno}"
    for node in ast.walk(tree("runtime.distributed")):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            read.add(ast.literal_eval(node.slice))
        elif isinstance(node, ast.Compare) and any(ast.unparse(c) == "os.environ" for c in node.comparators):
            read.add(ast.literal_eval(node.left))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            read.add(ast.literal_eval(node.args[0]))
    assert read == TORCHRUN


# Documentation


def test_what_is_public_has_a_docstring() -> None:
    """A method that overrides one inherits its docstring, and has one of its own where it promises more."""
    missing = [module for module in MODULES if not ast.get_docstring(tree(module))]

    def inherits(path: str, name: str) -> bool:
        module, _, owner = path.removesuffix(".").rpartition(".")
        bases = getattr(importlib.import_module(f"caddie.{module}"), owner).__mro__[1:] if module in MODULES else ()
        return any(getattr(vars(base).get(name), "__doc__", None) for base in bases)

    def visit(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if child.name.startswith("_"):
                continue
            if not (ast.get_docstring(child) or "").strip() and not (
                isinstance(node, ast.ClassDef) and inherits(path, child.name)
            ):
                missing.append(path + child.name)
            if isinstance(child, ast.ClassDef):
                visit(child, f"{path}{child.name}.")

    for module in MODULES:
        visit(tree(module), f"{module}.")
    assert not missing


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_recipe_loads_and_says_why(name: str) -> None:
    recipe = find(name)
    known = shipped()
    assert recipe == known[name]
    assert recipe.name == name
    assert re.fullmatch(r"[A-Z0-9].*[^.]\.", recipe.why), "one sentence"
    assert recipe.parameters > 0
    if recipe.base is not None:
        base = known[recipe.base]
        assert base.name != name
        assert base.why != recipe.why
        assert base.public != recipe.public or not recipe.public, "a recipe's figures are its own"
        assert base.settings.diff(recipe.settings), "nothing differs from the base"
    for figure in recipe.public:
        assert figure.source
        assert figure.label


def test_every_chain_of_bases_ends() -> None:
    known = shipped()
    for recipe in known.values():
        seen = [recipe.name]
        while (base := known[seen[-1]].base) is not None:
            assert base not in seen, f"{base} is a base of itself"
            seen.append(base)
    assert any(recipe.base is None for recipe in known.values())
    assert all(isinstance(recipe, Recipe) for recipe in known.values())


# Shape


def test_what_reports_takes_progress_and_no_empty_callback() -> None:
    defaults = [
        (f"{module}, line {default.lineno}", default)
        for module in MODULES
        for node in nodes(module)
        if isinstance(node, ast.arguments)
        for default in (*node.defaults, *node.kw_defaults)
        if isinstance(default, ast.Lambda)
    ]
    assert not [place for place, default in defaults if ast.unparse(default.body) == "None"]


def test_files_and_functions_are_short() -> None:
    files = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    functions = {
        ".".join((module, *path)): node.end_lineno - node.lineno + 1
        for module in MODULES
        for path, node in definitions(module)
        if not isinstance(node, ast.ClassDef)
    }
    assert not {name: lines for name, lines in files.items() if lines > FILE_LINES}
    assert not {name: lines for name, lines in functions.items() if lines > FUNCTION_LINES}
    assert functions["run.run.run"] <= 60, "the table of contents"


PLAIN = {"bool", "float", "int", "str", "None", "torch.device", "torch.dtype", "tuple[float, ...]"}
"""Types of constants in compiled graphs. PyTorch before 2.12 keeps no config there."""


def test_constants_of_graphs_are_made_of_plain_values() -> None:
    marked = [
        (name, node)
        for module in MODULES
        for path, node in definitions(module)
        if (name := ".".join((module, *path)))
        and "constant_in_graphs" in map(ast.unparse, node.decorator_list)
        and isinstance(node, ast.FunctionDef)
    ]
    assert {name.rpartition(".")[2] for name, _ in marked} >= {"_piece", "_rope_tables", "choose"}
    for name, node in marked:
        for argument in (*node.args.args, *node.args.kwonlyargs):
            assert argument.annotation, name
            kinds = set(ast.unparse(argument.annotation).split(" | "))
            assert kinds <= PLAIN, f"{name}: {argument.arg} is {kinds - PLAIN}"


def test_no_variant_of_a_socket_is_a_variant_of_another() -> None:
    """A concrete config is never subclassed; to combine, wrap."""
    configs = [cls for cls in _subclasses(Config) if cls.__module__.startswith("caddie.")]
    assert len(configs) > 20
    for cls in configs:
        concrete = [base for base in cls.__mro__[1:] if issubclass(base, Config) and base is not Config]
        assert all(inspect.isabstract(base) for base in concrete), f"{cls.__name__} subclasses {concrete}"


def test_no_two_variants_share_a_name() -> None:
    """`kind` in a recipe names a class by its name alone."""
    for socket_class in _subclasses(Config):
        everything = [cls.__name__ for cls in _subclasses(socket_class) if not inspect.isabstract(cls)]
        assert len(everything) == len(set(everything)), socket_class.__name__
        assert set(everything) <= set(variants(socket_class))


def _subclasses(cls: type) -> list[type]:
    own = [sub for sub in cls.__subclasses__() if sub.__module__.startswith("caddie.")]
    return list({sub: None for direct in own for sub in [direct, *_subclasses(direct)]})


# What never stands in the code


def test_nothing_that_can_run_code_is_read_or_written() -> None:
    wrong = []
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [dotted(node)]
            elif isinstance(node, ast.Call) and dotted(node.func) in ("eval", "exec"):
                names = ["pickle"]
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                names = [] if ast.unparse(node.value) == "False" else ["pickle"]
            else:
                continue
            forbidden = {"torch.load", "torch.save", "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
            wrong += [f"{module}, line {node.lineno}: {name}" for name in names if name in forbidden]
            wrong += [f"{module}, line {node.lineno}: {name}" for name in names if name.split(".")[0] == "pickle"]
    assert not wrong


def test_nothing_is_left_for_later_and_nothing_is_swallowed() -> None:
    wrong = []
    for module, path in MODULES.items():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line):
                wrong.append(f"{module}, line {number}: {line.strip()}")
        for node in nodes(module):
            if isinstance(node, ast.ExceptHandler):
                silent = all(isinstance(child, ast.Pass) for child in node.body)
                broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
                if broad and silent:
                    wrong.append(f"{module}, line {node.lineno}: an exception is swallowed")
            if isinstance(node, ast.Global):
                wrong.append(f"{module}, line {node.lineno}: global")
            if isinstance(node, ast.Call) and dotted(node.func) == "hasattr":
                wrong.append(f"{module}, line {node.lineno}: hasattr")
    assert not wrong


def test_no_file_names_the_place_where_it_was_written() -> None:
    place = re.compile(rb"(?<![\w.~])/(?:work|home|Users|root|mnt|srv)/[A-Za-z0-9]")
    host = socket.gethostname().encode()
    wrong = []
    for path in project_files():
        content = path.read_bytes()
        if match := place.search(content):
            wrong.append(f"{path.relative_to(ROOT)}: {match[0]!r}")
        if len(host) > 4 and host != b"localhost" and re.search(rb"\b" + re.escape(host) + rb"\b", content):
            wrong.append(f"{path.relative_to(ROOT)}: the host's name")
    assert project_files()
    assert not wrong


def test_no_tracked_file_is_a_build_product() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in project_files()]
    assert "pyproject.toml" in names
    for name in names:
        build = re.search(r"^(data|runs|\.venv)/|__pycache__/|\.(pyc|partial|safetensors|caddie)$", name)
        stated = re.match(r"studies/.+/artifacts/.+\.caddie$", name)  # files whose scores a study's results state
        assert not build or stated, name
        assert os.path.getsize(ROOT / name) < 1 << 20, f"{name} is larger than a MiB"


def test_what_tests_start_has_a_home_of_its_own() -> None:
    said = subprocess.run(["sh", "-c", "echo ~ $XDG_CONFIG_HOME"], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(ROOT / ".tmp" / "home")] == [str(Path.home())]
