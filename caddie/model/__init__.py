"""The language model: one forward, made of parts that each stand in one file."""

from caddie.model.attention import Attention, GroupedQueryAttention
from caddie.model.block import Block, BlockModule
from caddie.model.context import Cache
from caddie.model.embedding import Embedding, TokenEmbedding
from caddie.model.gpt import GPT, Model, build, parameter_count
from caddie.model.head import Head, TiedHead
from caddie.model.linear import Linear, LowRankDelta
from caddie.model.mlp import MLP, ReluSquared
from caddie.model.ngrams import HashedNGrams
from caddie.model.skips import Skips, UNet
from caddie.model.smear import ChannelSmear, Smear, TokenSmear

__all__ = [
    "GPT",
    "MLP",
    "Attention",
    "Block",
    "BlockModule",
    "Cache",
    "ChannelSmear",
    "Embedding",
    "GroupedQueryAttention",
    "HashedNGrams",
    "Head",
    "Linear",
    "LowRankDelta",
    "Model",
    "ReluSquared",
    "Skips",
    "Smear",
    "TiedHead",
    "TokenEmbedding",
    "TokenSmear",
    "UNet",
    "build",
    "parameter_count",
]
