"""The benches of speed: what they count, read and ask, on toys and made-up logs; not what they found."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import contenders
import equality
import float8
import gpu
import kernels
import laps
import nanochat_steps
import numpy as np
import parts
import peers
import plain
import pytest
import speed
import torch
from torch.autograd import DeviceType

from caddie.errors import UserError
from caddie.model import build
from caddie.model.flops import Flops, count
from caddie.ops import dispatch as choice
from caddie.recipes.catalog import find

TOY = (
    "model.width=16",
    "model.depth=3",
    "model.vocabulary=300",
    "model.block.attention.heads=2",
    "model.block.attention.key_value_heads=1",
    "model.block.mlp.hidden=32",
    "train.batch_tokens=64",
    "train.sequence_length=32",
    "train.warmup_steps=0",
    "train.precision=float32",
    "score.sequence_length=32",
    "score.stride=16",
    "score.batch_tokens=512",
)
CONTEST_LOG = """\
warmup_step:20/20
step:0/20000 val_loss:6.9 val_bpb:4.1 train_time:0ms step_avg:0.02ms
step:1/20000 train_loss:6.9371 train_time:43ms step_avg:43.10ms
step:2/20000 train_loss:6.5012 train_time:87ms step_avg:43.50ms
step:12/20000 train_loss:5.25 train_time:527ms step_avg:43.92ms
"""
NANOGPT_LOG = """\
number of parameters: 0.80M
step 0: train loss 6.9401, val loss 6.9387
iter 0: loss 6.9372, time 1042.17ms, mfu -100.00%
iter 1: loss 6.9311, time 40.50ms, mfu -100.00%
iter 2: loss 6.9200, time 42.25ms, mfu 1.25%
"""


@pytest.fixture
def timed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process what has a process of its own."""
    for name in ("Apart", "apart"):
        monkeypatch.setattr(speed, name, lambda make, *given, **named: make(*given, **named))


# FLOPs


@pytest.mark.parametrize(
    ("name", "row", "before", "after"), [("baseline", 1024, 130.5, 130.5), ("longer_warmdown", 2048, 261.2, 390.0)]
)
def test_flops_of_public_runs_come_out(name: str, row: int, before: float, after: float) -> None:
    """As counted from their scripts, 677 positions seen where documents of 8,192 ids are cut at 2,048."""
    gpt = find(name).model
    found = [count(gpt, row, progress, 677.0).per_token / 1e6 for progress in (0.0, 1.0)]
    assert found == pytest.approx([before, after], rel=1e-3)


def test_the_formula_adds_up() -> None:
    assert Flops(1000, 50.5).per_token == 6 * 1000 + 12 * 50.5
    assert contenders.formula(Flops(1_000_000, 250_000.0)) == "6 x 1,000,000 + 12 x 250,000 = 9.00 MFLOP per token"


def test_positions_seen_end_with_the_document() -> None:
    """Rows of 4 and documents from id 1 on: 1, 2, 1, 2 seen and 1, 2, 3, 4, cut after 3: 1, 2, 3, 1."""
    rows = np.array([[5, 6, 1, 7], [5, 6, 7, 8]])
    assert contenders.mean_seen(rows, 4) == (1 + 2 + 1 + 2 + 1 + 2 + 3 + 4) / 8
    assert contenders.mean_seen(rows, 3) == (1 + 2 + 1 + 2 + 1 + 2 + 3 + 1) / 8


# Logs


def test_the_contests_log_is_read() -> None:
    lines = [line for text in CONTEST_LOG.splitlines() if (line := peers.read_line(text))]
    assert [(line.step, line.loss) for line in lines] == [(1, 6.9371), (2, 6.5012), (12, 5.25)]
    assert peers.spans(lines) == pytest.approx([0.044, 0.044])


