"""Artifacts of models with random weights, packed without calibration: for tests of what reads them."""

from pathlib import Path

import torch

from caddie.data.tokenizers import ByteTokenizer, Tokenizer
from caddie.model import GPT
from caddie.model.gpt import build
from caddie.pack.artifact import Artifact, Manifest, Metadata, load
from caddie.pack.compress import Pack, pack
from caddie.pack.container import Section
from caddie.score import Scoring

BYTES = ByteTokenizer()


def stirred(gpt: GPT, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of which none is what it does nothing at: initial values plus noise in proportion to the inputs."""
    chance = torch.Generator().manual_seed(seed)
    return {
        name: parameter.detach()
        + torch.randn(parameter.shape, generator=chance)
        * (0.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3)
        for name, parameter in build(gpt, seed).named_parameters()
    }


def write_artifact(
    path: Path,
    gpt: GPT,
    packing: Pack = Pack(fit=None),
    tokenizer: Tokenizer = BYTES,
    scoring: Scoring = Scoring(sequence_length=48, stride=48),
    source: Section | None = None,
) -> Artifact:
    """Pack a model of random weights to `path`, with the section `source` if given, and load it."""
    weights = stirred(gpt)
    manifest = Manifest(
        caddie="0",
        recipe="random",
        recipe_sha256="0" * 64,
        seed=0,
        parameters=sum(weight.numel() for weight in weights.values()),
        tokenizer=tokenizer.kind,
        tokenizer_sha256=tokenizer.sha256,
        train_documents_sha256="0" * 64,
        validation_fraction=0.05,
    )
    pack(Metadata(gpt, tokenizer, scoring, manifest, source), weights, packing.but(fit=None), path)
    return load(path)
