"""Submission folders made of runs: what stands in them, and the runs that they are not made of."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
from scipy.stats import ttest_ind

from caddie.errors import UserError
from caddie.pack import container
from caddie.pack.artifact import load
from caddie.pack.codecs import Codec
from caddie.pack.container import Section
from caddie.recipes.catalog import find
from caddie.run.policy import apply_policies
from caddie.score import KINDS
from caddie.submit import recheck
from caddie.submit import runs as submitted
from caddie.submit import submit as module
from caddie.submit.against import compare_with
from caddie.submit.contest_log import after_training
from caddie.submit.logs import parse_log
from caddie.submit.readme import _settings
from caddie.submit.submit import submit
from caddie.verify import Verdict

Call = Callable[..., Any]
NAMES = ("--author", "Ada", "--github-id", "ada", "--quiet")
SCORES = {1337: None, 42: 5.25, 7: 5.5}
"""Seed to bits per byte; the first is the run's own."""
CONTEST_TEXT = {
    "documents": {"train": 8_000_000, "validation": 50_000},
    "source_bytes": {"train": 10**10, "validation": 151_080_645},
    "tokens": {"train": 10**10, "validation": 62_021_846},
}


@pytest.fixture
def runs(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three folders of one run, said to be of three seeds; the script is of the right length, and is nothing else."""
    source = tiny_run.printed["source"]
    code_bytes = source["needed_bytes"] + source["training_bytes"]
    monkeypatch.setattr(module, "script", lambda recipe: b"#" * code_bytes)
    monkeypatch.setattr(submitted, "describe_source", lambda recipe: source)
    monkeypatch.setattr(module, "source_needed", lambda roots: SimpleNamespace(libraries=("numpy", "torch", "triton")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recheck, "score_in_new_process", stated)
    monkeypatch.setattr(recheck, "verify", lambda *given, **named: Verdict(checks=()))
    for seed, score in SCORES.items():
        folder = Path(f"run{seed}")
        shutil.copytree(tiny_run.folder, folder)
        if score:
            reseed(folder, seed)
            rescore(folder, score)
    return [Path(f"run{seed}") for seed in SCORES]


def stated(artifact: Path, *others: object) -> dict[str, Any]:
    """Return the scores that the result beside an artifact states, in place of scoring it again."""
    result = json.loads((artifact.parent / "result.json").read_text())
    kinds = {kind: result["scores"][f"quantized_{kind}"] for kind in KINDS if kind != "user"}
    return {"bits_per_byte": result["bits_per_byte"], **kinds}


def reseed(folder: Path, seed: int) -> None:
    """Write another seed into the artifact of a run, and all that follows into its result."""
    path = folder / "artifact.caddie"
    contents = container.read(path)
    about = json.loads(contents.sections["manifest"]) | {"seed": seed}
    sections = contents.sections | {"manifest": json.dumps(about).encode()}
    kept = [Section(one.name, sections[one.name], Codec.from_json(one.codec)) for one in contents.entries]
    container.write(path, kept)
    artifact = load(path)
    ledger = {"file_bytes": artifact.file_bytes, "parts": artifact.ledger}
    edit(folder, {"seed": seed, "sha256.artifact": artifact.sha256, "ledger": ledger})
    edit(folder, {"artifact_bytes": artifact.file_bytes})


def rescore(folder: Path, bits: float) -> None:
    """Write another score of a run's artifact into its result."""
    score = json.loads((folder / "result.json").read_text())["scores"]["quantized_sliding"]
    nats = bits * math.log(2) * score["source_bytes"]
    rates = {"nats": nats, "nats_per_token": nats / score["tokens"], "nats_per_byte": nats / score["source_bytes"]}
    edit(folder, {f"scores.quantized_sliding.{name}": value for name, value in rates.items()})
    edit(folder, {"scores.quantized_sliding.bits_per_byte": bits, "bits_per_byte": bits})


def lose_text(folder: Path) -> None:
    """Let a run's text be on another machine."""
    about = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(about | {"corpus": "gone"}))


def counted(result: dict[str, Any]) -> int:
    """Bytes of the file without its tokenizer."""
    return int(result["artifact_bytes"] - result["ledger"]["parts"]["tokenizer"])


def edit(folder: Path, changes: dict[str, Any]) -> None:
    """Change a run's result at dotted paths; None removes a field. The policies follow, unless they are changed."""
    result = json.loads((folder / "result.json").read_text())
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = result
        for name in parents:
            place = place[int(name) if name.isdigit() else name]
        if value is None:
            del place[last]
        else:
            place[last] = value
    if not any(path.startswith("policies") for path in changes):
        result["policies"] = apply_policies(result)
    (folder / "result.json").write_text(json.dumps(result))


