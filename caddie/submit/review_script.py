"""The syntax tree of a submission's script, read without running it: packed scripts are unpacked, within bounds."""

import ast
import base64
import fnmatch
import json
import lzma
import re
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from caddie.submit.review_files import Folder
from caddie.submit.review_rules import Findings

_MOST_BYTES = 500_000
"""Longest script in bytes, packed or unpacked; the longest merged one has 0.16 MB."""
_MOST_MEMORY = 256_000_000
"""Bytes of memory that unpacking may ask for."""
_MOST_LAYERS = 3
_MOST_SCRIPTS, _MOST_GLOBS = 8, 100
_DATA = re.compile(r"\.(?:npz|npy|bin|pt|pth|pkl|safetensors|dat|gz|xz|zst|br|zip)$")
"""Names of files that hold data, not text."""
_NO_DATA = re.compile(
    r"(?i)(?:^|/)(?:readme|submission|licen[cs]e|requirements)(?:\.\w+)?$|\.(?:log|md|sh|model|vocab)$"
)
"""Names of files whose bytes do not count, though a script names them; a tokenizer is not counted."""
_COMPILED = re.compile(r"\.(?:so|pyd|pyc)$")
_SHAPING = {"reshape", "view", "flatten", "to", "long", "int", "contiguous", "clone", "squeeze", "unsqueeze", "cuda"}
"""Methods whose result has every element of a tensor and no other."""
_PACKED_SHARE = 0.5
"""A script is packed if one string is at least this share of it."""
RUNS = {"exec", "eval", "compile", "__import__"}
"""Functions that run code built at run time."""
_UNPACKING = {"decompress", "b85decode", "b64decode", "a85decode", "decode", "encode"}
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.IfExp)
_RAW_LZMA = [{"id": lzma.FILTER_LZMA2}]
_DECODERS: tuple[Callable[[bytes], bytes], ...] = (base64.b85decode, base64.b64decode, base64.a85decode)


@dataclass(frozen=True)
class Script:
    """A Python file of a folder, as syntax tree."""

    file: str
    tree: ast.Module
    unpacked: bool
    """True if lines are those of the unpacked source."""

    def add(self, rule: str, sentence: str, line: int, found: Findings) -> None:
        """Add a finding at a line of this source."""
        found.add(rule, self.file, f"{sentence} (line of the unpacked script)" if self.unpacked else sentence, line)


def main_script(folder: Folder) -> str | None:
    """Return the name of the script that trains: `train_gpt.py`, else the first `train*.py`."""
    named = sorted(name for name in folder.sizes if re.fullmatch(r"train[^/]*\.py", name))
    return "train_gpt.py" if "train_gpt.py" in named else next(iter(named), None)


def read_scripts(folder: Folder, main: str, found: Findings) -> tuple[list[Script], int]:
    """Return the trees of the script and of the Python files that it names, and the bytes of the training code.

    The bytes are those of the script, of the modules that it imports, and of other `train*.py` files that it names,
    since it may only start another script. If it runs code built at run time, every other file that it names counts
    too, since it may hold such code.
    """
    files, scripts, size = [main], [], 0
    for at, name in enumerate(files):  # which grows meanwhile
        if at >= _MOST_SCRIPTS or (text := folder.text(name, found, _MOST_BYTES)) is None:
            continue
        source, unpacked = unpack(text, name, found)
        tree = parse(source, name, found, "code-syntax" if name == main else "code-unread")
        scripts.append(Script(name, tree, unpacked))
        if unpacked and isinstance(outer := _tree(text), ast.Module) and not _only_runs(outer):
            if not _written_by_caddie(text):
                said = "code around its packed source does more than unpack and run it: read it"
                found.add("code-hidden", name, said)
            scripts.append(Script(name, outer, False))
        others = [one for one in folder.sizes if not one.endswith(".py")]
        strings = {text.rpartition("/")[2] for text in _texts(tree)}
        named = [one for one in others if one in source and re.search(rf"\b{re.escape(one)}\b", source)]
        named += [one for one in others if one.rpartition("/")[2] in strings and one not in named]
        if _runs_text(tree):
            size += sum(folder.sizes[one] for one in named)
            for one in named[:1]:
                found.add("code-hidden", name, f"it may run what is in {one}, whose source was not checked")
        data = list(filter(_DATA.search, others))
        matched = {one for glob in _globs(tree) for one in fnmatch.filter(data, f"*{glob}")}
        held = [one for one in named if _DATA.search(one) or not _NO_DATA.search(one)]
        for one in dict.fromkeys([*held, *sorted(matched)]):
            how = "names" if one in named else "may read"
            found.add("code-hidden", name, f"it {how} {one}, whose {folder.sizes[one]:,} bytes count too")
        words = set(re.findall(r"\w+", source))
        for other in folder.sizes:
            if other.endswith(".py") and _module(other) in words and other not in files:
                files.append(other)
    if more := files[_MOST_SCRIPTS:]:
        shown = ", ".join(more[:4]) + (" and others" if len(more) > 4 else "")
        said = f"it names more than {_MOST_SCRIPTS - 1} Python files, and {shown} were not checked: read them"
        found.add("code-hidden", main, said)
    imported = {name for script in scripts for name in _imports(script.tree)}
    compiled = [one for one in folder.sizes if _COMPILED.search(one) and _module(one) in imported]
    for one in compiled:
        found.add("code-hidden", one, f"it is imported, has {folder.sizes[one]:,} bytes, and is no source to check")
    counted = [one for one in files if _module(one).startswith("train") or _module(one) in imported]
    return scripts, size + sum(folder.sizes[one] for one in [*counted, *compiled])


