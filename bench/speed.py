"""Times a recipe here: a training step and its parts, scoring, compression and opening, memory; one command.

python bench/speed.py [RECIPE ...] [--set PATH=VALUE ...] [--peer PATH|plain ...] [--compiled] [--only PART ...]
                      [--profile] [--seconds S] [--rounds N] [--threads N] [--shards DIR] [--json FILE]

Each thing that is measured has a process of its own. Those whose ratio is printed take turns in one run, so that what
else the machine does slows all alike: a ratio is the median over the rounds, in each of which both had a turn. Before
the first round each is warmed up, ours by the warm-up of a real run, which on a CPU also chooses threads and number
format. Times are medians over all steps, of events on a GPU. Weights and tokens are random, never constant.

FLOPs per token are 6 for each element of the matrices that a token is multiplied by, a layer's as often as it runs, and
12 for each channel and position that it sees: forward and backward of matrix products and causal attention, no more.
The roof is the best product of two square matrices that the device was seen to do in the same rounds, in the number
format of the step. `--peer plain` is `bench/plain.py`, with AdamW, with Muon, and under autocast; a checkout of
nanochat is `bench/nanochat_steps.py`; both once more by PyTorch's compiler with `--compiled`. Any other peer is a
public script or its folder, see `bench/peers.py`.
"""

import argparse
import datetime
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from contenders import MatrixProducts, OurSteps, rates
from laps import WHOLE, Apart, Contender, Lap, apart, in_turns, medians, ratio
from nanochat_steps import NanochatSteps, PlainNanochatSteps, is_nanochat
from parts import shares
from peers import Peer, script_of, shape_of, training_shards
from plain import PLAIN, PlainSteps
from stages import VERBS, packing, scoring_rates

from caddie.cli.exits import end
from caddie.doctor.host import processor
from caddie.doctor.pace import named
from caddie.errors import UserError
from caddie.files import write_json
from caddie.report.tables import table
from caddie.run.result import commit
from caddie.runtime.distributed import local_device

RECIPES = ("baseline_mini", "tiny")
PARTS = ("training", "scoring", "packing")
WIDTH = 130
PEAKS = {"H100": 989e12, "H200": 989e12}
"""FLOP per second of dense bfloat16 products, as the maker states them, by a part of the device's name."""
PROFILED_STEPS = 10
_OURS = "caddie"


def train_in_turns(
    name: str,
    settings: tuple[str, ...],
    peers: Sequence[str],
    threads: int | None,
    seconds: float,
    rounds: int,
    shards: Path | None = None,
    compiled: bool = False,
) -> dict[str, Any]:
    """Steps of ours, at the start and the end of the run where its graph changes, of the peers, and of products."""
    recipe = named(name, settings)
    shapes = (_OURS, "caddie, end of the run") if _changes(recipe.train, recipe.model) else (_OURS,)
    text = training_shards(shards) if shards else []
    contenders: dict[str, Contender] = {}
    try:
        for label, at in zip(shapes, (0, -1), strict=False):
            contenders[label] = Apart(OurSteps, name, settings, threads, at, shards=text)
        ways = {"": False, ", compiled": True} if compiled else {"": False}
        for peer in peers:
            if peer == "plain":
                for (label, *loop), (suffix, way) in product(PLAIN, ways.items()):
                    contenders[label + suffix] = Apart(PlainSteps, name, settings, threads, *loop, way)
            elif is_nanochat(Path(peer)):
                theirs = {"nanochat": NanochatSteps, "plain, nanochat's": PlainNanochatSteps}
                for (label, loop), (suffix, way) in product(theirs.items(), ways.items()):
                    contenders[label + suffix] = Apart(loop, Path(peer), name, settings, threads, way)
            else:
                path = Path(peer)
                label = path.name if path.is_dir() else f"{path.resolve().parent.name}/{path.name}"
                contenders[label] = Peer(path, name, settings, threads, shards)
        contenders["products"] = Apart(MatrixProducts, None, threads)
        laps = dict(zip(contenders, in_turns(list(contenders.values()), seconds, rounds), strict=True))
        facts = {label: dict(contender.facts) for label, contender in contenders.items()}
    finally:
        for contender in contenders.values():
            contender.close()
    roof = rates(laps.pop("products"), facts.pop("products")["flops"])
    ours = facts[_OURS]
    for fact in facts.values():  # what has no count of its own has the recipe's shape
        fact.setdefault("flops_per_token", ours["flops_per_token"])
    return {
        "roof_flops_per_second": roof,
        "steps": [row_of(label, facts[label], found, laps[_OURS], roof) for label, found in laps.items()],
    }