def test_a_folder_holds_what_the_contest_takes(runs: list[Path], tiny_run: Any, caddie: Call) -> None:
    ended = caddie("submit", *runs, "--out", "new/submission", *NAMES[:-1], "--name", "Small | tall", "--json")
    doing = [f"{what} run{seed}/artifact.caddie again" for seed in (7, 42, 1337) for what in ("scoring", "verifying")]
    assert (ended.status, ended.err.splitlines()) == (0, ["submit", *doing]), "it shows what it does"
    out, printed = Path("new/submission"), tiny_run.printed
    logs = {f"train_seed{seed}.log" for seed in SCORES}
    assert {path.name for path in out.iterdir()} == {
        "README.md", "submission.json", "requirements.txt", "train_gpt.py", *logs
    }  # fmt: skip
    facts = json.loads((out / "submission.json").read_text())
    assert json.loads(ended.out) == {"folder": str(out), **facts}
    bits = [printed["bits_per_byte"], 5.25, 5.5]
    assert (facts["author"], facts["github_id"], facts["name"]) == ("Ada", "ada", "Small | tall")
    assert facts["seeds"] == [7, 42, 1337]
    assert facts["val_bpb"] == pytest.approx(fmean(bits), abs=1e-8)
    assert facts["val_bpb_std"] == pytest.approx(stdev(bits), abs=1e-8)
    code_bytes = (out / "train_gpt.py").stat().st_size
    assert facts["bytes_code"] == code_bytes
    results = [json.loads((run / "result.json").read_text()) for run in runs]  # their seeds may differ in bytes
    assert facts["bytes_total"] == code_bytes + max(map(counted, results))
    policy = printed["policies"][0]
    assert policy["name"] == "contest-2026"
    assert policy["bytes"] == code_bytes + counted(printed), "the ledger's code"
    assert facts["track"] == "non-record-unlimited-compute-16mb"
    assert facts["compliance"]["three_seeds"]
    assert not facts["compliance"]["contest_validation_set"]
    assert set(facts["seed_results"]) == {"7", "42", "1337"}
    assert facts["seed_results"]["42"]["val_bpb"] == 5.25
    assert re.fullmatch(r"numpy==[\d.]+\ntorch==[\d.]+\n", (out / "requirements.txt").read_text())
    page = (out / "README.md").read_text()
    for said in (f"{facts['val_bpb']:.5f}", "5.25000000", "sample", f"{code_bytes:,}", "not the contest's"):
        assert said in page
    assert "    DATA_PATH=DIR SEED=7 python train_gpt.py\n" in page, "as the runs were: one process on a CPU"
    assert " `RawBytes` |" in page
    assert f"| `train.steps` | `20000` | `{printed['training']['steps']}` |" in page


def test_a_log_has_the_lines_that_reviewers_look_for(runs: list[Path], tiny_run: Any) -> None:
    submit(runs[:1], Path("out"), author="Ada", github_id="ada")
    lines, printed = Path("out/train_seed1337.log").read_text().splitlines(), tiny_run.printed
    artifact, score = counted(printed), printed["scores"]["quantized_sliding"]
    code_bytes = Path("out/train_gpt.py").stat().st_size
    for line in (
        "seed:1337",
        "world_size:1",
        "train_shards:1",
        f"val_tokens:{score['tokens']}",
        f"model_params:{printed['training']['parameters']}",
        f"Serialized model caddie: {artifact} bytes",
        f"Code size: {code_bytes} bytes",
        f"Total submission size caddie: {artifact + code_bytes} bytes",
        f"total_eval_time:{printed['evaluation']['score']:.1f}s",
    ):
        assert line in lines
    steps = [line for line in lines if line.startswith("step:")]
    assert len(steps) == 2
    assert re.fullmatch(r"step:2/2 train_loss:\d\.\d{4} train_time:\d+ms step_avg:\d+\.\d\dms", steps[-1])
    assert not any(line.startswith("stopping_early") for line in lines), "the steps were over, not the time"
    final = f"val_loss:{score['nats_per_token']:.8f} val_bpb:{score['bits_per_byte']:.8f}"
    assert f"final_caddie_roundtrip_exact {final}" == [line for line in lines if "val_bpb" in line][-1]
    facts = json.loads(Path("out/submission.json").read_text())
    assert "val_bpb_std" not in facts, "one seed has none"
    assert f"val_bpb:{facts['val_bpb']:.8f}" in final


