"""Export formats of an artifact: each has a function that writes the artifact to a new path.

safetensors is a folder of dequantized weights by name and their settings. transformers is a folder that the Auto
classes load, with the code of model and tokenizer. html is the page of `html_page.py`.
"""

import ast
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from caddie.data.hub import HUB
from caddie.errors import UserError, suggest
from caddie.files import check_new_file, check_writable, making, write_json
from caddie.pack.artifact import Artifact, load
from caddie.pack.source_bundle import modules_needed
from caddie.share.html_page import write_page
from caddie.share.pull import artifact_file, split_place
from caddie.train.checkpoint import save_tensors

CODE = ("caddie.share.modeling_caddie", "caddie.share.tokenization_caddie")
"""Modules named in the exported config; transformers copies them and all their imports to where it runs them."""
_README = """# {name}

A caddie artifact (recipe `{recipe}`, SHA-256 `{sha256}`) for transformers. The weights are dequantized; the code beside
them is caddie's own, and caddie need not be installed.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
ids = model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=50, do_sample=True, temperature=0.8)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
```

There is no cache of keys and values: each new token computes the window again. `caddie sample` is faster.
"""
_HEAD = "# Written by caddie export from {path}, with its imports alone changed.\n"


def to_safetensors(artifact: Artifact, out: Path) -> None:
    """Write a new folder with the weights (float32, by name), their settings, and the tokenizer."""
    with making(out) as folder:
        write_model(artifact, folder, settings(artifact))


def write_model(artifact: Artifact, folder: Path, config: Mapping[str, Any], prefix: str = "") -> None:
    """Write the weights as scoring uses them, by `prefix` and name, `config.json`, and the tokenizer as it is stored.

    Tied weights are written once. Random constants, which loading an artifact generates again, are written too.
    """
    tensors = {**artifact.model.state_dict(), **dict(artifact.model.named_buffers())}
    save_tensors(folder / "model.safetensors", {prefix + name: one for name, one in tensors.items()}, {"format": "pt"})
    write_json(folder / "config.json", config)
    (folder / "tokenizer.model").write_bytes(artifact.tokenizer.serialize())


def settings(artifact: Artifact) -> dict[str, Any]:
    """Return the settings of model and scoring and the manifest, as JSON values."""
    return {
        "gpt": artifact.model.config.to_json(),
        "score": artifact.scoring.to_json(),
        "manifest": artifact.manifest.to_json(),
        "artifact_sha256": artifact.sha256,
    }


def to_transformers(artifact: Artifact, out: Path) -> None:
    """Write a new folder for `from_pretrained(folder, trust_remote_code=True)`.

    Raises `UserError` for an artifact with classes in a user's file, whose code is not caddie's.
    """
    if artifact.parts:
        names = " and ".join(file.stated.name for file in artifact.parts)
        raise UserError(
            f"{artifact.path} has classes in {names}, which transformers would run; export it to safetensors"
        )
    gpt, bos = artifact.model.config, artifact.tokenizer.bos
    ids = {"bos_token_id": bos, "eos_token_id": bos, "pad_token_id": bos, "use_cache": False}
    config = {
        "architectures": ["CaddieForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_caddie.CaddieConfig",
            "AutoModelForCausalLM": "modeling_caddie.CaddieForCausalLM",
        },
        "model_type": "caddie",
        "dtype": "float32",
        "vocab_size": gpt.vocabulary,
        "hidden_size": gpt.width,
        "num_hidden_layers": gpt.depth,
        "max_position_embeddings": artifact.scoring.sequence_length,
    }
    tokenizer = {
        "tokenizer_class": "CaddieTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_caddie.CaddieTokenizer", None]},
        "kind": artifact.tokenizer.kind,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    readme = {"name": out.name, "recipe": artifact.manifest.recipe, "sha256": artifact.sha256}
    with making(out) as folder:
        write_model(artifact, folder, config | settings(artifact) | ids, "model.")
        write_json(folder / "generation_config.json", ids)
        write_json(folder / "tokenizer_config.json", tokenizer)
        (folder / "README.md").write_text(_README.format(**readme), encoding="utf-8")
        for name, text in standalone().items():
            (folder / name).write_text(text, encoding="utf-8")


