"""caddie beside other programs: what is run, chosen, packed, scored and drawn, with stand-ins for the checkouts."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import rival_chart
import rival_models
import rivals
import torch
from rival_programs import CONTENDERS, Nanochat, NanoGPT

from caddie.errors import CheckFailed, UserError
from caddie.runtime.progress import SILENT

NANOGPT = """
import torch
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.ln = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        nn.init.normal_(self.wte.weight, std=0.02)
        print("number of parameters")

    def forward(self, idx, targets=None):
        logits = self.lm_head(self.ln(self.wte(idx)))
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
"""
FAST = {"batch_size": 2, "block_size": 32, "n_embd": 16, "learning_rate": 0.05, "warmup_iters": 2}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for nanoGPT."""
    folder = tmp_path_factory.mktemp("nanoGPT")
    (folder / "model.py").write_text(NANOGPT)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, tiny_run: Any) -> Path:
    """The text of the tests' run as documents."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    paragraphs = tiny_run.text.read_text().split("\n\n")
    path.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    return path


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Work in a folder of the tests, and forget the modules of a checkout."""
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("model", None)


def row(contender: str = "nanoGPT", **more: Any) -> dict[str, Any]:
    plain = {"contender": contender, "settings": {}, "text": "other", "budget": 60.0, "seed": 1, "trial": 0}
    return {**plain, "cap_bytes": rivals.MAIN_CAP, "bits_per_byte": 2.0, **more}


# Choosing


def test_a_trial_changes_the_best_settings_so_far() -> None:
    trials = rivals.TRIALS["nanoGPT"]
    rows = [row(bits_per_byte=2.0), row(trial=1, settings=trials[1], bits_per_byte=1.9)]
    rows.append(row(trial=2, settings={**trials[1], **trials[2]}, bits_per_byte=1.95))
    job = rivals.next_trial(rows, "nanoGPT", "other.jsonl", 60.0, (rivals.MAIN_CAP,))
    assert job is not None
    assert (job.trial, job.settings) == (3, {**trials[1], **trials[3]}), "the third trial was worse"
    again = rivals.next_trial(rows[:1], "nanoGPT", "other.jsonl", 60.0, (rivals.MAIN_CAP,))
    assert again is not None
    assert again.trial == 1


def test_trials_of_another_text_or_budget_do_not_count() -> None:
    rows = [row(text="demo"), row(budget=3.0)]
    job = rivals.next_trial(rows, "nanoGPT", "other.jsonl", 60.0, (rivals.MAIN_CAP,))
    assert job is not None
    assert job.trial == 0


def test_the_search_ends_after_the_last_trial() -> None:
    rows: list[dict[str, Any]] = []
    while job := rivals.next_trial(rows, "nanochat", "other", 60.0, (rivals.MAIN_CAP,)):
        rows.append(row("nanochat", trial=job.trial, settings=job.settings))
    assert len(rows) == len(rivals.TRIALS["nanochat"]) == len(rivals.TRIALS["nanoGPT"]) == 9
    assert len(rivals.LONG_TRIALS["nanochat"]) == len(rivals.LONG_TRIALS["nanoGPT"])


def test_a_cap_has_settings_of_its_own_only_where_they_gain_more_than_chance() -> None:
    small, wide = {"n_embd": 96}, {"n_embd": 192}
    rows = [row(settings=wide, trial=0), row(settings=small, trial=1, bits_per_byte=2.1)]
    for trial, bits in ((0, 2.3), (1, 2.3 - rivals.MARGIN / 2)):
        rows.append(row(settings=(wide, small)[trial], trial=trial, cap_bytes=300_000, bits_per_byte=bits))
    assert rivals.chosen(rows, "nanoGPT", 300_000, 60.0) == wide
    rows[-1]["bits_per_byte"] = 2.3 - 2 * rivals.MARGIN
    assert rivals.chosen(rows, "nanoGPT", 300_000, 60.0) == small
    assert rivals.chosen(rows, "nanoGPT", rivals.MAIN_CAP, 60.0) == wide
    assert rivals.chosen(rows, "nanochat", 300_000, 60.0) is None
    jobs = rivals.finals(rows, "nanoGPT", "demo", 300.0, (300_000, rivals.MAIN_CAP, 4_000_000))
    assert [(job.settings, job.caps) for job in jobs] == [(small, (300_000,)), (wide, (rivals.MAIN_CAP, 4_000_000))]


