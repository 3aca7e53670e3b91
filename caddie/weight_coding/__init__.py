"""Arrays of numbers to bytes and back, in as few bytes as will do."""

from caddie.weight_coding.array_codec import ArrayCodec
from caddie.weight_coding.entropy_model import EntropyModel
from caddie.weight_coding.packed import Packed
from caddie.weight_coding.side_by_side import Coded, Coders, Plain
from caddie.weight_coding.smallest import Smallest, decode

__all__ = ["ArrayCodec", "Coded", "Coders", "EntropyModel", "Packed", "Plain", "Smallest", "decode"]