FORMATS: Mapping[str, Callable[[Artifact, Path], None]] = {
    "html": write_page,
    "safetensors": to_safetensors,
    "transformers": to_transformers,
}


def export(place: Path, form: str, out: Path | None = None, parts: Sequence[Path] = ()) -> Path:
    """Write the artifact at `place`, a file, a run folder or `hf:USER/NAME`, in one of `FORMATS`; return the path.

    The path is NAME-FORMAT, or NAME.html for a page, unless `out` names another. It lies beside the artifact, or in the
    working directory for an artifact from the hub. `parts` are the users' files that the artifact needs; they are run.
    Raises `UserError` for an unknown format, a folder or file of weights that exists, the artifact itself as `out`, and
    an artifact that cannot be read.
    """
    if form not in FORMATS:
        raise UserError(f"no format {form}; there are {', '.join(FORMATS)}{suggest(form, FORMATS)}")
    path = artifact_file(place)
    if out is not None:
        check_new_file(out)
    else:
        of_hub = place.as_posix().startswith(HUB) and not place.exists()
        base = Path(split_place(place.as_posix())[0].partition("/")[2]) if of_hub else path.with_suffix("")
        out = base.with_name(f"{base.name}.html" if form == "html" else f"{base.name}-{form}")
        check_writable(out.absolute().parent)
    if out.exists() and out.samefile(path):
        raise UserError(f"{out} is the artifact itself; name another path with --out")
    FORMATS[form](load(path, parts=parts), out)
    return out


def standalone() -> dict[str, str]:
    """Return file name, as `caddie_model_gpt.py`, to source of `CODE` and all its imports; no caddie is needed.

    The files import one another by relative imports, which transformers demands of the code beside a model.
    """
    modules = modules_needed(CODE)
    return {
        f"{_name(module)}.py": _HEAD.format(path=path) + _rewritten(text, modules.keys())
        for module, (path, text) in modules.items()
    }


def _name(module: str) -> str:
    return module.removeprefix("caddie.share.").replace(".", "_")  # modules of `CODE` keep their own names


def _rewritten(text: str, modules: Collection[str]) -> str:
    """Return the source with relative imports of caddie's modules, and without imports for type checkers alone.

    A library that a function imports may be missing if the function is never called; a `try` around the import tells
    transformers so.
    """
    lines = text.splitlines()
    for node in reversed([*_imports(ast.parse(text), inside=False)]):
        first = lines[node.lineno - 1]
        indent = first[: node.col_offset]
        if isinstance(node, ast.If):
            new = [f"{indent}{line}" for line in ("if TYPE_CHECKING:", "    pass")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "caddie":
            new = [indent + line for line in _relative(node, modules)]
        else:
            kept = [line[len(indent) :] for line in lines[node.lineno - 1 : node.end_lineno]]
            tried = ["try:", *(f"    {line}" for line in kept), "except ImportError:", "    raise"]
            new = [indent + line for line in tried]
        lines[node.lineno - 1 : node.end_lineno] = new
    return "\n".join(lines) + "\n"


def _imports(node: ast.AST, inside: bool) -> Iterator[ast.stmt]:
    """Yield the statements that are rewritten, in order; `inside` is True within a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield child
        elif isinstance(child, ast.Import | ast.ImportFrom):
            module = child.module if isinstance(child, ast.ImportFrom) else child.names[0].name
            library = (module or "").split(".")[0]
            foreign = library not in sys.stdlib_module_names and library != "torch"
            if library == "caddie" or (inside and foreign and not isinstance(node, ast.Try)):
                yield child
        elif not isinstance(child, ast.expr):
            yield from _imports(child, inside or isinstance(child, ast.FunctionDef))


def _relative(node: ast.ImportFrom, modules: Collection[str]) -> Iterator[str]:
    names = []
    for alias in node.names:
        if (inner := f"{node.module}.{alias.name}") in modules:
            yield f"from . import {_name(inner)} as {alias.asname or alias.name}"
            yield f"from .{_name(inner)} import __doc__ as _  # transformers copies files that such lines name"
        else:
            names.append(f"{alias.name} as {alias.asname}" if alias.asname else alias.name)
    if names:
        yield f"from .{_name(str(node.module))} import {', '.join(names)}"
