"""All that is to be measured on a GPU, in one call of less than ten minutes; one Markdown page and one JSON file.

python bench/gpu.py --out DIR [--shards DIR] [--peer PATH] [--part NAME ...]
python bench/gpu.py --out DIR --rehearse

The shards are those of the contest with 1,024 ids, else tokens are made up. The peer is the contest's public
`train_gpt.py`. Every part is a process of
its own with a time limit, so that one that fails or takes too long loses nothing but itself; what a part had found
until then is kept. With `--rehearse` all parts run at toy size, on a CPU too: to know that the script works.
"""

import argparse
import datetime
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from contenders import MatrixProducts, OurSteps, rates
from equality import attention_backends, fused_kernels, listed
from float8 import float8_products
from laps import Apart, Contender, apart, in_turns
from parts import shares
from peers import Peer, training_shards
from speed import profile_table, row_of, training_table
from stages import scoring_rates

from caddie.cli.exits import end
from caddie.errors import UserError
from caddie.files import write_file
from caddie.report.tables import one_line, table
from caddie.run.result import commit

TARGET = 0.85
"""Our time over the peer's, at most."""
SMALL = "baseline_mini"
AUTOTUNED = "max-autotune-no-cudagraphs"
"""A mode of PyTorch's compiler, which then times its kernels."""
MODES: tuple[tuple[str, str, str | None], ...] = (
    ("baseline", "", None),
    ("baseline", "train.cuda_graphs=always", None),
    ("baseline", 'train.float8=["head","mlp"]', None),
    (SMALL, "", None),
    (SMALL, "train.cuda_graphs=always", None),
    ("baseline", "", AUTOTUNED),
)
"""Recipe, setting and mode of the compiler: what may pay, each behind what it is held against; the slowest last."""
LOOPED = "longer_warmdown"
Tell = Callable[[dict[str, Any]], None]
"""Keeps what a part has found so far."""


class Options(argparse.Namespace):
    """The options of the command line."""

    out: Path
    shards: Path | None
    peer: Path | None
    part: list[str] | None
    rehearse: bool
    run: str | None

    def recipe(self, name: str) -> tuple[str, tuple[str, ...]]:
        """A recipe, or its small twin, and its settings."""
        return (f"{name}_mini", ("train.warmup_steps=0",)) if self.rehearse else (name, ("train.warmup_steps=3",))

    def seconds(self, long: float) -> float:
        """So long, or a moment."""
        return 0.02 if self.rehearse else long


def device(options: Options, tell: Tell) -> None:
    """What is here, and the roof of its matrix products."""
    on_gpu = torch.cuda.is_available()
    products = MatrixProducts(64 if options.rehearse else None)
    (laps,) = in_turns([products], options.seconds(3), 3)
    tell(
        {
            "device": torch.cuda.get_device_name() if on_gpu else "a CPU",
            "memory_bytes": torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "code": commit(),
            "roof_flops_per_second": rates(laps, products.facts["flops"]),
        }
    )


def tests(options: Options, tell: Tell) -> None:
    """The tests that need a GPU: what they said at their end, and which failed."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "3", "--tb=line", "tests/test_gpu.py"]
    ended = subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True)
    lines = ended.stdout.strip().splitlines() or [ended.stderr.strip()]
    tell({"said": lines[-1], "failed": one_line("; ".join(line for line in lines if line.startswith("FAILED")))})


def kernels(options: Options, tell: Tell) -> None:
    """Fused kernels and attention backends against their references, float8 against bfloat16: errors and times."""
    found: dict[str, Any] = {"fused": fused_kernels()}
    tell(found)
    found["attention"] = attention_backends(toy=options.rehearse)
    tell(found)
    found["float8"] = []
    for row in float8_products(toy=options.rehearse):
        found["float8"].append(row)
        tell(found)


def baseline(options: Options, tell: Tell) -> None:
    """The baseline at 524,288 tokens a step beside the public script on the same shards, and their loss curves."""
    name, settings = options.recipe("baseline")
    shards = training_shards(options.shards) if options.shards else []
    settings += ("train.loader.begin=first shard",) if shards else ()
    peer = Peer(options.peer, name, settings, shards=options.shards) if options.peer else None
    contenders: list[Contender] = [
        Apart(OurSteps, name, settings, shards=shards),
        *([peer] if peer else []),
        Apart(MatrixProducts, 64 if options.rehearse else None),
    ]
    laps = in_turns(contenders, options.seconds(25), 5)
    for contender in contenders:
        contender.close()
    ours, products = contenders[0].facts, contenders[-1].facts
    roof = rates(laps[-1], products["flops"])
    steps = [row_of("caddie", ours, laps[0], laps[0], roof)]
    if peer:
        steps.append(row_of("the public script", dict(peer.facts), laps[1], laps[0], roof))
    found: dict[str, Any] = {"training": {"roof_flops_per_second": roof, "steps": steps}}
    if peer:
        quotient = 1.0 / steps[1]["ours_is_quicker_by"]
        found["time_over_peers"] = {"quotient": quotient, "target": TARGET, "reached": quotient <= TARGET}
    tell(found)
    again = Apart(OurSteps, name, settings, shards=shards, seed=1)
    again.block(options.seconds(15))
    again.close()
    if peer:
        found["losses"] = curves(ours["losses"], again.facts["losses"], peer.facts["losses"])
        tell(found)
    tell({**found, "profile": apart(shares, name, settings if options.rehearse else _cut_small(settings), None, 3)})


def curves(ours: list[float], again: list[float], peers: Mapping[int, float]) -> dict[str, Any]:
    """Whether the peer's losses differ from ours by more than ours do with another seed, from step 10 on."""
    both = [step for step in sorted(peers) if 10 <= step <= min(len(ours), len(again))]
    if not both:
        return {"steps": 0, "within_noise": None}

    def root_mean_square(differences: list[float]) -> float:
        return math.sqrt(statistics.fmean(value * value for value in differences))

    apart_by = root_mean_square([peers[step] - (ours[step - 1] + again[step - 1]) / 2 for step in both])
    noise = root_mean_square([ours[step - 1] - again[step - 1] for step in both])
    rows = [(step, ours[step - 1], again[step - 1], peers[step]) for step in both]
    # The mean of two of ours has half the variance of one, so alike curves are apart by sqrt(3)/2 of the noise.
    return {"steps": len(both), "apart": apart_by, "noise": noise, "within_noise": apart_by <= 2 * noise, "rows": rows}