def test_nanogpts_log_is_read() -> None:
    lines = [line for text in NANOGPT_LOG.splitlines() if (line := peers.read_line(text))]
    assert [(line.step, line.loss) for line in lines] == [(0, 6.9372), (1, 6.9311), (2, 6.92)]
    assert peers.spans(lines) == pytest.approx([0.0405, 0.04225])


# What peers are told


def test_the_contests_script_is_told_of_the_baseline() -> None:
    told = peers.contest_environment(peers.shape_of(find("baseline")), Path("/data"), Path("/made.model"))
    shape = {"NUM_LAYERS": "9", "MODEL_DIM": "512", "NUM_HEADS": "8", "NUM_KV_HEADS": "4", "MLP_MULT": "2"}
    batch = {"TRAIN_BATCH_TOKENS": "524288", "TRAIN_SEQ_LEN": "1024", "VOCAB_SIZE": "1024", "LOGIT_SOFTCAP": "30.0"}
    run = {"VAL_LOSS_EVERY": "0", "MAX_WALLCLOCK_SECONDS": "0", "DATA_PATH": "/data", "TOKENIZER_PATH": "/made.model"}
    assert told.items() >= (shape | batch | run).items()


def test_an_mlp_that_the_contests_script_cannot_have_is_refused() -> None:
    shape = peers.shape_of(find("baseline").but({"model.block.mlp.hidden": 992}))
    with pytest.raises(UserError, match="992 is none of 512"):
        peers.contest_environment(shape, Path(), Path())


def test_nanogpt_is_told_of_a_twin() -> None:
    told = peers.nanogpt_arguments(peers.shape_of(find("baseline_mini")), "cpu")
    assert {"--n_layer=5", "--n_head=4", "--n_embd=128", "--block_size=128", "--batch_size=8"} <= set(told)
    assert {"--gradient_accumulation_steps=1", "--device=cpu", "--compile=False", "--dropout=0.0"} <= set(told)


def test_flops_of_peers() -> None:
    """The contest's script has the baseline's own; nanoGPT's layers have 12·d² elements."""
    shape = peers.shape_of(find("baseline"))
    assert peers.peer_flops(peers.CONTEST, shape) == count(find("baseline").model, 1024).per_token
    products = 9 * 12 * 512 * 512 + 1024 * 512
    assert peers.peer_flops(peers.NANOGPT, shape) == 6 * products + 12 * 9 * 512 * (1 + 1024) / 2


# Peers at work


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(source: str) -> Path:
        path = tmp_path / "train_gpt.py"
        path.write_text(source)
        return path

    return write


COUNTING = """
import os, time
print("model_params:4711", flush=True)
for step in range(1, int(os.environ["ITERATIONS"])):
    time.sleep(0.002)
    print(f"step:{step}/9 train_loss:{1 / step} train_time:{10 * step}ms step_avg:10.00ms")
"""


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "write_contest_data", lambda *given, **named: None)