def row_of(
    label: str,
    facts: dict[str, Any],
    laps: Sequence[Sequence[Lap]],
    ours: Sequence[Sequence[Lap]],
    roof: dict[str, float],
) -> dict[str, Any]:
    found = medians(laps)
    rate = facts["tokens"] / found[WHOLE]
    flops = rate * facts["flops_per_token"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((peak for part, peak in PEAKS.items() if part in device), None)
    return {
        "name": label,
        **facts,
        "steps": sum(map(len, laps)),
        "milliseconds": {part: 1e3 * seconds for part, seconds in found.items()},
        "tokens_per_second": rate,
        "flops_per_second": flops,
        "part_of_roof": flops / roof["float32" if facts["precision"] == "float32" else "bfloat16"],
        "part_of_peak": peak and flops / peak,
        "ours_is_quicker_by": ratio(ours, laps),
    }


def _changes(train: Any, gpt: Any) -> bool:
    """Whether the graph is another at the end of the run than at its start."""
    return len(gpt.stages) > 1 or not isinstance(train.sequence_length, int)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for; every recipe, setting and peer is looked at before anything is timed."""
    device, settings = local_device(), tuple(arguments.set)
    for name in arguments.recipes:
        recipe = named(name, settings)
        for peer in arguments.peer:
            if peer != "plain" and not is_nanochat(Path(peer)):
                script_of(Path(peer))
                shape_of(recipe)
    on_gpu, here = device.type == "cuda", processor()
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{here.name or 'a CPU'}, {here.cores:g} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "caddie": version("caddie")},
        "code": commit(),
        "command": shlex.join(["python", "bench/speed.py", *arguments.given]),
        "recipes": {},
    }
    threads, seconds, rounds = arguments.threads, arguments.seconds, arguments.rounds
    for name in arguments.recipes:
        entry: dict[str, Any] = {}
        if "training" in arguments.only:
            entry["training"] = train_in_turns(
                name, settings, arguments.peer, threads, seconds, rounds, arguments.shards, arguments.compiled
            )
        if "scoring" in arguments.only:
            entry["scoring"] = apart(scoring_rates, name, settings, threads, seconds, rounds)
        if "packing" in arguments.only:
            entry["packing"] = apart(packing, name, settings, threads)
        if arguments.profile:
            entry["profile"] = apart(shares, name, settings, threads, PROFILED_STEPS)
        found["recipes"][name] = entry
    return found


def shown(found: dict[str, Any]) -> str:
    """All of it for people."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    blocks = [f"{found['date']}, {found['device']}, {versions}\n{found['command']}"]
    for name, entry in found["recipes"].items():
        if training := entry.get("training"):
            blocks.append(f"{name}: training\n{training_table(training)}")
        if scoring := entry.get("scoring"):
            blocks.append(f"{name}: scoring\n{_scoring_table(scoring)}")
        if packed := entry.get("packing"):
            blocks.append(f"{name}: packing\n{_packing_table(packed)}")
        for kind, parts in entry.get("profile", {}).items():
            blocks.append(f"{name}: profile by {kind}\n{profile_table(parts)}")
    return "\n\n".join(blocks)


def training_table(training: dict[str, Any]) -> str:
    """Steps in a table, and what must be known to read it."""
    steps = training["steps"]
    names = [part for part in steps[0]["milliseconds"] if part != WHOLE]
    rows = [
        [
            step["name"],
            f"{step['milliseconds'][WHOLE]:,.2f}",
            *(_fixed(step["milliseconds"].get(part), 2) for part in names),
            f"{step['tokens_per_second']:,.0f}",
            f"{step['ours_is_quicker_by']:.2f}",
            f"{100 * step['part_of_roof']:.1f}",
            _fixed(step["peak_bytes"] and step["peak_bytes"] / 2**20, 0),
            step["parameters"],
            f"{step['flops_per_token'] / 1e6:,.2f}",
        ]
        for step in steps
    ]
    header = ["", "ms/step", *names, "tokens/s", "caddie is x", "% of roof", "MiB", "parameters", "MFLOP/token"]
    lines = [table(rows, header, WIDTH)]
    for step in steps:
        compiled = "compiled" if step["compiled"] else "eager"
        attention = f"attention: {step['attention']}"
        lines.append(
            f"  {step['name']}: {step['tokens']:,} tokens a step, {step['precision']}, {step['threads']} threads, "
            f"{compiled}, {attention}, {step['steps']} steps timed"
        )
        if step["part_of_peak"]:
            lines[-1] += f", MFU {100 * step['part_of_peak']:.1f} % of the maker's peak"
    roof = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in training["roof_flops_per_second"].items())
    lines.append(f"  caddie: {steps[0]['formula']}")
    lines.append(f"  roof, GFLOP per second of matrix products: {roof}")
    return "\n".join(lines)


