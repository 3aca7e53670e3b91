"""Rotary position embeddings (RoPE) of queries and keys."""

import json
from abc import abstractmethod
from functools import cache
from typing import Annotated

import torch
from torch import Tensor

from caddie.config import Config, Count, Positive, Range
from caddie.errors import UserError


class RoPE(Config):
    """Socket: rotation frequencies of the channel pairs. They do not depend on the length of the row at hand.

    So short and long rows rotate equally, and a row may grow while it is generated.
    """

    dims: Annotated[int, Range(2, 1 << 16)] | None = None
    """Leading channels of a head that are rotated, an even number, or none for all (partial RoPE)."""
    base: Positive = 10_000.0
    """Base θ; the slowest pair rotates by about 1/θ per position."""

    @abstractmethod
    def frequencies(self, dims: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the angle per position of each pair of channels, (dims/2)."""

    def as_text(self) -> str:
        """Return a string for `rope_of`: graphs of PyTorch before 2.12 keep strings as constants, but not configs."""
        return json.dumps(self.to_json())

    def rotated_dims(self, head_size: int) -> int:
        """Return the number of rotated channels of a head; raises `UserError` if it is odd or above `head_size`."""
        dims = head_size if self.dims is None else self.dims
        if dims > head_size or dims % 2:
            raise UserError(f"rope.dims must be even and at most {head_size}, the size of a head, not {dims}")
        return dims


@cache
def rope_of(text: str) -> RoPE:
    """Return the RoPE of a text of `RoPE.as_text`."""
    return RoPE.from_json(json.loads(text))


def _powers(base: float, dims: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return base ** (-torch.arange(0, dims, 2, dtype=dtype, device=device) / dims)


class PlainRoPE(RoPE):
    """RoPE: pair i rotates by base^(-2i/dims) per position (RoFormer, arXiv 2104.09864)."""

    def frequencies(self, dims: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return _powers(self.base, dims, device, dtype)


class NTKRoPE(RoPE):
    """NTK-aware RoPE for rows longer than the native length: the base becomes base · (length/native_length)^(d/(d-2)).

    Public system 002 and record #1019 train rows of 2,048 with a native length of 1,024, so the base is 2.21 times as
    large in training too (bloc97, 2023).
    """

    native_length: Count = 1024
    """Row length for which the base is meant."""
    length: Count = 2048
    """Row length; up to the native length nothing changes."""

    def frequencies(self, dims: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        stretch = max(1.0, self.length / self.native_length)
        base = self.base * stretch ** (dims / (dims - 2)) if dims > 2 else self.base
        return _powers(base, dims, device, dtype)


class YaRNRoPE(RoPE):
    """YaRN: slow pairs rotate slower by length/native_length, fast ones as before, a ramp between (arXiv 2309.00071).

    The ramp is that of openai/parameter-golf, 2026-03-24_74M_Ternary_UNet_FP8_10L_8192BPE_YaRN_NeoMuon: 0 for the first
    quarter of the pairs, then linear to 1. YaRN's factor on the logits is left to the gain of the queries.
    """

    native_length: Count = 1024
    """Row length for which the frequencies are meant."""
    length: Count = 2048
    """Row length."""

    def frequencies(self, dims: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        pair = torch.arange(0, dims, 2, dtype=dtype, device=device) / dims
        ramp = ((pair - 0.25) / 0.75).clamp(0.0, 1.0)
        stretch = max(1.0, self.length / self.native_length)
        return _powers(self.base, dims, device, dtype) / (1.0 + ramp * (stretch - 1.0))