def test_longer_trials_begin_with_the_best_settings_of_shorter_ones_and_decide_longer_finals() -> None:
    rows = [row(), row(trial=1, settings={"n_layer": 2}, bits_per_byte=1.9)]
    job = rivals.next_trial(rows, "nanoGPT", "other", 300.0, (rivals.MAIN_CAP,))
    assert job is not None
    assert (job.trial, job.settings) == (0, {"n_layer": 2})
    rows.append(row(budget=300.0, settings=job.settings, bits_per_byte=1.5))
    better = {"n_layer": 2, **rivals.LONG_TRIALS["nanoGPT"][1]}
    rows.append(row(budget=300.0, trial=1, settings=better, bits_per_byte=1.4))
    following = rivals.next_trial(rows, "nanoGPT", "other", 300.0, (rivals.MAIN_CAP,))
    assert following is not None
    assert (following.trial, following.settings) == (2, {**better, **rivals.LONG_TRIALS["nanoGPT"][2]})
    for seconds, settings in ((60.0, {"n_layer": 2}), (299.0, {"n_layer": 2}), (300.0, better), (1800.0, better)):
        (final,) = rivals.finals(rows, "nanoGPT", "demo", seconds, (rivals.MAIN_CAP,))
        assert final.settings == settings


def test_finals_are_never_chosen_by_finals() -> None:
    rows = [row(), row(trial=None, text="demo", settings={"n_embd": 8}, bits_per_byte=0.1)]
    assert rivals.chosen(rows, "nanoGPT", rivals.MAIN_CAP, 60.0) == {}


# Training, packing, scoring


@pytest.mark.long
def test_a_public_model_is_trained_packed_and_read_back(checkout: Path, text: Path, tmp_path: Path) -> None:
    job = rivals.Job("nanoGPT", FAST, str(text), 0.5, 1, (60_000, 20_000))
    facts = rivals.train_job(job, checkout, tmp_path)
    assert facts["seconds"] >= 0.5
    assert facts["tokens"] == 64 * facts["steps"] > 0
    weights = torch.load(tmp_path / "weights.pt")
    assert facts["parameters"] == 1024 * 16 + 2 * 16, "tied weights are counted and stored once"
    assert len(weights) == 3
    found = rivals.judge_job(job, checkout, tmp_path, job.caps)
    for one, cap in zip(found, job.caps, strict=True):
        assert one["file_bytes"] <= cap == one["cap_bytes"]
        assert 0 < one["tilted_bits_per_byte"] != one["bits_per_byte"]
    assert found[0]["bits_per_byte"] < found[1]["bits_per_byte"] + 0.01, "more bytes round less, but for chance"
    untrained = math.log2(1024) / 8 * 4  # bits of a token over bytes, if a token had but two
    assert found[0]["bits_per_byte"] < untrained


@pytest.mark.long
def test_the_file_holds_tokenizer_and_settings(checkout: Path, text: Path, tmp_path: Path) -> None:
    contender = NanoGPT(FAST, checkout)
    corpus = contender.corpus(str(text))
    weights = {name: weight.detach() for name, weight in contender.model(1024).named_parameters()}
    known = contender.calibrate(weights, corpus, SILENT)
    assert {name.replace("/", ".") for name in known} == set(weights)
    packed = contender.pack(weights, known, 60_000, corpus, tmp_path / "file")
    sections = rival_models.container.read(tmp_path / "file").sections
    assert sections["tokenizer"] == corpus.tokenizer().serialize()
    assert json.loads(sections["config"])["n_embd"] == 16
    ids = torch.randint(1024, (2, 32))
    there, here = packed.model(ids, ids == 1), contender.logits(contender.model(1024).model, ids)
    assert there.shape == here.shape
    back = dict(packed.model.named_parameters())
    for name, weight in weights.items():
        assert float((back[name] - weight).norm()) <= 0.2 * float(weight.norm()) + 1e-6, name