def _scoring_table(scoring: list[dict[str, Any]]) -> str:
    rows = [
        [
            way["way"],
            way["sequence_length"],
            way["stride"],
            f"{way['tokens_per_second']:,.0f}",
            _fixed(way["peak_bytes"] and way["peak_bytes"] / 2**20, 0),
            way["threads"],
            way["precision"],
        ]
        for way in scoring
    ]
    return table(rows, ["", "window", "stride", "tokens/s", "MiB", "threads", "format"], WIDTH)


def _packing_table(packed: dict[str, Any]) -> str:
    rows = [
        ["parameters", packed["parameters"]],
        ["bytes of the file", packed["bytes"]],
        ["drafts of the fit", packed["drafts"]],
        ["tokens of the calibration", packed["calibration_tokens"]],
        *([f"seconds to {verb}", _fixed(packed[f"{verb}_seconds"], 2)] for verb in VERBS),
        ["MiB", _fixed(packed["peak_bytes"] and packed["peak_bytes"] / 2**20, 0)],
    ]
    return table(rows, ["", f"{packed['threads']} threads"], WIDTH)


def profile_table(parts: dict[str, float]) -> str:
    """Milliseconds and share of each part."""
    whole = sum(parts.values()) or 1.0
    rows = [[part, f"{spent:,.2f}", f"{100 * spent / whole:.1f}"] for part, spent in parts.items()]
    return table([*rows, ["sum, with what the profiler takes", f"{whole:,.2f}", "100.0"]], ["", "ms/step", "%"], WIDTH)


def _fixed(number: float | None, digits: int) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"


def parsed(given: Sequence[str]) -> argparse.Namespace:
    """The command line; a number that makes no sense is a `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="a setting of all recipes")
    parser.add_argument("--peer", action="append", default=[], metavar="PATH", help="a public script, or `plain`")
    parser.add_argument("--compiled", action="store_true", help="plain loops and nanochat's compiled, too")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this alone; may be repeated")
    parser.add_argument("--profile", action="store_true", help="where a step's time goes, by part of the model")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each thing that is timed; %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each; %(default)s")
    parser.add_argument("--threads", type=int, help="at most so many, on a CPU")
    parser.add_argument("--shards", type=Path, metavar="DIR", help="training shards, instead of random tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    arguments = parser.parse_args(given)
    if arguments.seconds <= 0 or arguments.rounds < 1 or (arguments.threads or 1) < 1:
        raise UserError("--seconds must be above zero, --rounds and --threads at least one")
    arguments.recipes, arguments.only = arguments.recipes or list(RECIPES), arguments.only or list(PARTS)
    arguments.given = list(given)
    return arguments


def main() -> None:
    """Measure, print, write."""
    arguments = parsed(sys.argv[1:])
    found = measure(arguments)
    print(shown(found))
    if arguments.json:
        write_json(arguments.json, found)


if __name__ == "__main__":
    end(main)
