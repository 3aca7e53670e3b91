"""Names of classes and settings before version 0.2: whoever types an old one is told the new one."""

from __future__ import annotations

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
    "adaptation": "ttt",
    "compress": "pack",
    "exclusive": "xsa",
    "fake_quantize": "qat",
    "gain": "query_gain",
    "lanes": "parallel_streams",
    "mix": "residual_mix",
    "rehearsal_steps": "warmup_steps",
    "rotary": "rope",
}
"""Old name of a setting to its new one."""


def modernized_path(path: str) -> str:
    """Return a dotted path that no setting has, with today's names in place of old ones."""
    return ".".join(SETTINGS.get(name, name) for name in path.split("."))