@pytest.mark.long
def test_a_model_that_diverges_is_told(checkout: Path, text: Path, tmp_path: Path) -> None:
    contender = NanoGPT({**FAST, "learning_rate": 1e30, "warmup_iters": 0}, checkout)
    corpus = contender.corpus(str(text))
    with pytest.raises(CheckFailed, match="nanoGPT diverged"):
        contender.train(corpus, 20.0, 1, tmp_path, SILENT)


@pytest.mark.long
def test_caddie_goes_through_the_same_door(text: Path, tmp_path: Path) -> None:
    small = {"model.width": 16, "model.embedding.bigrams.buckets": 64, "train.warmup_steps": 0}
    job = rivals.Job("caddie", small, str(text), 0.5, 1, (60_000,), trial=0)
    facts = rivals.train_job(job, None, tmp_path)
    (found,) = rivals.judge_job(job, None, tmp_path, job.caps)
    assert facts["steps"] > 0
    assert found["file_bytes"] <= 60_000
    assert "tilted_bits_per_byte" not in found, "trials are judged without it"


def test_a_training_that_diverges_is_a_row_without_a_score(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(function: Any, *given: Any) -> Any:
        raise CheckFailed("nanoGPT diverged at step 7")

    monkeypatch.setattr(rivals, "apart", apart)
    job = rivals.Job("nanoGPT", {}, "other", 60.0, 1, (300_000, rivals.MAIN_CAP), trial=0)
    rows = rivals.run_job(job, checkout, job.caps)
    assert [(one["cap_bytes"], one["bits_per_byte"]) for one in rows] == [(300_000, None), (rivals.MAIN_CAP, None)]
    assert rows[0]["failed"] == "nanoGPT diverged at step 7"
    assert not job.left(rows), "it is not run again"
    assert rivals.judged(rows, "nanoGPT", rivals.MAIN_CAP) == []
    following = rivals.next_trial(rows, "nanoGPT", "other", 60.0, job.caps)
    assert following is not None
    assert following.settings == rivals.TRIALS["nanoGPT"][1]


@pytest.mark.long
def test_a_file_that_does_not_fit_is_a_row_without_a_score(checkout: Path, text: Path, tmp_path: Path) -> None:
    weights = dict(NanoGPT(FAST, checkout).model(1024).named_parameters())
    torch.save({name: weight.detach() for name, weight in weights.items()}, tmp_path / "weights.pt")
    job = rivals.Job("nanoGPT", FAST, str(text), 1.0, 1, (100,), trial=0)
    (found,) = rivals.judge_job(job, checkout, tmp_path, job.caps)
    assert found["bits_per_byte"] is None
    assert "bytes" in found["failed"]


@pytest.mark.long
def test_a_whole_row_from_processes_of_their_own(checkout: Path, text: Path) -> None:
    job = rivals.Job("nanoGPT", FAST, str(text), 1.0, 2, (60_000,))
    (found,) = rivals.run_job(job, checkout, job.caps)
    assert json.loads(json.dumps(found)) == found
    assert job.made(found)
    assert not job.left([found])
    facts = {
        "steps",
        "tokens",
        "seconds",
        "cpu_share",
        "threads",
        "precision",
        "parameters",
        "load",
        "machine",
        "torch",
    }
    assert facts | {"version", "file_bytes", "held_out_bytes", "tilted_bits_per_byte"} <= set(found)
    assert "nanoGPT, 1 s" in words_of(rival_chart.draw([found], []))


# Schedules


def rate_at(contender: Any, step: int, progress: float, steps: float) -> float:
    group = {"lr": 0.0, "initial_lr": 1.0, "kind": "muon"}
    contender.schedule(SimpleNamespace(param_groups=[group]), step, progress, steps)
    return float(group["lr"])


def nanogpt_rate(iteration: int, warm: int, last: int) -> float:
    """The rate by the formula of its script, of a most of 1 and a least of 0.1."""
    if iteration < warm:
        return (iteration + 1) / (warm + 1)
    return 0.1 + 0.5 * (1.0 + math.cos(math.pi * (iteration - warm) / (last - warm))) * 0.9


def test_nanogpt_s_rate_is_that_of_its_script(checkout: Path) -> None:
    contender = NanoGPT({"learning_rate": 1.0, "warmup_iters": 10}, checkout)
    for iteration in (0, 5, 9, 10, 40, 99, 100):
        found = rate_at(contender, iteration, iteration / 100, 100.0)
        assert found == pytest.approx(nanogpt_rate(iteration, 10, 100)), iteration


def test_nanochat_s_rate_momentum_and_decay_are_those_of_its_script(tmp_path: Path) -> None:
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "gpt.py").touch()
    contender = Nanochat({}, tmp_path)
    contender.decay = 2.0
    group = {"lr": 0.0, "initial_lr": 1.0, "kind": "muon"}
    expected = {
        (0, 0.0): (1 / 40, 0.85, 2.0),
        (200, 0.2): (1.0, 0.91, 1.0 + math.cos(math.pi * 0.2)),
        (500, 0.5): (10 / 13 + 3 / 13 * 0.05, 0.97 * 10 / 13 + 0.9 * 3 / 13, 1.0),
        (1000, 1.0): (0.05, 0.9, 0.0),
    }
    for (step, progress), wanted in expected.items():
        contender.schedule(SimpleNamespace(param_groups=[group]), step, progress, 1000.0)  # type: ignore[arg-type]
        assert (group["lr"], group["momentum"], group["weight_decay"]) == pytest.approx(wanted, abs=1e-9), step