def looped(options: Options, tell: Tell) -> None:
    """A record before and after its layers are looped, and its profile."""
    name, settings = options.recipe(LOOPED)
    products = MatrixProducts(64 if options.rehearse else None)
    (laps,) = in_turns([products], options.seconds(2), 2)
    roof, ours = rates(laps, products.facts["flops"]), OurSteps(name, settings)
    steps: list[dict[str, Any]] = []
    found: dict[str, Any] = {"training": {"roof_flops_per_second": roof, "steps": steps}}
    for label, at in (("before looping", 0), ("looped", -1)):
        ours.turn_to(at)
        (laps,) = in_turns([ours], options.seconds(10), 2)
        steps.append(row_of(label, dict(ours.facts), laps, laps, roof))
        tell(found)
    ours.close()
    tell({**found, "profile": apart(shares, name, settings if options.rehearse else _cut_small(settings), None, 2, -1)})


def scoring(options: Options, tell: Tell) -> None:
    """Tokens per second of plain and sliding scoring."""
    found: dict[str, Any] = {}
    for which in ("baseline", LOOPED):
        name, settings = options.recipe(which)
        if which == "baseline" and not options.rehearse:
            settings += ("score.stride=64",)
        found[which] = apart(scoring_rates, name, settings, None, options.seconds(8), 2)
        tell({"ways": found})


def modes(options: Options, tell: Tell) -> None:
    """What may pay or not, one after the other: CUDA graphs, eight-bit products, the compiler's autotuning."""
    found: dict[str, Any] = {}
    for name, setting, mode in MODES:
        what = " ".join(filter(None, (name, setting, mode)))
        if options.rehearse:  # a CPU has no graphs to replay, and takes a minute to compile
            setting, mode = setting.replace("cuda_graphs=always", "cuda_graphs=auto"), None
        recipe, settings = options.recipe(name) if name != SMALL else (SMALL, ())
        begin = time.perf_counter()
        try:
            ours = Apart(OurSteps, recipe, (*settings, *filter(None, (setting,))), mode=mode)
            ready = time.perf_counter() - begin
            (laps,) = in_turns([ours], options.seconds(2), 2)
            ours.close()
            times = [lap["whole"] for block in laps for lap in block]
            loss = statistics.fmean(ours.facts["losses"][-10:])
            found[what] = {"milliseconds": 1e3 * statistics.median(times), "seconds_to_begin": ready, "loss": loss}
        except Exception as error:  # whatever one fails with, the next is tried
            found[what] = {"failed": one_line(f"{type(error).__name__}: {error}")}
        tell({"modes": found})


def _cut_small(settings: tuple[str, ...]) -> tuple[str, ...]:
    """Smaller micro-batches, whose activations fit uncompiled."""
    return (*settings, "train.micro_batches=32")


PARTS: dict[str, tuple[Callable[[Options, Tell], None], float]] = {
    "device": (device, 25.0),
    "tests": (tests, 100.0),
    "kernels": (kernels, 75.0),
    "baseline": (baseline, 180.0),
    LOOPED: (looped, 90.0),
    "scoring": (scoring, 45.0),
    "modes": (modes, 80.0),
}
"""Parts by name, each with the seconds that it may take: 595 in all."""


