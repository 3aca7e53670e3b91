"""The language model: one forward, made of parts that each stand in one file."""

from caddie.model.attention import Attention, GroupedQueryAttention
from caddie.model.block import Block, BlockModule, DepthScaledNorm, Norm, PhaseMix, ResidualMix, RMSNorm, StreamMix
from caddie.model.context import Cache
from caddie.model.embedding import ChannelSmear, Embedding, HashedNGrams, Smear, TokenEmbedding, TokenSmear
from caddie.model.gates import DenseGate, HeadGate, NarrowGate, SparseGate
from caddie.model.gpt import GPT, Model, ModelPart, build, parameter_count
from caddie.model.head import Head, TiedHead, UntiedHead
from caddie.model.linear import Dense, Linear, LinearMap, LowRankDelta, RandomMap
from caddie.model.mlp import MLP, LeakyReluSquared, ReluSquared, SwiGLU
from caddie.model.mudd import MUDD, DenseConnections, LastLayerMUDD
from caddie.model.parallel_streams import ParallelStreams, RoutedStreams, SeparateStreams
from caddie.model.recurrence import Recurrence
from caddie.model.rope import NTKRoPE, PlainRoPE, RoPE, YaRNRoPE
from caddie.model.skips import GatedUNet, Skips, UNet
from caddie.model.values import GatedValueResidual, MixedValueResidual, ValueEmbedding, ValueResidual
