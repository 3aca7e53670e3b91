"""Language model: one forward, made of parts that have a file each."""

from caddie.model.attention import Attention, GroupedQueryAttention
from caddie.model.block import Block, BlockModule
from caddie.model.context import Cache
from caddie.model.embedding import Embedding, TokenEmbedding
from caddie.model.gates import DenseGate, HeadGate, NarrowGate, SparseGate
from caddie.model.gpt import GPT, Model, ModelPart, build, parameter_count
from caddie.model.head import Head, TiedHead, UntiedHead
from caddie.model.input_mix import PhaseMix, ResidualMix, StreamMix
from caddie.model.linear import Dense, Linear, LinearMap, LowRankDelta, RandomMap
from caddie.model.mlp import MLP, LeakyReluSquared, ReluSquared, SwiGLU
from caddie.model.mudd import MUDD, DenseConnections, LastLayerMUDD
from caddie.model.ngrams import HashedNGrams
from caddie.model.norm import DepthScaledNorm, Norm, RMSNorm
from caddie.model.parallel_streams import ParallelStreams, RoutedStreams, SeparateStreams
from caddie.model.recurrence import Recurrence
from caddie.model.rope import NTKRoPE, PlainRoPE, RoPE, YaRNRoPE
from caddie.model.skips import GatedUNet, Skips, UNet
from caddie.model.smear import ChannelSmear, Smear, TokenSmear
from caddie.model.values import GatedValueResidual, MixedValueResidual, ValueEmbedding, ValueResidual
