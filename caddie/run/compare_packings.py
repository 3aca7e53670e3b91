"""Pack one run by many methods: each quantizer and coding on the same weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from caddie.data.corpus import Corpus
from caddie.model import Model, build
from caddie.model.parameters import assign
from caddie.pack.calibrate import TrainingText
from caddie.pack.candidates import Candidates, section_of
from caddie.pack.codecs import Lzma, Stored, Zlib, Zstd
from caddie.pack.coding import ArrayCodec, EntropyModel, Packed, ProcessPool, Smallest, decode
from caddie.pack.fit import FillCap
from caddie.pack.quantize import BestPercentile, Float16, Gptq, Quantizer, Rows, SigmaClip, Trellis, Waterfilling
from caddie.recipes.recipe import Recipe
from caddie.report.tables import table
from caddie.run.cap import cap_of_recipe
from caddie.run.run import metadata_of
from caddie.run.run_folder import read_run, run_weights
from caddie.run.stages import bits_per_nat, calibrate_recipe
from caddie.runtime.distributed import local_device
from caddie.runtime.progress import SILENT, Phases, Progress

CODINGS: dict[str, ArrayCodec] = {
    "zlib -9": Packed(codec=Zlib(), shuffle=True),
    "lzma -9e": Packed(codec=Lzma(), shuffle=True),
    "zstd -22": Packed(codec=Zstd(), shuffle=True),
    "brotli -11": Smallest(of=(Packed(shuffle=True), Packed(shuffle=True, columns=True)), also=()),
    "entropy model": EntropyModel(),
}
"""Codings to compare, by name; Brotli codes each array by rows or by columns, whichever comes out shorter."""
SMALLEST = "smallest"
"""Coding that keeps the shortest of all these streams for each array; encoding takes as long as all of them."""
MEASURED_TOKENS = 16_384
"""Training tokens that every method is measured on; calibration does not use them."""


@dataclass(frozen=True)
class Method:
    """A choice of quantizers. With `fills`, their step sizes are fitted so that the file in this coding fills a cap."""

    name: str
    matrices: Quantizer
    tables: Quantizer
    """For embeddings and heads."""
    fills: str | None = None

    @property
    def rules(self) -> dict[str, Quantizer]:
        """Quantizer by role, as in `Pack.quantizers`."""
        large = {"matrix": self.matrices, "embedding": self.tables, "head": self.tables}
        return {**large, "gate": Float16(), "scalar": Float16()}


_TABLE = Gptq(of=Rows(scale=SigmaClip(k=20.0)))
METHODS = (
    Method("int8, percentile", Rows(), Rows()),
    Method("int6, five percentiles", Rows(bits=6, scale=BestPercentile()), Rows(scale=BestPercentile())),
    Method("GPTQ int6, SDClip", Gptq(of=Rows(bits=6, scale=SigmaClip(k=12.85))), _TABLE),
    # steps of int6 in the range of int8, so that finer steps clip nothing
    Method("GPTQ, SDClip", Gptq(of=Rows(scale=SigmaClip(k=12.85 * 127 / 31))), _TABLE, fills="brotli -11"),
    Method("Waterfilling", Waterfilling(), Waterfilling(), fills="entropy model"),
    Method("Trellis", Trellis(), Trellis(), fills="entropy model"),
)
"""Methods to compare: three of the records with their own step sizes, and three whose steps fill the cap."""


def compare(
    folder: Path, caps: Sequence[int] = (), progress: Progress = SILENT, parts: Sequence[Path] = ()
) -> dict[str, Any]:
    """Pack the run in `folder` by every method, for each of the caps, or for the recipe's own.

    Writes no file and reads no held-out text. Losses are the bits per byte that rounding adds: predicted by the
    calibration, and measured on training text that calibration has not seen, None without such text. `cap_bytes` and
    `fitted_with` of a packing are the cap and the coding that its step sizes were fitted to, or None.
    """
    recipe, seed, corpus = read_run(folder, parts)
    metadata = metadata_of(recipe, seed, corpus)
    asked = [recipe.but({"pack.cap_bytes": cap}) for cap in caps] or [recipe]
    caps = [cap_of_recipe(one, metadata).file_bytes for one in asked]
    progress.phase("calibrate")
    packings, work = [], [(method, cap) for method in METHODS for cap in (caps if method.fills else [None])]
    with ProcessPool(torch.get_num_threads()) as pool:
        bench = _Bench(folder, recipe, seed, corpus, pool, progress)
        for number, (method, cap) in enumerate(work, 1):
            name = f"{method.name}, {cap:,} bytes" if cap else method.name
            progress.phase(f"{number} of {len(work)}: {name}")
            packings += bench.packings(method, cap)
    return {
        "run": str(folder),
        "parameters": sum(weight.numel() for weight in bench.weights.values()),
        "caps": caps,
        "measured_tokens": bench.tokens,
        "unpacked_bits_per_byte": bench.before,
        "packings": packings,
    }


def summary(facts: Mapping[str, Any]) -> str:
    """Return the comparison as a table for a terminal."""
    rows, before = [], None
    for one in facts["packings"]:
        group = one["quantizer"], one["cap_bytes"]
        name = one["quantizer"] + (f", {one['cap_bytes']:,}" if one["cap_bytes"] else "")
        expected, measured = one["predicted_bits_per_byte"], one["measured_bits_per_byte"]
        losses = ["-" if loss is None else f"{loss:.4f}" for loss in (expected, measured)]
        seconds = [f"{one[key]:.1f}" for key in ("encode_seconds", "decode_seconds")]
        coding = one["coding"] + (" *" if one["coding"] == one["fitted_with"] else "")
        rows.append(["" if group == before else name, coding, one["bytes"], *losses, *seconds])
        before = group
    tokens = facts["measured_tokens"]
    text = f", on training text; measured on {tokens:,} tokens that calibration has not seen."
    return f"""{table(rows, ["quantizer", "coding", "bytes", "predicted", "measured", "enc. s", "dec. s"])}

