"""The quantization gap at equal bytes: waterfilling against the records' way, on the same trained weights.

    python bench/quantization_gap.py RUN... --caps 300000 500000

Both files are filled to the same cap by the same search. The records' way is GPTQ on rows with steps of k standard
deviations (k of embeddings : k of matrices as in the record at 1.0810), the steps in half precision, coded by Brotli at
its best layout. Gaps are in bits per byte of the run's held-out text, of the packed file against the weights before.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from caddie.model import build
from caddie.pack import artifact as artifacts
from caddie.pack.coding import ArrayCodec, Packed
from caddie.pack.coding.array_codec import Array
from caddie.pack.compress import Pack, pack
from caddie.pack.quantize import Float16, Gptq, Rows, SigmaClip
from caddie.report.run_files import WEIGHTS
from caddie.run.run import metadata_of
from caddie.run.run_folder import read_run
from caddie.run.stages import calibrate_recipe, held_out_text
from caddie.score import score


class BestBrotli(ArrayCodec):
    """Brotli on rows or on columns, whichever is shorter."""

    def encode(self, array: Array, like: bytes = b"") -> bytes:
        """The shorter stream."""
        return min((Packed(columns=columns, shuffle=True).encode(array) for columns in (False, True)), key=len)


def records(embeddings: float) -> Pack:
    """Six bits' steps in eight bits' range, so that finer steps clip nothing; `embeddings` is their k for 8 bits."""
    matrix = Gptq(of=Rows(bits=8, scale=SigmaClip(k=12.85 * 127 / 31)))
    table = Gptq(of=Rows(bits=8, scale=SigmaClip(k=embeddings)))
    small = Float16()
    quantizers = {"matrix": matrix, "embedding": table, "head": table, "gate": small, "scalar": small}
    return Pack(quantizers=quantizers, coding=BestBrotli())


WAYS = {
    "GPTQ + SDClip + Brotli": records(20.0),
    "the same, embeddings twice as fine": records(10.0),
    "waterfilling": Pack(),
}


def measure(run: Path, caps: list[int]) -> None:
    """Print a row for each cap and way."""
    recipe, seed, corpus = read_run(run)
    text, scoring = held_out_text(corpus), recipe.score.plain
    model = build(recipe.model, 0)
    weights = load_file(run / WEIGHTS)
    model.load_state_dict(weights)
    before = score(model, text, scoring).bits_per_byte
    with tempfile.TemporaryDirectory() as folder:
        for cap in caps:
            for name, config in WAYS.items():
                path = Path(folder) / "a"
                begin = time.perf_counter()
                packing = recipe.but(pack=config.but(cap_bytes=cap))
                known = calibrate_recipe(packing, weights, corpus) if config.calibrated else {}
                compressed = pack(metadata_of(packing, seed, corpus), weights, packing.pack, path, known)
                seconds = time.perf_counter() - begin
                packed = artifacts.load(path)
                row = {
                    "run": run.name,
                    "parameters": recipe.parameters,
                    "cap": cap,
                    "way": name,
                    "bytes": packed.file_bytes,
                    "before": before,
                    "seconds": seconds,
                    "gap": score(packed.model, text, scoring).bits_per_byte - before,
                    "predicted_nats": compressed.candidate.predicted_loss,
                }
                print(json.dumps(row), flush=True)


def main() -> None:
    """The rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--caps", nargs="+", type=int, required=True)
    arguments = parser.parse_args()
    for run in arguments.runs:
        measure(run, arguments.caps)


if __name__ == "__main__":
    main()