def test_a_peer_takes_turns(script: Callable[[str], Path], no_tokenizer: None) -> None:
    peer = peers.Peer(script(COUNTING), "baseline_mini", TOY)
    try:
        found = [peer.block(0.0), peer.block(0.03)]
        assert all(lap == {laps.WHOLE: pytest.approx(0.01)} for block in found for lap in block)
        time.sleep(0.05)  # stopped, it does not go on
        assert peer._told.empty()
        assert peer.facts["parameters"] == 4711
        assert peer.facts["losses"][4] == 0.25
    finally:
        peer.close()
    assert peer._process.returncode is not None


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_peer_that_stands_still_ends_with_what_started_it() -> None:
    """Though it leads a session of its own, and what started it was killed without a chance to end it."""
    source = (
        "import subprocess, sys, time; from peers import _end_with_parent\n"
        "peer = subprocess.Popen(['sleep', '60'], start_new_session=True, preexec_fn=_end_with_parent)\n"
        "peer.send_signal(19); print(peer.pid, flush=True); time.sleep(60)"
    )
    folder = Path(peers.__file__).parent
    starter = subprocess.Popen([sys.executable, "-c", source], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    peer = Path("/proc", starter.stdout.readline().strip(), "stat")
    assert peer.exists()
    starter.kill()
    starter.wait()
    starter.stdout.close()
    for _ in range(500):
        try:
            if peer.read_text().rpartition(")")[2].split()[0] in "ZX":  # nobody may be there to take its status
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)
    raise AssertionError("it is still there")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise SystemExit('no GPU here')", "failed with status 1: no GPU here"),
        ("print('epoch 1, loss 2')", "its log is not known"),
    ],
)
def test_a_peer_that_is_of_no_use_says_why(
    source: str, says: str, script: Callable[[str], Path], no_tokenizer: None
) -> None:
    peer = peers.Peer(script(source), "baseline_mini", TOY)
    with pytest.raises(UserError, match=says) as raised:
        peer.block(0.0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["baseline_mini", "--peer", "/nowhere"], "no peer at /nowhere"),
        (["baselin"], "did you mean baseline"),
        (["--seconds", "0"], "--seconds must be above zero"),
    ],
)
def test_mistakes_are_one_line(given: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Apart", "apart"):
        monkeypatch.setattr(speed, name, lambda *told, **named: pytest.fail("something was timed"))
    with pytest.raises(UserError, match=says):
        speed.measure(speed.parsed(given))


# nanochat

STAND_IN = """
from types import SimpleNamespace
import torch

GPTConfig = SimpleNamespace

class Descent:
    def __init__(self, weights):
        self.weights = [*weights]

    def step(self):
        for weight in self.weights:
            weight.data -= weight.grad

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.table = torch.nn.Embedding(config.vocab_size, config.n_embd)

    def init_weights(self):
        torch.nn.init.ones_(self.table.weight)

    def setup_optimizer(self):
        return Descent(self.parameters())

    def estimate_flops(self):
        return 6 * self.table.weight.numel()

    def forward(self, inputs, targets):
        assert inputs.shape == targets.shape == (2, 32)
        return torch.nn.functional.cross_entropy((self.table(inputs) @ self.table.weight.T + 1).mT, targets)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for stand-ins of nanochat's modules, of which nothing stays imported."""
    (tmp_path / "nanochat").mkdir()
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("NANOCHAT_DTYPE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "nanochat"]:
        del sys.modules[name]


OPTIMIZER = """
import torch


class MuonAdamW(torch.optim.SGD):
    def __init__(self, groups):
        assert all(one.numel() for group in groups for one in group["params"])
        self.kinds = [(group.pop("kind"), [tuple(one.shape) for one in group["params"]]) for group in groups]
        super().__init__([{"params": group["params"], "lr": group["lr"]} for group in groups])
"""


@pytest.mark.long
def test_nanochat_s_optimizer_trains_the_recipe_s_own_model(checkout: Path) -> None:
    (checkout / "nanochat" / "optim.py").write_text(OPTIMIZER)
    steps = nanochat_steps.PlainNanochatSteps(checkout, "baseline_mini", TOY, None)
    (updater,) = steps.optimizers
    adamw, *muon = updater.kinds
    assert {kind for kind, _ in muon} == {"muon"}
    assert all(len(set(shapes)) == 1 for _, shapes in muon), "one shape to a group"
    assert sum(len(shapes) for _, shapes in muon) == 3 * 6, "six matrices in each of three layers"
    assert adamw[0] == "adamw"
    assert sum(len(shapes) for _, shapes in updater.kinds) == len(list(steps.model.parameters()))
    before = [matrix.detach().clone() for matrix in steps.model.divided()[0]]
    (lap,) = steps.block(0.0)
    assert {"forward", "backward", "optimizer"} <= set(lap)
    assert not any(torch.equal(new, old) for new, old in zip(steps.model.divided()[0], before, strict=True))


def test_nanochat_is_driven_at_the_recipe_s_shape(checkout: Path) -> None:
    (checkout / "nanochat" / "gpt.py").write_text(STAND_IN)
    assert nanochat_steps.is_nanochat(checkout)
    assert not nanochat_steps.is_nanochat(checkout / "nanochat")
    steps = nanochat_steps.NanochatSteps(checkout, "baseline_mini", TOY, None)
    config = steps.model.config
    assert (config.n_layer, config.sequence_len, config.window_pattern) == (3, 32, "L")
    before = steps.model.table.weight.detach().clone()
    (lap,) = steps.block(0.0)
    assert {"forward", "backward", "optimizer"} <= set(lap)
    assert not torch.equal(steps.model.table.weight, before)
    assert steps.facts["flops_per_token"] == 6 * before.numel()
    assert steps.facts["parameters"] == before.numel()


@pytest.mark.long
def test_what_is_driven_here_is_timed_compiled_too_where_that_is_asked(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, timed_here: None
) -> None:
    (checkout / "nanochat" / "gpt.py").write_text(STAND_IN)
    (checkout / "nanochat" / "optim.py").write_text(OPTIMIZER)
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(model) or model)
    given = ["baseline_mini", "--only", "training", "--peer", "plain", "--peer", str(checkout), "--compiled"]
    given += [f"--set={setting}" for setting in TOY]
    found = speed.measure(speed.parsed([*given, "--seconds", "0.01", "--rounds", "1"]))
    rows = {row["name"]: row["compiled"] for row in found["recipes"]["baseline_mini"]["training"]["steps"]}
    assert len(compiled) == 5 == sum(rows.values())
    assert all(rows[name] == name.endswith(", compiled") for name in rows)
    assert {name for name in rows if f"{name}, compiled" in rows} == {*rows} - {"caddie"} - {
        name for name in rows if rows[name]
    }


# The plain loop

RENAMED = {"table.": "embedding.", "skips": "skips.weight", ".up.": ".mlp.up.", ".down.": ".mlp.down."}


def test_the_plain_loop_has_the_same_model() -> None:
    """Parameter for parameter, and the same logits."""
    gpt = find("baseline_mini").but({"model.vocabulary": 64, "model.width": 32}).model
    ours, theirs = build(gpt, 0), plain.Plain(gpt)
    named = dict(ours.named_parameters())
    with torch.no_grad():
        for parameter in named.values():  # what starts at zero would hide a difference
            parameter.normal_(0.0, 0.1)
        for name, parameter in theirs.named_parameters():
            for old, new in RENAMED.items():
                name = name.replace(old, new)
            parameter.copy_(named.pop(name))
    assert not named
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(ids), ours(ids), rtol=1e-4, atol=1e-5)


