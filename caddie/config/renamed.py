"""Names of settings before version 0.2.

Files with old names still load, and an old name on a command line is an error that gives the new one. To be removed one
release later; nothing else in the package knows an old name.
"""

import re
from collections.abc import Mapping
from typing import Any

KINDS = {
    "Compress": "Pack",
    "NTKRotary": "NTKRoPE",
    "Rotary": "PlainRoPE",
    "RoutedLanes": "RoutedStreams",
    "SeparateLanes": "SeparateStreams",
    "Stairs": "PiecewiseConstant",
    "YaRNRotary": "YaRNRoPE",
}
"""Old name of a class of settings to its new one."""

SETTINGS = {
    "Block": {"mix": "residual_mix"},
    "GPT": {"lanes": "parallel_streams"},
    "GroupedQueryAttention": {"exclusive": "xsa", "gain": "query_gain", "rotary": "rope"},
    "Recipe": {"compress": "pack"},
    "Scoring": {"adaptation": "ttt"},
    "Train": {"fake_quantize": "qat", "rehearsal_steps": "warmup_steps"},
}
"""By class: old name of a setting to its new one."""

_PATHS = (
    (r"^compress(?=\.|$)", "pack"),
    (r"^(score\.)?adaptation(?=\.|$)", r"\1ttt"),
    (r"^(train\.)?fake_quantize(?=\.|$)", r"\1qat"),
    (r"^(train\.)?rehearsal_steps$", r"\1warmup_steps"),
    (r"^(model\.)?lanes(?=\.|$)", r"\1parallel_streams"),
    (r"(^|\.)attention\.exclusive$", r"\1attention.xsa"),
    (r"(^|\.)attention\.gain$", r"\1attention.query_gain"),
    (r"(^|\.)attention\.rotary(?=\.|$)", r"\1attention.rope"),
    (r"(^|\.)(block|layers\.[^.]+)\.mix$", r"\1\2.residual_mix"),
)


def modernized_path(path: str) -> str:
    """Return a dotted path with today's names of its settings."""
    for old, new in _PATHS:
        path = re.sub(old, new, path)
    return path


def modernized(value: Any) -> Any:
    """Return JSON as `Config.to_json` gives it, with today's names."""
    if isinstance(value, list):
        return [modernized(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str):  # its keys may be names of parameters, which stay
        return {key: modernized(item) for key, item in value.items()}
    kind = KINDS.get(kind, kind)
    names = SETTINGS.get(kind, {})
    settings = {names.get(name, name): modernized(item) for name, item in value.items()} | {"kind": kind}
    if kind == "GPT" and isinstance(layers := settings.get("layers"), Mapping):
        settings["layers"] = {layer: _exception(exception) for layer, exception in layers.items()}
    return settings


def _exception(exception: Any) -> Any:
    """Return the exceptions of one layer, by dotted paths that begin at a block, with today's names."""
    if not isinstance(exception, Mapping):
        return exception
    paths = {path: modernized_path(f"block.{path}").removeprefix("block.") for path in exception}
    return {paths[path]: modernized(value) for path, value in exception.items()}