def _globs(tree: ast.Module) -> list[str]:
    """Return the strings and f-strings of a script that may be patterns of file names, without their folders."""
    f_strings = (node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    patterns = ("".join(str(constant(part) or "*") for part in parts) for parts in f_strings)
    globs = [*(text for text in _texts(tree) if "*" in text), *filter(_DATA.search, patterns)]
    return [glob.rpartition("/")[2] for glob in globs[:_MOST_GLOBS]]


def _texts(tree: ast.Module) -> list[str]:
    return [text for node in ast.walk(tree) if isinstance(text := constant(node), str)]


def _module(file: str) -> str:
    """Return the name by which a file is imported."""
    name = file.removesuffix("/__init__.py").rpartition("/")[2].removesuffix(".py")
    return name.partition(".")[0] if _COMPILED.search(name) else name


def _imports(tree: ast.Module) -> set[str]:
    """Return every part of the module names that a script imports, and the names that it imports from them."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [one.name for node in found for one in node.names]
    names += [node.module for node in found if isinstance(node, ast.ImportFrom) and node.module]
    return {part for name in names for part in name.split(".")}


def _only_runs(tree: ast.Module) -> bool:
    """True if the code around a packed source calls nothing but what unpacks and runs it."""
    nodes = list(ast.walk(tree))
    calls = [last(node.func) for node in nodes if isinstance(node, ast.Call)]
    defines = any(isinstance(node, _DEFINING) for node in nodes)
    return not defines and bool(RUNS.intersection(calls)) and {*calls} <= RUNS | _UNPACKING


def _written_by_caddie(text: str) -> bool:
    """True if this version of caddie writes the same script, to the byte, for the recipe that it holds."""
    try:
        recipe = dict(json.loads(text.partition("\nRECIPE = json.loads(r'''")[2].partition("''')")[0]))
        from caddie.pack.source_bundle import script

        around = re.sub(r'^SOURCE = "[^"]*"', 'SOURCE = ""', text, flags=re.MULTILINE)
        return script(recipe, "") == around.encode() and script(recipe) == text.encode()  # the latter takes seconds
    except (ValueError, TypeError, RecursionError):
        return False


def _runs_text(tree: ast.Module) -> bool:
    """True if a script calls one of `RUNS`."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(one, ast.Name) and one.id in RUNS for one in calls)


def unpack(text: str, name: str, found: Findings) -> tuple[str, bool]:
    """Return the source that a script decodes from one long string and runs, else the text; and True if it was packed.

    Known codings are base85, base64 and Ascii85 of LZMA, raw LZMA2, zlib, gzip and brotli.
    """
    source, layers = text, 0
    while layers < _MOST_LAYERS and (packed := _packed(source)):
        if (inner := _inflated(packed)) is None:
            found.add("code-unread", name, "it is packed in a way that is not known; its source was not checked")
            break
        source, layers = inner.decode(errors="replace"), layers + 1
    return source, layers > 0


def parse(source: str, name: str, found: Findings, rule: str) -> ast.Module:
    """Return the syntax tree; an empty one, with a finding of `rule`, if the source cannot be read.

    F-strings of Python 3.12 that an older Python does not read are blanked.
    """
    for read in (str, blank_f_strings):
        tree = _tree(read(source))
        if isinstance(tree, ast.Module):
            return tree
    found.add(rule, name, f"{tree}; its source was not checked")
    return ast.Module([], [])


def _tree(source: str) -> ast.Module | str:
    """Return the syntax tree, or why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the script's own invalid escapes
            return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return f"it is not Python ({str(error)[:80]})"
    except (RecursionError, MemoryError):
        return "it is nested too deeply"


def _packed(source: str) -> bytes | None:
    """Return the string or bytes that makes up most of the source, without white space; None if there is none."""
    if len(source) > _MOST_BYTES or not re.search(r"b85decode|b64decode|a85decode", source):
        return None
    if isinstance(tree := _tree(source), str):
        return None
    strings = [text.encode(errors="replace") for text in _texts(tree)]
    strings += [data for node in ast.walk(tree) if isinstance(data := constant(node), bytes)]
    longest = max(strings, key=len, default=b"")
    return b"".join(longest.split()) if len(longest) >= _PACKED_SHARE * len(source) else None


def _inflated(packed: bytes) -> bytes | None:
    """Return the source in a packed string, of at most `_MOST_BYTES`; None if no known coding and codec read it."""
    import brotli

    codecs: tuple[Callable[[bytes], bytes], ...] = (
        lambda raw: lzma.LZMADecompressor(memlimit=_MOST_MEMORY).decompress(raw, _MOST_BYTES + 1),
        lambda raw: lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_RAW_LZMA).decompress(raw, _MOST_BYTES + 1),
        lambda raw: zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(raw, _MOST_BYTES + 1),
        lambda raw: brotli.Decompressor().process(raw, output_buffer_limit=_MOST_BYTES + 1),
    )
    for decode, decompress in product(_DECODERS, codecs):
        try:
            out = decompress(decode(packed))
        except (lzma.LZMAError, zlib.error, brotli.error, EOFError, ValueError, MemoryError):
            continue
        if 0 < len(out) <= _MOST_BYTES and b"\0" not in out:
            return bytes(out)
    return None


_STRING = re.compile(r"\b[rR]?[fF][rR]?(?P<f>\"\"\"|'''|\"|')|(?P<q>\"\"\"|'''|\"|')(?s:\\.|[^\\])*?(?:(?P=q)|\\?\Z)")
"""Beginning of an f-string, or the whole of another string; the end of the source ends a string too."""
_TOKEN = re.compile(rf"#[^\n]*|{_STRING.pattern}")


def blank_f_strings(source: str) -> str:
    """Return the source with an empty string in place of each f-string; line numbers stay the same.

    Python 3.12 lets an f-string hold quotes like its own (PEP 701), which older parsers refuse.
    """
    out, at = [], 0
    while match := _TOKEN.search(source, at):
        begin, end = match.span()
        out.append(source[at:begin])
        at = _f_string_end(source, end, match["f"]) if match["f"] else end
        out.append('""' + "\\\n" * source.count("\n", begin, at) if match["f"] else source[begin:at])
    return "".join([*out, source[at:]])


def _f_string_end(source: str, at: int, quote: str) -> int:
    """Return where an f-string ends; strings inside its braces may hold the same quote, to any depth."""
    closing = [quote]  # what ends the open f-strings and, as `}`, the expressions in them
    while at < len(source) and closing:
        if closing[-1] != "}":
            if source.startswith(closing[-1], at):
                at += len(closing.pop())
            elif source[at] == "{" and not source.startswith("{{", at):
                closing.append("}")
                at += 1
            else:
                at += 2 if source[at] in "\\{" else 1
        elif match := _STRING.match(source, at):
            at = match.end()
            closing += [match["f"]] if match["f"] else []
        else:
            closing += ["}"] if source[at] == "{" else []
            del closing[len(closing) - (source[at] == "}") :]
            at += 1
    return at


def last(node: ast.AST | None) -> str:
    """Return the last name of `a.b.c`, or an empty string."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def constant(node: ast.AST | None) -> object:
    """Return the value of a constant, else None."""
    return node.value if isinstance(node, ast.Constant) else None


def base_of(node: ast.AST) -> ast.AST:
    """Return `a` of `a.b`, `a[...]` and `a.b(...)`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def chain(node: ast.AST) -> ast.AST:
    """Return `a` of `a.b(...).c(...)`, which has every element of `a` and no other."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPING:
        node = node.func.value
    return node


def callee(node: ast.AST) -> ast.AST:
    """Return what a call calls, else the expression itself."""
    return node.func if isinstance(node, ast.Call) else node