# Timing


def test_marks_become_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 3.5, 4.0, 6.0, 7.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = laps.Stopwatch(torch.device("cpu"))
    for part in ("batch", "forward", "backward", "forward", "batch", "forward", "end"):
        watch.mark(part)
    assert watch.laps("batch") == [
        {"whole": 4.0, "batch": 1.0, "forward": 2.5, "backward": 0.5},
        {"whole": 3.0, "batch": 2.0, "forward": 1.0},
    ]


def test_ratios_are_taken_within_a_round() -> None:
    """Slow rounds are slow for both: 2, 2 and 3 times, whatever the medians of all laps are."""
    ours = [[{"whole": 1.0}], [{"whole": 10.0}], [{"whole": 1.0}]]
    theirs = [[{"whole": 2.0}], [{"whole": 20.0}], [{"whole": 3.0}, {"whole": 3.0}]]
    assert laps.ratio(ours, theirs) == 2.0
    assert laps.medians(ours) == {"whole": 1.0}


def test_the_roof_is_the_best_product() -> None:
    rounds = [[{"whole": 3.0, "float32": 2.0, "bfloat16": 1.0}], [{"whole": 4.5, "float32": 4.0, "bfloat16": 0.5}]]
    assert contenders.rates(rounds, 8.0) == {"float32": 4.0, "bfloat16": 16.0}


