"""The language model: one forward, made of parts that each stand in one file."""

from caddie.model.attention import Attention, GroupedQueryAttention
from caddie.model.block import Block
from caddie.model.embedding import Embedding, TokenEmbedding
from caddie.model.gpt import GPT, Model, build, parameter_count
from caddie.model.head import Head, TiedHead
from caddie.model.linear import Linear, LowRankDelta
from caddie.model.mlp import MLP, ReluSquared
from caddie.model.skips import Skips, UNet

__all__ = [
    "GPT",
    "MLP",
    "Attention",
    "Block",
    "Embedding",
    "GroupedQueryAttention",
    "Head",
    "Linear",
    "LowRankDelta",
    "Model",
    "ReluSquared",
    "Skips",
    "TiedHead",
    "TokenEmbedding",
    "UNet",
    "build",
    "parameter_count",
]