def supervised(name: str, given: list[str], out: Path, limit: float) -> dict[str, Any]:
    """A part in a process of its own: what it found, seconds, and what went wrong if anything did."""
    path = out / f"{name}.json"
    path.unlink(missing_ok=True)
    begin = time.monotonic()
    command = [sys.executable, __file__, *given, "--run", name]
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = {"seconds": time.monotonic() - begin, "limit_seconds": limit}
    if path.exists():
        found["found"] = json.loads(path.read_text())
    if status != 0:
        lines = (out / f"{name}.log").read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it said nothing"
        found["failed"] = "it took too long" if status is None else one_line(f"status {status}: {last}")
    return found


def page(found: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    lines = [f"# Measured on {found['date']}", "", f"`{found['command']}`, {found['seconds']:,.0f} seconds in all.", ""]
    for name, part in found["parts"].items():
        lines += [f"## {name}", "", f"{part['seconds']:,.0f} of at most {part['limit_seconds']:,.0f} seconds."]
        if "failed" in part:
            lines += ["", f"**Not complete: {part['failed']}**"]
        lines += [text for block in _blocks(part.get("found", {})) for text in ("", "```", block, "```")]
        lines.append("")
    return "\n".join(lines)


def _blocks(found: Mapping[str, Any]) -> list[str]:
    """What a part found, as tables."""
    blocks = []
    plain = {key: value for key, value in found.items() if isinstance(value, str | int | float | None)}
    if plain:
        blocks.append(table(plain.items(), ["", ""]))
    for key in ("roof_flops_per_second", "time_over_peers"):
        if key in found:
            blocks.append(f"{key.replace('_', ' ')}: {json.dumps(found[key])}")
    for key in ("fused", "attention", "float8"):
        if key in found:
            blocks.append(listed(found[key]))
    if "training" in found:
        blocks.append(training_table(found["training"]))
    if "losses" in found:
        rows = [[step, *(f"{loss:.4f}" for loss in losses)] for step, *losses in found["losses"].get("rows", ())]
        told = {key: value for key, value in found["losses"].items() if key != "rows"}
        blocks.append(table(rows, ["step", "ours", "another seed", "the peer"]) + f"\n{json.dumps(told)}")
    blocks += [f"by {kind}\n{profile_table(parts)}" for kind, parts in found.get("profile", {}).items()]
    for which, ways in found.get("ways", {}).items():
        rows = [[way["way"], way["stride"], f"{way['tokens_per_second']:,.0f}"] for way in ways]
        blocks.append(f"{which}\n" + table(rows, ["", "stride", "tokens/s"]))
    if "modes" in found:
        blocks.append(table([[mode, json.dumps(told)] for mode, told in found["modes"].items()], ["mode", ""], 110))
    return blocks


def parsed(given: list[str]) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the page and the figures go")
    parser.add_argument("--shards", type=Path, metavar="DIR", help="the contest's shards, with 1,024 ids; else made up")
    parser.add_argument("--peer", type=Path, metavar="PATH", help="the contest's public script")
    parser.add_argument("--part", action="append", choices=PARTS, help="this part alone; may be repeated")
    parser.add_argument("--rehearse", action="store_true", help="everything at toy size")
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args(given, Options())


def main() -> int:
    """All parts, or with `--run` one of them in this process."""
    given = sys.argv[1:]
    options = parsed(given)
    if options.run:
        path = options.out / f"{options.run}.json"
        PARTS[options.run][0](options, lambda found: write_file(path, json.dumps(found).encode()))
        return 0
    if not options.rehearse and not torch.cuda.is_available():
        raise UserError("there is no GPU here; --rehearse runs all parts at toy size")
    if options.shards:
        training_shards(options.shards)
    options.out.mkdir(parents=True, exist_ok=True)
    begin, parts = time.monotonic(), dict[str, Any]()
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "parts": parts}
    found["command"] = " ".join(["python", "bench/gpu.py", *given])
    for name in options.part or PARTS:
        print(f"{name}: at most {PARTS[name][1]:,.0f} seconds", flush=True)
        parts[name] = supervised(name, given, options.out, PARTS[name][1])
        print(f"  {parts[name].get('failed', 'done')}, {parts[name]['seconds']:,.0f} seconds", flush=True)
        found["seconds"] = time.monotonic() - begin
        write_file(options.out / "gpu.json", json.dumps(found, indent=1).encode())
        write_file(options.out / "gpu.md", page(found).encode())
    print(f"written  {options.out / 'gpu.md'}")
    return int(any("failed" in part for part in parts.values()))


if __name__ == "__main__":
    end(main)