def test_the_review_reads_what_the_log_says(runs: list[Path], tiny_run: Any) -> None:
    facts, printed = submit(runs[:1], Path("out"), author="Ada", github_id="ada"), tiny_run.printed
    log = parse_log("train.log", Path("out/train_seed1337.log").read_text())
    seed, score = facts["seed_results"]["1337"], printed["scores"]["quantized_sliding"]
    read = {name: fact.value for name, fact in log.facts.items()}
    assert 0 < read.pop("step_ms") <= 1000 * printed["seconds"]["train"] + 1
    assert read.pop("calibration_ms") == round(1000 * printed["seconds"]["calibrate"])
    assert read == {
        "seed": 1337,
        "training_shards": 1,
        "validation_tokens": score["tokens"],
        "model_bytes": seed["model_bytes"],
        "code_bytes": facts["bytes_code"],
        "total_bytes": facts["bytes_total"],
        "evaluation_s": round(printed["evaluation"]["score"], 1),
    }
    assert [str(one.bits) for one in log.final[-1:]] == [f"{score['bits_per_byte']:.8f}"]
    assert {one.name for one in log.scores if one.live} == {
        one.name for one in log.scores if one.name.startswith("diagnostic pre-quantization")
    }
    assert sorted(log.losses) == [1, 2]


def test_a_run_that_the_clock_ended_says_so() -> None:
    result = {"training": {"steps": 90, "peak_bytes": None}, "seconds": {"train": 60.0004}, "scores": {}}
    line = "stopping_early: wallclock_cap train_time: 60000ms step: 90/"
    assert after_training(result, 20_000) == [f"{line}20000"]
    assert after_training(result, None) == [f"{line}90"]
    assert after_training(result, 90) == []


def test_what_is_not_known_is_left_out(runs: list[Path]) -> None:
    lose_text(runs[0])
    submit(runs[:1], Path("out"), author="Ada", github_id="ada")
    assert "train_shards" not in Path("out/train_seed1337.log").read_text()


@pytest.mark.long
def test_p_against_another_submission_is_that_of_welch(runs: list[Path], caddie: Call) -> None:
    for folder, score in zip(runs, (5.0, 5.1, 5.3), strict=True):
        rescore(folder, score)
    submit(runs, Path("worse"), author="Ada", github_id="ada")
    for folder, score in zip(runs, (4.0, 4.5, 4.1), strict=True):
        rescore(folder, score)
    for against in ("worse", "worse/submission.json"):
        ended = caddie("submit", *runs, "--out", Path("better") / against[-4:], "--against", against, *NAMES, "--json")
        facts = json.loads(ended.out)
        expected = ttest_ind([4.0, 4.5, 4.1], [5.0, 5.1, 5.3], equal_var=False, alternative="less").pvalue
        assert facts["p_value"] == pytest.approx(expected)
        assert sorted(facts["comparison_baseline_scores"]) == [5.0, 5.1, 5.3]
    assert f"p = {expected:.3g}" in Path("better/orse/README.md").read_text()
    alone = submit(runs[:1], Path("alone"), author="Ada", github_id="ada", against="worse")
    assert "p_value" not in alone
    assert "no p-value" in Path("alone/README.md").read_text()


def test_a_record_on_the_contest_machine_is_held_against_a_published_one(runs: list[Path], caddie: Call) -> None:
    train = json.loads((runs[0] / "result.json").read_text())["seconds"]["train"]
    record: dict[str, Any] = {"world": 8, "device": "NVIDIA H100 80GB HBM3", "seconds.calibrate": 599.9 - train}
    record |= {f"corpus.{name}": value for name, value in CONTEST_TEXT.items()}
    record["scores.quantized_sliding.source_bytes"] = CONTEST_TEXT["source_bytes"]["validation"]
    for folder, score in zip(runs, (1.01, 1.02, 1.015), strict=True):
        edit(folder, record)
        rescore(folder, score)
        lose_text(folder)
    facts = submit(runs, Path("out"), author="Ada", github_id="ada", against="best_record")
    assert facts["track"] == "10min_16mb"
    assert facts["hardware"] == "8xNVIDIA H100 80GB HBM3"
    theirs = [figure.bits_per_byte for figure in find("best_record").public][:3]
    assert facts["p_value"] == pytest.approx(
        ttest_ind([1.01, 1.02, 1.015], theirs, equal_var=False, alternative="less").pvalue
    )
    assert facts["delta_bpb"] == pytest.approx(1.015 - fmean(theirs))
    assert "By its totals this is the contest's validation set, tokenized by" in Path("out/README.md").read_text() or (
        "under another tokenizer" in Path("out/README.md").read_text()
    )
    step = train / json.loads((runs[1] / "result.json").read_text())["training"]["steps"]
    edit(runs[1], {"seconds.calibrate": 600 + 1.9 * step - train})
    assert submit(runs, Path("at the end of a step"), author="Ada", github_id="ada")["compliance"]["train_under_600s"]
    edit(runs[1], {"seconds.calibrate": 601.1 - train})
    ended = caddie("submit", *runs, "--out", "late", *NAMES)
    assert ended.status == 2
    assert "run42: training took 601.1 s of 600; --non-record has no limit of time" in ended.err
    slow = submit(runs, Path("slow"), author="Ada", github_id="ada", non_record=True)
    assert (slow["track"], slow["compliance"]["train_under_600s"]) == ("non-record-unlimited-compute-16mb", False)
    edit(runs[1], {"seconds.calibrate": 600.0 - train, "corpus.documents.validation": 10_000})
    with pytest.raises(UserError, match="run42 was scored on another text than the contest's validation set"):
        submit(runs, Path("other"), author="Ada", github_id="ada")