# The command


def arguments(folder: Path, checkout: Path, *more: str) -> list[str]:
    given = ["--contenders", "nanoGPT", "--nanogpt", str(checkout), "--search", "other.jsonl", "--data", "demo.jsonl"]
    return [*given, "--rows", str(folder / "rows.jsonl"), "--seconds", "1", "--search-seconds", "1", *more]


def test_what_is_there_is_not_run_again(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[rivals.Job] = []

    def run_job(job: rivals.Job, path: Path | None, caps: Sequence[int]) -> list[dict[str, Any]]:
        if len(ran) == 4:
            raise KeyboardInterrupt
        ran.append(job)
        facts = {"budget": job.seconds, "text": rivals.text_name(job.source), "steps": 5, "file_bytes": 7}
        same = {"contender": job.contender, "settings": dict(job.settings), "seed": job.seed, "trial": job.trial}
        return [{**same, **facts, "cap_bytes": cap, "bits_per_byte": 2.0 - 0.1 * len(ran)} for cap in caps]

    monkeypatch.setattr(rivals, "run_job", run_job)
    with pytest.raises(KeyboardInterrupt):
        rivals.main(arguments(tmp_path, checkout))
    first = [job.trial for job in ran]
    assert first == [0, 1, 2, 3]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4 * len(rivals.CAPS)
    ran[:] = []
    monkeypatch.setattr(rivals, "TRIALS", {**rivals.TRIALS, "nanoGPT": rivals.TRIALS["nanoGPT"][:6]})
    rivals.main(arguments(tmp_path, checkout))
    assert [job.trial for job in ran] == [4, 5, None]
    assert ran[-1].source == "demo.jsonl"
    ran[:] = []
    rivals.main(arguments(tmp_path, checkout, "--plan"))
    rivals.main(arguments(tmp_path, checkout))
    assert not ran
    assert "0 trials, about 0:00; finals, about 0:00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--nanogpt", "nowhere"), "name a checkout of nanoGPT with --nanogpt"),
        (("--contenders", "nanochat"), "name a checkout of nanochat with --nanochat"),
        (("--rows", "rows.txt"), "does not hold rows"),
    ],
)
def test_mistakes_are_told_in_a_line(
    more: tuple[str, ...], message: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.txt").write_text('{"a": 1}\n')
    with pytest.raises(UserError, match=message):
        rivals.main(arguments(tmp_path, checkout, *more))


@pytest.mark.parametrize("more", [("--seconds", "0"), ("--caps", "0"), ("--data", "elsewhere/other.jsonl")])
def test_arguments_that_mean_nothing(more: tuple[str, ...], checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        rivals.parsed(arguments(tmp_path, checkout, *more))


def test_a_setting_that_is_not_there(checkout: Path) -> None:
    with pytest.raises(UserError, match="nanoGPT has no setting n_layers"):
        NanoGPT({"n_layers": 2}, checkout)


def test_every_trial_is_of_settings_that_are_there(checkout: Path) -> None:
    for trials in (rivals.TRIALS, rivals.LONG_TRIALS):
        for change in trials["nanoGPT"]:
            NanoGPT(change, checkout)
        for change in trials["caddie"]:
            CONTENDERS["caddie"](change)
        assert all(change.keys() <= Nanochat.defaults.keys() for change in trials["nanochat"])


# The picture


def final(contender: str, budget: float, cap: int, bits: float, **more: Any) -> dict[str, Any]:
    seconds = {"seconds": budget, "file_bytes": cap - 100, "held_out_bytes": 420_229}
    return row(contender, budget=budget, cap_bytes=cap, bits_per_byte=bits, trial=None, **seconds, **more)


def test_the_picture_has_what_has_rows() -> None:
    compressors = rival_chart.newest("compressors")
    bare = rival_chart.draw([], compressors)
    assert "PPMd" in bare
    assert "seconds" not in words_of(bare)[0:3]
    assert not any("caddie" in text for text in words_of(bare))
    rows = [
        final("caddie", budget, cap, 1.3, tilted_bits_per_byte=1.2) for budget in (60.0, 300.0) for cap in rivals.CAPS
    ]
    rows += [final("nanoGPT", 60.0, cap, 1.7) for cap in rivals.CAPS]
    rows += [{**final("nanochat", 60.0, 1_000_000, 0.1), "held_out_bytes": 5}, row("nanochat")]
    drawn = rival_chart.draw(rows, compressors)
    shown = words_of(drawn)
    assert {"caddie, 1 min", "caddie, 5 min", "nanoGPT, 1 min", "caddie", "nanoGPT"} <= set(shown)
    assert not any("nanochat" in text for text in shown), "of another text, or of a trial"
    assert "dashed: learning from the text as it is scored (n-gram tilt)" in shown


def words_of(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")]


def test_labels_keep_apart() -> None:
    curve = rival_chart.Curve("x", "caddie", [(1.0, 1.0)])
    heights = [y for y, _ in rival_chart._apart([(y, curve) for y in (100.0, 101.0, 103.0, 370.0, 371.0)])]
    assert all(lower - upper >= 13.9 for upper, lower in pairwise(heights))
    assert heights[-1] <= rival_chart.BOTTOM


def test_seeds_are_averaged() -> None:
    rows = [final("nanoGPT", 60.0, 1_000_000, bits, seed=seed) for seed, bits in ((1, 1.6), (2, 1.8))]
    assert rival_chart.joined(rows, "seconds", "bits_per_byte") == [(60.0, pytest.approx(1.7))]
