"""Lossless coding of arrays of numbers in few bytes."""

from caddie.pack.coding.array_codec import ArrayCodec
from caddie.pack.coding.entropy_model import EntropyModel
from caddie.pack.coding.packed import Packed
from caddie.pack.coding.process_pool import DecodeJob, EncodeJob, ProcessPool
from caddie.pack.coding.smallest import Smallest, decode