def test_an_unprobed_run_says_so(runs: list[Path]) -> None:
    unprobed = {"verified": None, "not_verified_because": "namespaces are refused"}
    result = json.loads((runs[0] / "result.json").read_text()) | unprobed
    (runs[0] / "result.json").write_text(json.dumps(result))
    facts = submit(runs, Path("out"), author="Ada", github_id="ada")
    assert facts["compliance"]["verified"] is None
    assert (
        "Verified by caddie's probes: seeds 7, 42. Not probed, for want of a sandbox: seeds 1337."
        in Path("out/README.md").read_text()
    )


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (None, "It has no base; `train_gpt.py` holds every setting."),
        ("mine", "It has the base `mine`; `train_gpt.py` holds every setting."),
        ("baseline_mini", "Changes to `baseline_mini`; `train_gpt.py` holds every setting."),
    ],
)
def test_any_base_is_named(base: str | None, said: str, runs: list[Path]) -> None:
    run = submitted.read_submitted(runs[0])
    object.__setattr__(run, "recipe", run.recipe.but(base=base))
    assert said in _settings(run)


def test_a_change_shows_what_the_base_has() -> None:
    """Show the base's value where the rounding is of another class with a setting at the same path."""
    (table,) = _settings(SimpleNamespace(recipe=find("three_phases")))[1:]  # type: ignore[arg-type]
    assert "| `pack.quantizers.embedding.of.bits` | `8` | `7` |" in table


def damage(name: str, text: str | None) -> Callable[[Path], None]:
    """Write another text to a file of a run, or remove it."""
    return lambda folder: (folder / name).unlink() if text is None else (folder / name).write_text(text) and None


def change(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, {name.replace("__", "."): value for name, value in fields.items()})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (damage("result.json", None), "run42 holds no result.json, so it is no finished run"),
        (damage("result.json", "{"), "is not JSON"),
        (damage("recipe.json", "[]"), "recipe.json is missing or damaged"),
        (damage("recipe.json", '{"recipe": {"kind": "Recipe"}}'), "recipe.json is not the recipe of run42"),
        (damage("recipe.json", '{"recipe": {"kind": "Recipe", "model": {"kind": "Mine"}}}'), "Mine"),
        (damage("artifact.caddie", "x"), "artifact.caddie is not the file that run42/result.json scored"),
        (damage("log.jsonl", ""), "log.jsonl holds no steps"),
        (damage("log.jsonl", '{"event": "step", "step": 1}\n'), "log.jsonl does not tell the end of training"),
        (change(verified=False), "run42 did not pass verification"),
        (change(policies=None), "states policies.0.name as none; by its other fields it is contest-2026"),
        (change(evaluation=None), "lacks what a submission needs (KeyError: 'evaluation')"),
        (change(ledger__parts__weights=16_000_000), "over 16,000,000; lower cap=N"),
        (change(source__script_sha256="0" * 64), "run42 was run by another version of caddie"),
        (change(source__script_sha256=None), "run42 was run by another version of caddie"),
        (change(source__training_bytes=1), "run42 was run by another version of caddie"),
        (change(sha256__recipe="0" * 64), "different settings"),
        (change(sha256__validation_documents="0" * 64), "different held-out texts"),
        (change(seed=1337), "seed 1337 stands 2 times"),
        (change(bits_per_byte=math.nan), "holds no score"),
    ],
)
def test_a_run_that_cannot_be_submitted_is_refused_in_one_line(
    wrong: Callable[[Path], None], said: str, runs: list[Path], caddie: Call
) -> None:
    wrong(runs[1])
    ended = caddie("submit", *runs[:2], "--out", "out", *NAMES)
    assert ended.status == 2
    assert ended.err.count("\n") == 1
    assert said in ended.err
    assert not list(Path().glob("*out*")), "nothing is written"