# The profile


def event(name: str, start: int, own: float, number: int = -1, parent: Any = None) -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start),
        sequence_nr=number,
        cpu_parent=parent,
        self_cpu_time_total=own,
        self_device_time_total=10 * own,
        device_type=DeviceType.CPU,
    )


@pytest.mark.parametrize(("on_gpu", "factor"), [(False, 1), (True, 10)])
def test_the_backward_belongs_to_the_part_that_made_it(on_gpu: bool, factor: int) -> None:
    """Operation `view` makes no node and so sees the number of the product behind it, in another part."""
    mlp, head = event("part of the model: MLP", 0, 1.0), event("part of the model: head and loss", 10, 2.0)
    node = event("autograd::engine::evaluate_function: MmBackward0", 20, 4.0, 7)
    events = [
        mlp,
        event("aten::view", 1, 8.0, 7, mlp),
        head,
        event("aten::mm", 11, 16.0, 7, head),
        node,
        event("aten::mm", 21, 32.0, -1, node),
        event("autograd::engine::evaluate_function: AccumulateGrad", 30, 64.0),
    ]
    found = parts.assigned(events, on_gpu)
    assert found == {"MLP": 9 * factor, "head and loss": 54 * factor, parts.REST: 64 * factor}


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_tn_n_tilesize128x128x64", "products"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("triton_red_fused__to_copy_mul_pow_sum_3", "other Triton kernels"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and memory"),
        ("nccl:something", "other kernels"),
    ],
)
def test_kernels_are_told_apart(kernel: str, what: str) -> None:
    assert parts.kind(kernel) == what


# All of it


@pytest.mark.long
def test_everything_is_measured(monkeypatch: pytest.MonkeyPatch, timed_here: None) -> None:
    settings = [part for setting in TOY for part in ("--set", setting)]
    given = ["baseline_mini", *settings, "--peer", "plain", "--seconds", "0.01", "--rounds", "2", "--profile"]
    arguments = speed.parsed(given)
    monkeypatch.setattr(speed, "PROFILED_STEPS", 1)
    monkeypatch.setattr(speed, "MatrixProducts", lambda size, threads: contenders.MatrixProducts(32, threads))
    found = json.loads(json.dumps(speed.measure(arguments)))
    entry = found["recipes"]["baseline_mini"]
    ours, *others = entry["training"]["steps"]
    assert [step["name"] for step in others] == [name for name, *_ in plain.PLAIN]
    assert ours["parameters"] == others[0]["parameters"]
    assert ours["milliseconds"].keys() >= {"whole", "batch", "forward", "backward", "optimizer"}
    assert ours["ours_is_quicker_by"] == 1.0
    assert ours["flops_per_second"] == ours["tokens_per_second"] * ours["flops_per_token"]
    assert all(math.isfinite(loss) for loss in ours["losses"])
    assert [way["stride"] for way in entry["scoring"]] == [32, 16]
    assert entry["packing"]["bytes"] > 1000
    assert set(entry["profile"]["parts"]) == set(parts.PARTS)
    assert all(spent > 0 for spent in entry["profile"]["parts"].values())
    text = speed.shown(found)
    assert all(word in text for word in ("caddie is x", "sliding", "seconds to open", "norms, rotation, residuals"))
    assert max(map(len, text.splitlines()[2:])) <= 200


# The script for a GPU


def test_a_part_that_takes_too_long_loses_only_itself(tmp_path: Path) -> None:
    found = gpu.supervised("device", ["--out", str(tmp_path), "--rehearse"], tmp_path, 0.01)
    assert found["failed"] == "it took too long"
    page = gpu.page({"date": "today", "command": "c", "seconds": 1.0, "parts": {"device": found}})
    assert "**Not complete: it took too long**" in page


def test_limits_of_the_parts_keep_the_promise() -> None:
    assert sum(limit for _, limit in gpu.PARTS.values()) < 600