Bytes are those of the whole file. predicted and measured are what rounding costs in bits
per byte{text if tokens else "; not measured, for calibration has seen all of the training text."}
* The steps were fitted to fill the cap with this coding; the others code the same integers."""


class _Bench:
    """Weights, their calibrations, and text to measure on."""

    def __init__(
        self, folder: Path, recipe: Recipe, seed: int, corpus: Corpus, pool: ProcessPool, progress: Progress
    ) -> None:
        self.weights = run_weights(folder, recipe, corpus)
        self.metadata, self.pool, self.progress = metadata_of(recipe, seed, corpus), pool, progress
        self.bos, self.per_nat = corpus.manifest.tokenizer.bos, bits_per_nat(corpus)
        self.calibrations = calibrate_recipe(recipe, self.weights, corpus, progress=progress)
        self.model = build(recipe.model, 0, local_device())
        self.rows = _unseen(recipe, corpus, self.model)
        self.tokens = sum(ids.numel() for ids in self.rows)
        self.before = self._bits_per_byte(self.weights)

    def packings(self, method: Method, cap: int | None) -> list[dict[str, Any]]:
        quantizers = assign(method.rules, self.model, "quantizers")
        dequantizers = {rule: quantizer.dequantizer for rule, quantizer in method.rules.items()}
        candidates = Candidates(
            self.weights,
            self.calibrations,
            CODINGS[method.fills] if method.fills else Packed(codec=Stored()),
            lambda sections: self.metadata.file_bytes(dequantizers, sections),
            self.pool,
            self.progress,
            cap,
        )
        candidate = candidates.make(quantizers) if cap is None else FillCap().fit(candidates, quantizers, cap).candidate
        predicted = None if candidate.predicted_loss is None else candidate.predicted_loss * self.per_nat
        after = self._bits_per_byte({name: stored.restored for name, stored in candidate.weights.items()})
        measured = None if after is None or self.before is None else after - self.before
        arrays = [
            (weight, stored.arrays[key])
            for weight, stored in candidate.weights.items()
            for key in stored.quantizer.layout(stored.shape)
        ]
        tried: dict[str, list[bytes]] = {}
        encoding, decoding = Phases(), Phases()
        for name, coding in CODINGS.items():
            self.progress.step({"event": "doing", "text": f"{len(tried) + 1} of {len(CODINGS)} codings: {name}"})
            with encoding(name):
                tried[name] = [coding.encode(array) for _, array in arrays]
        tried[SMALLEST] = [min(same, key=len) for same in zip(*tried.values(), strict=True)]
        encoding.seconds[SMALLEST] = sum(encoding.seconds.values())
        found = []
        for name, streams in tried.items():
            of_weight: dict[str, list[bytes]] = {weight: [] for weight in candidate.weights}
            for (weight, array), stream in zip(arrays, streams, strict=True):
                of_weight[weight].append(stream)
                with decoding(name):
                    decode(stream, array.dtype, array.shape)
            sections = [section_of(*one) for one in of_weight.items()]
            weight_bits = 8 * sum(len(section.data) for section in sections)
            facts = {
                "quantizer": method.name,
                "cap_bytes": cap,
                "fitted_with": method.fills,
                "coding": name,
                "bytes": self.metadata.file_bytes(dequantizers, sections),
                "bits_per_weight": weight_bits / sum(weight.numel() for weight in self.weights.values()),
                "predicted_bits_per_byte": predicted,
                "measured_bits_per_byte": measured,
                "encode_seconds": encoding.seconds[name],
                "decode_seconds": decoding.seconds[name],
            }
            found.append(facts)
        return found

    @torch.no_grad()
    def _bits_per_byte(self, weights: Mapping[str, Tensor]) -> float | None:
        """Return bits per byte of the measured text, at the bytes per token of all training text; None without text."""
        if not self.rows:
            return None
        self.model.load_state_dict(dict(weights))
        nats = torch.zeros((), dtype=torch.float64)
        for ids in torch.split(torch.cat(self.rows), max(1, 4096 // self.rows[0].shape[1])):
            logits = self.model(ids, ids == self.bos)[:, :-1]
            nats += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten().long(), reduction="sum").double().cpu()
        return float(nats) / sum(ids[:, 1:].numel() for ids in self.rows) * self.per_nat


def _unseen(recipe: Recipe, corpus: Corpus, model: Model) -> list[Tensor]:
    """Return rows of training text, each (1, length), that calibration does not use; no rows if it uses all text."""
    text, split, length = recipe.pack.calibration, corpus.manifest.train, recipe.score.sequence_length
    shards = corpus.train_shards()

    def rows(text: TrainingText) -> list[Tensor]:
        return [*text.batches(model, shards, length=length, bos=corpus.manifest.tokenizer.bos)]

    # Counted, because calibration reads whole batches: fewer tokens than its setting, or one batch that has more.
    used = sum(ids.numel() for ids in rows(text)) if isinstance(text, TrainingText) else 0
    tokens = min(MEASURED_TOKENS, split.tokens - used - 2 * length * len(shards))
    if tokens < length:
        return []
    text = text if isinstance(text, TrainingText) else TrainingText()
    return rows(text.but(tokens=used + tokens, batch_tokens=length))[used // length :]