@pytest.mark.parametrize(
    ("against", "said"),
    [
        ("best_rekord", "did you mean best_record"),
        ("tiny", "tiny has no scores to compare with"),
        ("baseline", "the runs were scored on another text than baseline"),
        ("gone.json", "gone.json: cannot be read (No such file or directory)"),
        ("other.json", "the runs were scored on another text than other.json"),
        ("list.json", "list.json: cannot be read"),
    ],
)
def test_a_record_that_does_not_compare_is_refused(against: str, said: str, runs: list[Path], caddie: Call) -> None:
    Path("other.json").write_text('{"val_bpb": 1.1, "sha256": {"validation_documents": "another"}}')
    Path("list.json").write_text("[]")
    ended = caddie("submit", *runs, "--out", "out", "--against", against, *NAMES)
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert said in ended.err
    assert not Path("out").exists()


def test_scores_on_another_set_do_not_compare(tmp_path: Path) -> None:
    """A source on the earlier export is passed over, and a submission on a text of its own is refused."""
    result = {"bits_per_byte": 1.2, "sha256": {"validation_documents": "x"}}
    runs: Any = [SimpleNamespace(on_contest_text=True, result=result)]
    assert compare_with("baseline", runs).scores == [1.22739739]
    own = tmp_path / "own.json"
    own.write_text('{"val_bpb": 1.1, "compliance": {"contest_validation_set": false}}')
    with pytest.raises(UserError, match="scored on another text"):
        compare_with(str(own), runs)


@pytest.mark.parametrize(
    "scores",
    [
        {"val_bpb": 1.3, "seeds": {"0": {"val_bpb": 1.2}, "42": {"val_bpb": 1.4}}},
        {"mean_val_bpb": 1.3, "seeds": [42, 0], "seed_scores": [1.2, 1.4]},
    ],
)
def test_scores_of_seeds_count_in_every_spelling_of_merged_records(scores: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "submission.json").write_text(json.dumps(scores | {"p_value": math.nan}))
    results = ({"bits_per_byte": bits, "sha256": {"validation_documents": "x"}} for bits in (1.1, 1.0))
    runs: Any = [SimpleNamespace(on_contest_text=True, result=result) for result in results]
    base = compare_with(str(tmp_path), runs)
    assert base.scores == [1.2, 1.4]
    assert base.p == pytest.approx(ttest_ind([1.1, 1.0], [1.2, 1.4], equal_var=False, alternative="less").pvalue)


def test_a_file_with_its_source_is_refused(runs: list[Path]) -> None:
    run = submitted.read_submitted(runs[0])
    object.__setattr__(run, "recipe", run.recipe.but({"pack.carry_source": True}))
    with pytest.raises(UserError, match=r"set pack\.carry_source=false"):
        submitted.check_run(run, submitted.NON_RECORD, 0)


@pytest.mark.parametrize("name", ["Ada Lovelace", "@ada", "", "ada-", "a" * 40, "a" + "-b" * 20])
def test_a_name_that_is_none_on_github_is_refused(name: str, runs: list[Path], caddie: Call) -> None:
    ended = caddie("submit", *runs, "--out", "out", "--author", "Ada", "--github-id", name)
    assert ended.status == 2
    assert ended.err.endswith(f"caddie: --github-id takes a name on GitHub, such as octocat, not {name!r}\n")
    assert not Path("out").exists()


def test_a_folder_is_written_whole_or_not_at_all(
    runs: list[Path], caddie: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("out").mkdir()
    ended = caddie("submit", *runs, "--out", "out", *NAMES)
    assert (ended.status, ended.err) == (2, "caddie: out exists; name a new folder with --out\n")
    ended = caddie("submit", *runs, "--out", runs[0] / "result.json" / "out", *NAMES)
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    before, written = set(Path().rglob("*")), Path.write_text

    def full(path: Path, text: str, **how: Any) -> int:
        if path.name == "train_gpt.py":
            raise OSError(28, "No space left on device")
        return written(path, text, **how)

    monkeypatch.setattr(Path, "write_text", full)
    ended = caddie("submit", *runs, "--out", "full", *NAMES)
    assert (ended.status, ended.err) == (
        2,
        "caddie: full: cannot be written (No space left on device); name another folder\n",
    )
    assert set(Path().rglob("*")) == before
