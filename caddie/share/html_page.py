"""Write the page of an artifact: one HTML file, with the model inside, that runs in a browser without a network.

The page holds the artifact's own bytes and reads them as `load` does: container and checksums, coded weights, their
dequantizers, the tokenizer. Its forward is `program.py`'s list of operations, computed by `share/html/engine.wasm`,
which `bench/wasm.py` builds from the C beside it.
"""

import base64
import json
import shlex
import zlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from caddie.config import coerce
from caddie.errors import UserError
from caddie.files import write_file
from caddie.model.parameters import assign
from caddie.pack import container, quantize
from caddie.pack.artifact import CONFIG, Artifact
from caddie.pack.quantize import Quantizer
from caddie.report.page import number, template
from caddie.report.read import pick, read_scored_result, result_errors
from caddie.report.run_files import RESULT
from caddie.report.tables import LEDGER_WORDS
from caddie.share.program import program

SCRIPTS = ("engine.js", "artifact.js", "tokenizers.js", "model.js", "worker.js")
"""Files of the worker's program, in their order."""
_QUANTIZERS = (
    *(quantize.Float32, quantize.Float16, quantize.Float8, quantize.Rows, quantize.Waterfilling, quantize.Trellis),
    *(quantize.Ternary, quantize.Binary, quantize.LowRank, quantize.Rotated),
)
_OWN_TOKENIZERS = ("bytes", "bytes260", "sentencepiece", "caseops")  # that the page reads from the artifact itself
_ENGLISH = (
    "The",
    "The sea was calm in the morning. By noon the wind had turned, and the fishermen came home early.",
)
_PYTHON = (
    "class Reader:\n    def",
    '''def read_lines(path, encoding="utf-8"):
    """Return the lines of a file, without their ends."""
    with open(path, encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file]
''',
)
"""A prompt and a text that stand in the page at first, for each kind of training text."""


def write_page(artifact: Artifact, out: Path) -> None:
    """Write the page of an artifact to `out`; `UserError` for a part it cannot run.

    The figures come from the `result.json` beside the artifact, if it is this artifact's.
    """
    if artifact.parts:
        names = ", ".join(file.path.name for file in artifact.parts)
        raise UserError(f"the page cannot run classes of a user's file ({names}); share the artifact itself")
    result = _result(artifact)
    with result_errors(artifact.path.parent / RESULT, "a page"):
        facts = _facts(artifact, result)
    page = template("share/html/page.html.jinja").render(
        facts=facts,
        artifact=artifact,
        result=result,
        header=_script(json.dumps(header(artifact), separators=(",", ":"))),
        file=_script(_base64(artifact.path.read_bytes())),
        engine=_script(_base64(_file("engine.wasm"))),
        words=_script(_base64(_file("brotli.bin"))),
        worker=_script(b"\n".join(map(_file, SCRIPTS)).decode()),
        script=_script(_file("page.js").decode()),
    )
    write_file(out, page.encode(errors="replace"))


def header(artifact: Artifact) -> dict[str, Any]:
    """Return the facts that the page needs besides the artifact: program, shapes, quantizers and tokenizer."""
    model, tokenizer, scoring = artifact.model, artifact.tokenizer, artifact.scoring
    sections = container.read(artifact.path).sections
    quantizers = coerce(json.loads(sections[CONFIG])["quantizers"], dict[str, Quantizer], "quantizers")
    chosen = assign(quantizers, model, "quantizers")
    own = tokenizer.kind in _OWN_TOKENIZERS
    return {
        "program": program(model, tokenizer.bos, scoring.sequence_length),
        "weights": [
            {
                "name": name,
                "shape": list(parameter.shape),
                "quantizer": _known(chosen[name]).to_json(),
                "arrays": [
                    [key, dtype.str, list(shape)]
                    for key, (dtype, shape) in chosen[name].layout(tuple(parameter.shape)).items()
                ],
            }
            for name, parameter in model.named_parameters()
        ],
        "tokenizer": {
            "kind": tokenizer.kind,
            "vocabulary": tokenizer.vocabulary,
            "pieces": None if own else [_base64(piece) for piece in tokenizer.token_bytes],
        },
        "word_bytes": len(zlib.decompress(_file("brotli.bin"), wbits=-15)),
    }


def _known(quantizer: Quantizer) -> Quantizer:
    inner = getattr(quantizer, "of", None)
    if type(quantizer) not in _QUANTIZERS:
        raise UserError(f"the page cannot read weights of {type(quantizer).__name__}; share the artifact itself")
    if inner is not None:
        _known(inner)
    return quantizer


def _file(name: str) -> bytes:
    return files("caddie").joinpath("share", "html", name).read_bytes()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _script(text: str) -> Any:
    """Return text as the content of a script element: it cannot end the element and is not escaped again."""
    from markupsafe import Markup

    return Markup(text.replace("</", "<\\/").replace("<!--", "<\\!--"))


def _result(artifact: Artifact) -> Mapping[str, Any]:
    """Return the result beside the artifact; nothing if there is none of this artifact."""
    try:
        result = read_scored_result(artifact.path.parent / RESULT)
    except UserError:
        return {}
    return result if pick(result, "sha256", "artifact") == artifact.sha256 else {}


def _facts(artifact: Artifact, result: Mapping[str, Any]) -> dict[str, Any]:
    manifest, ledger, total = artifact.manifest, artifact.ledger, artifact.file_bytes
    cap = result.get("cap_bytes")
    scores = result.get("scores") or {}
    prompt, text = _PYTHON if pick(result, "corpus", "name") == "stdlib" else _ENGLISH
    way = next((way for way in ("adaptive", "sliding") if scores.get(f"quantized_{way}")), "plain")
    return {
        "name": manifest.recipe or artifact.path.stem,
        "typed": shlex.quote(artifact.path.name),
        "bits": number(result.get("bits_per_byte"), ".4f"),
        "plain": number(pick(scores, "quantized_plain", "bits_per_byte"), ".4f"),
        "way": way,
        "bytes": f"{total:,}",
        "cap": number(cap, ",d"),
        "share": min(100.0, 100 * total / cap) if cap else None,
        "parameters": f"{manifest.parameters:,}",
        "bits_per_weight": f"{8 * ledger['weights'] / max(1, manifest.parameters):.2f}",
        "seconds": number(pick(result, "seconds", "train"), ",.0f"),
        "parts": [
            {"label": LEDGER_WORDS.get(name, name).capitalize(), "bytes": f"{size:,}", "share": 100 * size / total}
            for name, size in ledger.items()
        ],
        "prompt": prompt,
        "text": text,
    }