def test_loss_curves_are_compared_within_the_noise_of_seeds() -> None:
    ours, again = [5.0] * 30, [5.1] * 30
    assert gpu.curves(ours, again, {1: 9.0, 10: 5.05, 20: 5.15})["within_noise"] is True
    found = gpu.curves(ours, again, {10: 5.3, 20: 5.3})
    assert found["within_noise"] is False
    assert (found["apart"], found["noise"]) == pytest.approx((0.25, 0.1))
    assert gpu.curves(ours, again, {1: 9.0})["within_noise"] is None


@pytest.mark.long
def test_kernels_and_backends_are_held_against_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "operations", list)
    monkeypatch.setattr(equality, "least", lambda works: kernels.least(works, 1))
    few = {name: equality.BACKENDS[name] for name in ("SDPA", "SDPA with a dense mask")}
    monkeypatch.setattr(equality, "BACKENDS", few)
    every = equality.names
    here = lambda operation: {*every(operation)} - {"Triton"}  # noqa: E731
    monkeypatch.setattr(equality, "names", here)  # what needs a GPU would import the compiler, and then fail
    fused, attention = equality.fused_kernels(), equality.attention_backends(toy=True)
    manual = [row for row in fused if row["name"] == "manual"]
    assert {row["operation"] for row in manual} >= {"cross_entropy", "squared"}
    assert all(row["equal"] for row in manual)
    assert [(row["what"], row["equal"]) for row in attention] == [("rows", True), ("documents", True)]
    x = torch.randn(8, 8)
    assert equality.compared(lambda: [1.1 * x], lambda: [x], lambda: [x])["equal"] is False
    broken = equality.compared(lambda: [torch.ones(2) @ x], lambda: [x], lambda: [x])
    assert broken["equal"] is None
    assert broken["why"].startswith("RuntimeError: ")


@pytest.mark.long
def test_float8_is_held_against_its_reference_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "SHAPES", {"a layer": (1, 1, 1)})
    (row,) = float8.float8_products(toy=True)
    assert row["equal"] is True
    assert 0.01 < row["error"] < 0.1
    assert row["of plain"] < 0.01
    before = choice.implementation("scaled_product", "plain")
    doubled = lambda *given, **named: 2 * before(*given, **named)  # noqa: E731
    monkeypatch.setitem(choice._functions, ("scaled_product", "scaled_mm"), doubled)
    (row,) = float8.float8_products(toy=True)
    assert row["equal"] is False


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13.") or torch.version.cuda is not None or not shutil.which("g++"),
    reason="written for the internals of PyTorch 2.13's CPU build, with g++",
)
@pytest.mark.parametrize(
    ("asked", "graphs"),
    [
        (["baseline_mini", "--set", "train.float8=[head,mlp]"], [2]),
        (["baseline_mini", "--scoring", "--set", "score.ttt=DocumentLoRA()"], [1, 2]),
    ],
)
def test_a_step_and_a_score_compile_for_a_gpu_that_is_not_here(asked: list[str], graphs: list[int]) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, str(Path(gpu.__file__).with_name("compile_only.py")), *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [re.fullmatch(r".*: kernels \[([\d, ]+)\], \d+ s", line) for line in done.stdout.splitlines()]
    kernels = [[int(count) for count in line[1].split(", ")] for line in found if line]
    assert [len(counts) for counts in kernels] == graphs
    assert min(map(min, kernels)) > 10


@pytest.mark.slow
def test_the_script_for_a_gpu_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = tmp_path / "train_gpt.py"
    peer.write_text(COUNTING)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "o"), "--rehearse", "--peer", str(peer)])
    assert gpu.main() == 0
    found = json.loads((tmp_path / "o" / "gpu.json").read_text())
    assert set(found["parts"]) == set(gpu.PARTS)
    assert found["parts"]["baseline"]["found"]["time_over_peers"]["target"] == 0.85
    assert "looped" in (tmp_path / "o" / "gpu.md").read_text()
