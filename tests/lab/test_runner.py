"""The driver of studies: nothing is lost, nothing runs twice, whatever ends it."""

import errno
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from filelock import FileLock
from processes import together
from recording import RecordedProgress
from run_folder import make_result
from tiny_study import SETTINGS, write_text
from torch.distributed import DistBackendError

from caddie.config.userfile import user_files
from caddie.data.corpus import Corpus
from caddie.errors import CheckFailed, UserError
from caddie.files import write_json
from caddie.lab import executors
from caddie.lab import job as trial
from caddie.lab.background import read_state
from caddie.lab.executors import Local, why_it_died
from caddie.lab.holdout import score_holdout
from caddie.lab.report import write_study_report
from caddie.lab.rows import EARLIER, RESULTS, Row, curve, read_rows, write_rows
from caddie.lab.runner import ATTEMPTS, plan, run_study
from caddie.lab.study import Entry, Steps, Study
from caddie.pack.quantize import Float16
from caddie.recipes.catalog import find
from caddie.recipes.recipe import Recipe
from caddie.report.read import read_steps
from caddie.report.run_files import CHECKPOINT, ERROR, JOB, LOG, OUTPUT, RECIPE, STOP
from caddie.report.tables import duration
from caddie.run.result import processor_name
from caddie.run.run_folder import Pruned, write_error
from caddie.runtime.distributed import Ranks
from caddie.runtime.progress import SILENT, Progress


@pytest.fixture
def text(tmp_path: Path) -> str:
    return str(write_text(tmp_path))


def study(**settings: object) -> Study:
    entries = {
        "low rate": Entry(diff={"train.optimizers.matrix.lr": 0.01}),
        "halves": Entry(diff={"pack.quantizers.matrix": Float16()}, kind="quantization"),
    }
    base = find("baseline_mini").but(SETTINGS)
    given = {"name": "tiny", "base": base, "entries": entries, "seeds": (1, 2), "budget": Steps(steps=3), **settings}
    return Study(**given)  # type: ignore[arg-type]


def run_jobs(study: Study, text: str, *, results: Path, progress: Progress = SILENT, **how: Any) -> Sequence[Row]:
    """Run a study and return its rows."""
    return run_study(study, text, folder=results, progress=progress, **how).rows


def texts(corpus: Path) -> dict[str, str]:
    """Return the hashes of a corpus as a result has them."""
    found = Corpus.load(corpus).manifest
    sets = {f"{name}_documents": getattr(found, name).document_set_sha256 for name in ("train", "validation")}
    return {**sets, "tokenizer": found.tokenizer.sha256}


@dataclass
class Pretended:
    """Does jobs by writing made-up results; `ends` says what becomes of a label the first time it is tried."""

    ends: dict[str, str] = field(default_factory=dict)
    done: list[tuple[str, int]] = field(default_factory=list)
    jobs: list[list[str]] = field(default_factory=list)
    stop_after: int = 10**6
    workers: int = 1
    cpu_share: float = 1.0

    def run(self, jobs: Sequence[Path]) -> Iterator[tuple[Path, str | None]]:
        for job in jobs:
            told = json.loads(job.read_text())
            self.jobs.append([one["label"] for one in told["runs"]])
            reason = None
            for one in told["runs"]:
                folder = Path(one["folder"])
                if (folder / "result.json").exists() or (folder / "error.json").exists():
                    continue
                end = self.ends.pop(one["label"], "well")
                if end == "well":
                    self.done.append((one["label"], told["seed"]))
                    result = make_result() | {"study": {**told["study"], "label": one["label"]}}
                    result["training"] |= {"threads": 2, "cpu_share": self.cpu_share}
                    result["source"] = {**(result.get("source") or {}), "sha256": "0" * 64}
                    result["sha256"] |= texts(Path(told["corpus"]))
                    (folder / "log.jsonl").touch()
                    (folder / "checkpoint.safetensors").touch()
                    write_json(folder / "result.json", result)
                elif end == "fails":
                    write_error(folder, "a reason\nof two lines")
                    break
                elif end == "fills the disk":
                    write_error(folder, f"checkpoint.safetensors: {os.strerror(errno.ENOSPC)}")
                    break
                elif end == "dies":
                    reason = "its process was ended by signal 9"
                    break
                else:
                    break  # asked to stop
                if len(self.done) == self.stop_after:
                    raise KeyboardInterrupt
            yield job, reason


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.chdir(tmp_path)
    return {"results": tmp_path / "results", "runs": tmp_path / "runs"}


ALL = [(label, seed) for label in ("base", "low rate", "halves") for seed in (1, 2)]


def test_a_full_disk_ends_the_study_and_fails_no_run(text: str, folders: dict[str, Path]) -> None:
    executor = Pretended({"low rate": "fills the disk"})
    with pytest.raises(UserError, match=r"low rate, seed 1: .*No space left on device; free disk space and give the"):
        run_jobs(study(), text, executor=executor, **folders)
    rows = run_jobs(study(), text, executor=executor, **folders)
    assert [(row["label"], row["seed"], row["state"]) for row in rows] == [(*one, "finished") for one in ALL]
    assert len(executor.done) == len(ALL), "what was finished is not run again"


def test_every_run_once_and_those_of_one_training_together(text: str, folders: dict[str, Path]) -> None:
    executor, progress = Pretended(), RecordedProgress()
    rows = run_jobs(study(), text, executor=executor, progress=progress, **folders)
    assert [(row["label"], row["seed"]) for row in rows] == ALL
    assert executor.jobs == [["base", "halves"], ["low rate"]] * 2, "seeds last"
    assert {event["event"] for event in progress.events} == {"runs"}
    assert progress.events[0] == {"event": "runs", "done": 0, "total": 6, "text": "done so far"}, (
        "before the first ends"
    )
    last = progress.events[-1]
    assert (last["done"], last["total"]) == (6, 6)
    assert last["text"].endswith(" bpb")
    assert read_rows(folders["results"] / RESULTS) == rows
    again = Pretended()
    assert run_jobs(study(), text, executor=again, **folders) == rows
    assert again.jobs == []


STEP = {"event": "step", "step": 1, "loss": 2.0, "bits_per_byte": 1.0, "seconds": 1.0, "tokens": 9}


class Ticking(Pretended):
    """Ticks while the first run of each job trains, and once more when that run alone is over."""

    def run(self, jobs: Sequence[Path]) -> Iterator[Any]:
        yield None
        for job in jobs:
            told = json.loads(job.read_text())
            folder = Path(told["runs"][0]["folder"])
            (folder / "log.jsonl").write_text(json.dumps({**STEP, "progress": 0.25}) + "\n")
            yield None
            result = make_result() | {"study": {**told["study"], "label": told["runs"][0]["label"]}}
            write_json(folder / "result.json", result)
            yield None
            yield from super().run([job])


def test_what_runs_do_is_shown_and_a_row_is_kept_as_soon_as_its_run_ends(text: str, folders: dict[str, Path]) -> None:
    kept: list[int] = []

    class Watching(RecordedProgress):
        def step(self, event: Mapping[str, Any]) -> None:
            super().step(event)
            kept.append(len(read_rows(folders["results"] / RESULTS)))

    progress = Watching()
    rows = run_jobs(study(seeds=(1,)), text, executor=Ticking(), progress=progress, **folders)
    assert len(rows) == 3
    shown = [(event["event"], event["text"], before) for event, before in zip(progress.events, kept, strict=True)]
    assert shown[:3] == [
        ("runs", "done so far", 0),
        ("running", "0 of 3 runs  base, seed 1: 25% trained, loss 2.0000  1.0000 bpb", 0),
        ("runs", shown[2][1], 1),
    ]
    later = next(text for event, text, _ in shown[2:] if event == "running")
    assert re.fullmatch(r"2 of 3 runs  low rate, seed 1: 25% trained, loss 2\.0000  1\.0000 bpb  \d.* left", later)
    assert shown[2][1].startswith("base, seed 1  1.")
    assert [event["progress"] for event in progress.events if event["event"] == "running"] == pytest.approx(
        [1 / 12, 3 / 4]
    )


def test_the_log_of_a_finished_run_is_not_read_again_for_every_run_that_ends(
    text: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Counter[tuple[str, str]]()

    def counted(path: Path) -> Any:
        read[path.parent.name, path.name] += 1
        return read_steps(path)

    monkeypatch.setattr("caddie.lab.rows.read_steps", counted)
    run_jobs(study(), text, executor=Pretended(), **folders)
    assert len(read) == 6
    assert max(read.values()) == 2, "once to show its end, once for its row"


def test_a_log_of_an_earlier_start_is_not_shown(text: str, folders: dict[str, Path]) -> None:
    class Waiting(Pretended):
        def run(self, jobs: Sequence[Path]) -> Iterator[Any]:
            for job in jobs:
                (job.parent / "log.jsonl").write_text(json.dumps({**STEP, "progress": 0.5}) + "\n")
                os.utime(job.parent / "log.jsonl", (1e9, 1e9))
            yield None
            yield from super().run(jobs)

    progress = RecordedProgress()
    run_jobs(study(seeds=(1,)), text, executor=Waiting(), progress=progress, **folders)
    assert {event["event"] for event in progress.events} == {"runs"}


def test_runs_from_before_a_setting_came_are_kept(text: str, folders: dict[str, Path]) -> None:
    """Their recipes lack it, so their keys are others; with its default they are the same runs."""
    rows = run_jobs(study(), text, executor=Pretended(), **folders)
    for task in list(folders["runs"].glob("*/*/task.json")):
        about = json.loads(task.read_text())
        (job,) = [job for job in folders["runs"].glob("*/*/job.json") if f'"{task.parent}"' in job.read_text()]
        told = json.loads(job.read_text())
        (recipe,) = [run["recipe"] for run in told["runs"] if run["folder"] == str(task.parent)]
        del recipe["model"]["head"]
        write_json(task.parent / "recipe.json", {"recipe": recipe, "seed": about["seed"], "corpus": told["corpus"]})
        write_json(task, about | {"key": "0" * 32})
    for folder in list(folders["runs"].glob("tiny/*")):
        if folder.is_dir():
            folder.rename(folder.with_name(f"old-{folder.name}"))
    again = Pretended()
    kept = run_jobs(study(), text, executor=again, **folders)
    assert again.jobs == []
    assert [row["bits_per_byte"] for row in kept] == [row["bits_per_byte"] for row in rows]


def test_a_result_counts_for_the_text_that_it_was_made_of(text: str, folders: dict[str, Path]) -> None:
    one = study(entries={}, seeds=(1,))
    (first,) = plan(one, text, folders["runs"])
    list(Pretended().run([trial.write_job([first], {"study": "tiny"})]))
    write_json(first.folder / RECIPE, {"recipe": first.recipe.to_json(), "seed": 1, "corpus": str(first.corpus)})
    with open(text, "a") as file:
        file.write(json.dumps({"text": "One more document, long enough to matter."}) + "\n")
    (other,) = plan(one, text, folders["runs"])
    shutil.rmtree(first.corpus)
    other.corpus.rename(first.corpus)  # another text at the old place
    (again,) = plan(one, text, folders["runs"])
    assert first.key != again.key
    assert not again.over


def test_a_study_that_was_stopped_goes_on(text: str, folders: dict[str, Path]) -> None:
    first, second = Pretended(stop_after=3), Pretended()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(study(), text, executor=first, **folders)
    run_jobs(study(), text, executor=second, **folders)
    assert sorted(first.done + second.done) == sorted(ALL)


def test_a_study_goes_on_from_its_rows_where_the_folders_are_gone(text: str, folders: dict[str, Path]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_jobs(study(), text, executor=Pretended(stop_after=3), **folders)
    before = read_rows(folders["results"] / RESULTS)
    assert before
    shutil.rmtree(folders["runs"])
    second, progress = Pretended(), RecordedProgress()
    rows = run_jobs(study(), text, executor=second, progress=progress, **folders)
    assert sorted([(row["label"], row["seed"]) for row in before] + second.done) == sorted(ALL)
    assert [row for row in rows if row["key"] in {one["key"] for one in before}] == before
    assert any(f"{len(before)} runs finished elsewhere" in note for note in progress.notes)
    run = plan(study(), text, folders["runs"], results=folders["results"])[0]
    write_error(run.folder, "it was tried again for other results")
    again = run_jobs(study(why="another question"), text, executor=Pretended(), **folders)
    assert again == rows == read_rows(folders["results"] / RESULTS)
    (run.folder / ERROR).unlink()
    rows = run_jobs(study(), text, executor=(elsewhere := Pretended()), **folders | {"results": folders["runs"] / "x"})
    assert (len(rows), len(elsewhere.done)) == (6, len(before)), "other results know of no rows"


@pytest.mark.parametrize(
    ("processor", "warned"), [("Abacus, AVX2", True), (processor_name(), False), (None, False)], ids=str
)
def test_a_seed_that_another_processor_began_is_reported(
    processor: str | None, warned: bool, text: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_jobs(study(), text, executor=Pretended(stop_after=3), **folders)
    rows = [
        row | {"device": "cpu, 1 thread", "processor": processor} for row in read_rows(folders["results"] / RESULTS)
    ]
    write_rows(folders["results"] / RESULTS, rows)
    shutil.rmtree(folders["runs"])
    run_jobs(study(), text, executor=Pretended(), progress=(progress := RecordedProgress()), **folders)
    said = [note for note in progress.notes if "another processor than" in note]
    assert bool(said) is warned
    assert all(f"this one ({processor_name()}): 1 (Abacus, AVX2);" in note for note in said)


def test_what_finished_counts_though_its_folder_is_removed_while_the_study_runs(
    text: str, folders: dict[str, Path]
) -> None:
    class Removing(Pretended):
        def run(self, jobs: Sequence[Path]) -> Iterator[tuple[Path, str | None]]:
            for number, ended in enumerate(super().run(jobs)):
                yield ended
                if number == 0 and len(self.jobs) == 1:
                    shutil.rmtree(next((folders["runs"] / "tiny").glob("base-*-s1")))

    executor = Removing()
    rows = run_jobs(study(), text, executor=executor, **folders)
    assert sorted(executor.done) == sorted(ALL), "nothing is done twice"
    assert [(row["label"], row["seed"]) for row in rows] == ALL
    assert read_rows(folders["results"] / RESULTS) == rows


def test_rows_that_come_from_elsewhere_while_the_study_runs_stay(text: str, folders: dict[str, Path]) -> None:
    """Rows come by `git pull`, or from a driver in another working folder."""
    elsewhere, path = folders["results"].with_name("elsewhere"), folders["results"] / RESULTS
    there = run_jobs(study(), text, executor=Pretended(), results=elsewhere, runs=elsewhere / "runs")

    (came,) = [row for row in there if (row["label"], row["seed"]) == ("low rate", 2)]

    class Pulling(Pretended):
        def run(self, jobs: Sequence[Path]) -> Iterator[tuple[Path, str | None]]:
            yield from super().run(jobs[:2])
            path.write_text(path.read_text() + json.dumps(came) + "\n")
            yield from super().run(jobs[2:3])
            path.write_text("<<<<<<< HEAD\n")
            yield jobs[3], None  # it ended before it began

    executor = Pulling()
    rows = run_jobs(study(), text, executor=executor, **folders)
    assert [(row["label"], row["seed"]) for row in rows] == ALL
    assert read_rows(path) == rows
    assert ("low rate", 2) not in executor.done


def test_rows_that_an_edited_study_has_no_more_are_kept(text: str, folders: dict[str, Path]) -> None:
    before = run_jobs(study(), text, executor=Pretended(), **folders)
    for row in before:
        row["documents"] = [[9000.0, 7000.0], [round(row["bits_per_byte"] * size, 3) for size in (9000, 7000)]]
    write_rows(folders["results"] / RESULTS, before)
    shutil.rmtree(folders["runs"])
    other = study(entries={"low rate": Entry(diff={"train.optimizers.matrix.lr": 0.02})}, seeds=(1,))
    progress = RecordedProgress()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(other, text, executor=Pretended(stop_after=1), progress=progress, **folders)
    assert any("5 finished runs no longer in this study" in note for note in progress.notes)
    run_jobs(other, text, executor=Pretended(), **folders)
    shown = read_rows(folders["results"] / RESULTS)
    assert [(row["label"], row["seed"]) for row in shown] == [("base", 1), ("low rate", 1)], "all that reports count"
    again = Pretended()
    assert run_jobs(study(), text, executor=again, **folders) == before == read_rows(folders["results"] / RESULTS)
    assert again.jobs == []
    assert len(read_rows(folders["results"] / EARLIER)) == 6, "the edited entry's too"


def test_what_fails_is_a_row_and_runs_again_only_when_asked(text: str, folders: dict[str, Path]) -> None:
    rows = run_jobs(study(), text, executor=Pretended(ends={"low rate": "fails"}), **folders)
    failed = [row for row in rows if row["state"] == "failed"]
    assert [(row["label"], row["seed"], row["error"]) for row in failed] == [("low rate", 1, "a reason of two lines")]
    assert len(rows) == 6
    idle = Pretended()
    run_jobs(study(), text, executor=idle, **folders)
    assert idle.jobs == []
    rows = run_jobs(study(), text, executor=Pretended(), retry=True, **folders)
    assert {row["state"] for row in rows} == {"finished"}
    folder = next((folders["runs"] / "tiny").glob("low-rate-*-s1"))
    (folder / "result.json").unlink()
    (folders["results"] / RESULTS).unlink()
    write_error(folder, Pruned("too slow"))
    write_json(folder / STOP, {"reason": "too slow"})
    rows = run_jobs(study(), text, executor=Pretended(), **folders)
    assert [row["state"] for row in rows].count("pruned") == 1
    rows = run_jobs(study(), text, executor=Pretended(), retry=True, **folders)
    assert {row["state"] for row in rows} == {"finished"}
    assert not (folder / STOP).exists()


def test_a_process_that_dies_costs_one_run(text: str, folders: dict[str, Path]) -> None:
    executor = Pretended(ends={"base": "dies"})
    rows = run_jobs(study(seeds=(1,)), text, executor=executor, **folders)
    states = {row["label"]: row["state"] for row in rows}
    assert states == {"base": "failed", "low rate": "finished", "halves": "finished"}
    assert rows[0]["error"] == "its process was ended by signal 9"


def test_a_job_that_was_asked_to_stop_goes_on(text: str, folders: dict[str, Path]) -> None:
    executor = Pretended(ends={"base": "stops"})
    rows = run_jobs(study(seeds=(1,)), text, executor=executor, **folders)
    assert {row["state"] for row in rows} == {"finished"}
    for_ever = Pretended(ends=Stopping())
    rows = run_jobs(study(seeds=(7,), entries={}), text, executor=for_ever, **folders)
    assert len(for_ever.jobs) == ATTEMPTS
    assert rows[0]["error"] == f"it was begun {ATTEMPTS} times and never ended"


class Stopping(dict[str, str]):
    def pop(self, key: str, default: object = None) -> str:  # type: ignore[override]
        return "stops"


def test_the_same_run_of_another_study_is_taken(text: str, folders: dict[str, Path]) -> None:
    run_jobs(study(), text, executor=Pretended(), **folders)
    other = study(name="other", entries={"rate": Entry(diff={"train.optimizers.matrix.lr": 0.01})}, seeds=(2, 3))
    executor = Pretended()
    rows = run_jobs(other, text, executor=executor, **(folders | {"results": folders["runs"] / "other"}))
    assert executor.done == [("base", 3), ("rate", 3)]
    assert [(row["label"], row["seed"]) for row in rows] == [("base", 2), ("base", 3), ("rate", 2), ("rate", 3)]
    more = replace(other, entries={**other.entries, "halves": Entry(diff={"pack.quantizers.matrix": Float16()})})
    planned = plan(more, text, folders["runs"])
    late = Pretended()
    run_jobs(more, text, executor=late, **(folders | {"results": folders["runs"] / "other"}))
    assert late.done == [("halves", 3)], "seed 2 stands in the first study"
    job = json.loads((next(run for run in planned if run.label == "halves" and run.seed == 3).folder / JOB).read_text())
    assert job["study"]["trained_with"] == "base"


def test_a_second_label_of_the_same_run_and_another_study_beside_it(text: str, folders: dict[str, Path]) -> None:
    twice = study(seeds=(1,), entries={"a": Entry(diff={"model.depth": 3}), "b": Entry(diff={"model.depth": 3})})
    executor = Pretended()
    rows = run_jobs(twice, text, executor=executor, **folders)
    assert executor.done == [("base", 1), ("a", 1)]
    assert [row["label"] for row in rows] == ["base", "a", "b"]
    assert rows[1]["key"] == rows[2]["key"]
    with pytest.raises(UserError, match="holds the results of another study"):
        run_jobs(replace(twice, name="another"), text, executor=executor, **folders)


def test_code_of_ones_own_is_part_of_the_run(text: str, folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    keys = set()
    for backwards in (False, True):
        file.write_text(
            "from caddie.data.loaders import Loader, SequentialStream\n"
            "from caddie.recipes.catalog import find\n"
            "class Mine(Loader):\n"
            "    def build(self, shards, **how):\n"
            f"        return SequentialStream().build(shards[:: {-1 if backwards else 1}], **how)\n"
            "recipe = find('baseline_mini').but({'train.loader': Mine()})\n"
        )
        mine = find(f"{file}:recipe").but(SETTINGS)
        planned = plan(study(base=mine, entries={}, seeds=(1,)), text, folders["runs"])
        assert not planned[0].over, "a result of the file's earlier contents is not taken"
        keys.add(planned[0].key)
        job = trial.write_job(planned, {"study": "tiny"})
        assert json.loads(job.read_text())["definitions"] == [{"path": str(file), "source": file.read_text()}]
        list(Pretended().run([job]))
        told, stated = json.loads(job.read_text()), asdict(user_files(mine)[0].stated)
        about = {"recipe": told["runs"][0]["recipe"], "seed": 1, "corpus": told["corpus"], "parts": [stated]}
        write_json(planned[0].folder / RECIPE, about)
    assert len(keys) == 2


def test_a_job_runs_the_code_that_its_study_began_with(text: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """A file that is edited while the study runs is for the next start: its runs have other keys."""
    file = tmp_path / "edited.py"
    file.write_text(
        "from caddie.data.loaders import Loader, SequentialStream\n"
        "from caddie.recipes.catalog import find\n"
        "class Edited(Loader):\n"
        "    def build(self, shards, **how):\n"
        "        return SequentialStream().build(shards, **how)\n"
        "recipe = find('baseline_mini').but({'train.loader': Edited()})\n"
    )
    mine = find(f"{file}:recipe").but(SETTINGS)
    job = trial.write_job(plan(study(base=mine, entries={}, seeds=(1,)), text, folders["runs"]), {"study": "tiny"})
    file.write_text(file.read_text() + "raise SystemExit('edited')\n")
    ran: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_do", lambda one, *_: ran.append(user_files(Recipe.from_json(one["recipe"]))))
        trial.run_job(job)
    assert [one.stated for (one,) in ran] == [user_files(mine)[0].stated]


def test_another_text_is_another_run(text: str, folders: dict[str, Path]) -> None:
    run_jobs(study(), text, executor=Pretended(), **folders)
    with open(text, "a") as file:
        file.write(json.dumps({"text": "One more document, long enough to matter."}) + "\n")
    executor = Pretended()
    run_jobs(study(), text, executor=executor, **folders)
    assert len(executor.done) == 6


def test_checkpoints_go_once_no_run_begins_with_them(text: str, folders: dict[str, Path]) -> None:
    def held() -> set[str]:
        return {path.parent.name.split("-")[0] for path in folders["runs"].glob("*/*/checkpoint.safetensors")}

    with pytest.raises(KeyboardInterrupt):  # the base has ended, which the run of the same training begins with
        run_jobs(study(seeds=(1,)), text, executor=Pretended(stop_after=1), keep_checkpoints=False, **folders)
    assert held() == {"base"}
    run_jobs(study(seeds=(1,)), text, executor=Pretended(ends={"low rate": "fails"}), **folders)
    assert held() == {"base", "halves"}, "kept unless asked otherwise"
    failed = next((folders["runs"] / "tiny").glob("low-rate-*")) / "checkpoint.safetensors"
    failed.touch()
    run_jobs(study(seeds=(1,)), text, executor=Pretended(), keep_checkpoints=False, **folders)
    assert held() == {"low"}, "a failed run may be repeated"
    other = study(name="other", seeds=(1,), entries={})
    base = next((folders["runs"] / "tiny").glob("base-*")) / "checkpoint.safetensors"
    base.touch()
    how = folders | {"results": folders["runs"] / "other"}
    run_jobs(other, text, executor=Pretended(), keep_checkpoints=False, **how)
    assert base.exists(), "that of another study is not touched"


def test_the_state_of_a_study_stands_beside_its_runs(text: str, folders: dict[str, Path]) -> None:
    progress = RecordedProgress()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(study(), text, executor=Pretended(stop_after=3), progress=progress, **folders)
    state = read_state(folders["runs"] / "tiny")
    assert state is not None
    assert (state.study, state.done, state.total, state.state) == ("tiny", 2, 6, "running")
    assert state.driver.pid == os.getpid()
    took = make_result()["seconds"]["total"]
    shared = took - make_result()["seconds"]["train"]  # the second of a training
    assert state.seconds_left == pytest.approx(4 * (took + shared) / 2)
    assert progress.events[-1]["text"].endswith(f" bpb  {duration(state.seconds_left)} left")
    run_jobs(study(), text, executor=Pretended(), progress=progress, **folders)
    state = read_state(folders["runs"] / "tiny")
    assert state is not None
    assert (state.done, state.seconds_left, state.state) == (6, 0.0, "finished")
    assert progress.events[-1]["text"].endswith(" bpb")


def test_two_drivers_of_one_study(text: str, folders: dict[str, Path]) -> None:
    (folders["runs"] / "tiny").mkdir(parents=True)
    with FileLock(folders["runs"] / "tiny" / ".lock"):
        with pytest.raises(
            UserError, match=r"another process is running a study named tiny; .* or run this one in another working"
        ):
            run_jobs(study(), text, executor=Pretended(), **folders)


def test_what_cannot_run_is_known_before_the_first_run(text: str, folders: dict[str, Path]) -> None:
    executor = Pretended()
    impossible = study(entries={"no rule": Entry(diff={"train.optimizers": {"embedding": "AdamW"}})})
    with pytest.raises(UserError, match=r"^no rule: "):
        run_jobs(impossible, text, executor=executor, **folders)
    assert executor.jobs == []


@pytest.fixture
def unsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results without the text that a model writes, which takes longer than its training here."""
    monkeypatch.setattr("caddie.run.result.sample", lambda artifact: b"")


class Here:
    """Does jobs in this process."""

    workers = 1

    def run(self, jobs: Sequence[Path]) -> Iterator[tuple[Path, str | None]]:
        for job in jobs:
            trial.run_job(job)
            yield job, None


@pytest.mark.usefixtures("alive_once", "unprobed", "unsampled")
def test_a_job_trains_once_and_goes_on_after_a_failure(text: str, folders: dict[str, Path]) -> None:
    doomed = Entry(diff={f"train.optimizers.{role}.lr": 1e30 for role in ("matrix", "scalar")})
    one = study(seeds=(1,), entries={"halves": study().entries["halves"], "doomed": doomed})
    base, halves, failed = run_jobs(one, text, executor=Here(), **folders)
    assert base["state"] == halves["state"] == "finished"
    assert (base["trained"], base["trained_with"]) == (halves["trained"], "base")
    assert base["artifact_bytes"] < halves["artifact_bytes"]
    assert 0 < min(base["cpu_share"], halves["cpu_share"]) <= 1
    assert [point[0] for point in halves["curve"]] == [1, 2, 3]
    assert failed["state"] == "failed"
    assert failed["error"].startswith("the loss or its gradient was")
    assert "in checkpoint.safetensors" in failed["error"], "without the place where it ran"
    path = next((folders["runs"] / "tiny").glob("halves*/log.jsonl"))
    log = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(event["event"] == "step" for event in log) == 3, "its steps are those of the base"


def test_a_change_that_does_nothing_fails_unless_it_is_part_of_a_whole_recipe(
    text: str, folders: dict[str, Path]
) -> None:
    """Twins of records have such settings: a recipe's longest piece of a document may be a twin's row."""
    longest = "model.block.attention.longest"
    rate = {"train.optimizers.matrix.lr": 0.01}
    entries = {
        "alone": Entry(diff={longest: 64}),
        "whole": Entry(diff={longest: 32}, kind="bundle"),
        "changed": Entry(diff={longest: 32, **rate}, against="whole"),
    }
    base, alone, whole, changed = run_jobs(study(seeds=(1,), entries=entries), text, executor=Here(), **folders)
    assert alone["state"] == "failed"
    assert alone["error"].startswith("model.block.attention.longest=64 has no effect: with none instead")
    assert whole["state"] == changed["state"] == "finished"
    assert whole["trained"] == base["trained"] != changed["trained"]


@pytest.mark.parametrize("content", ["{}", "[]", "{", "1"])
def test_a_file_that_is_no_job(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"other\.json is no job of a study"):
        trial.run_job(path)


def test_a_training_is_that_of_the_first_run_that_finished(
    text: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[tuple[str, bool]] = []

    def run(*given: object, folder: Path, study: Mapping[str, Any], **how: object) -> None:
        began.append((study["label"], (folder / CHECKPOINT).exists()))
        (folder / LOG).touch()
        (folder / CHECKPOINT).touch()
        if study["label"] == "base":
            raise CheckFailed("its artifact failed")
        write_json(folder / "result.json", make_result() | {"study": study})

    monkeypatch.setattr(trial, "run", run)
    entries = {"halves": study().entries["halves"], "stride": Entry(diff={"score.stride": 16})}
    base, *others = run_jobs(study(seeds=(1,), entries=entries), text, executor=Here(), **folders)
    assert base["state"] == "failed"
    assert began == [("base", False), ("halves", False), ("stride", True)]
    assert [row["trained_with"] for row in others] == ["halves", "halves"]


@pytest.mark.long
@pytest.mark.usefixtures("alive_once", "unprobed", "unsampled")
def test_the_last_look_is_at_documents_that_nothing_has_seen(
    text: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    one, how = study(seeds=(1,), entries={}), folders
    seen = Path(text).read_text().splitlines()
    others = [json.dumps({"text": f"Something else altogether, number {n}: {'other ' * 9}"}) for n in range(8)]
    for name, lines in (("seen", seen), ("first", seen + others[:4]), ("second", others[4:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    with pytest.raises(UserError, match="1 of 1 runs of tiny are left to do"):
        score_holdout(one, text, str(tmp_path / "first.jsonl"), **how)
    before = run_jobs(one, text, executor=Here(), **how)
    assert before[0]["holdout"] is None
    with pytest.raises(UserError, match="every document is in the training or the held-out text"):
        score_holdout(one, text, str(tmp_path / "seen.jsonl"), **how)
    first, progress = score_holdout(one, text, str(tmp_path / "first.jsonl"), **how)[0], RecordedProgress()
    assert 0 < first["holdout"] < 20
    assert first["holdout"] != first["bits_per_byte"] == before[0]["bits_per_byte"]
    fresh = how | {"results": tmp_path / "fresh"}
    assert score_holdout(one, text, str(tmp_path / "first.jsonl"), **fresh) == [first]
    assert write_study_report(fresh["results"]), "the report of a new folder"
    with pytest.raises(UserError, match="holds the results of another study"):
        score_holdout(replace(one, name="other"), text, str(tmp_path / "first.jsonl"), **fresh)
    kept = next(folders["runs"].glob("tiny/*/holdout.json"))
    written = kept.stat().st_mtime_ns
    again = score_holdout(one, text, str(tmp_path / "first.jsonl"), progress=progress, **how)[0]
    assert (again, kept.stat().st_mtime_ns) == (first, written), "looked at once"
    line = f"base, seed 1  {first['holdout']:.4f} bpb"
    assert progress.events == [{"event": "runs", "done": 1, "total": 1, "text": line}]
    second = score_holdout(one, text, str(tmp_path / "second.jsonl"), **how)[0]
    assert second["holdout_documents"] != first["holdout_documents"]
    artifact = next(folders["runs"].glob("tiny/*/artifact.caddie")).rename(tmp_path / "kept.caddie")
    shutil.rmtree(folders["runs"])
    assert score_holdout(one, text, str(tmp_path / "second.jsonl"), **how) == [second], "its row has the score"
    with pytest.raises(UserError, match=r"the artifacts of 1 run are not here, .*; copy them to .*artifacts, or"):
        score_holdout(one, text, str(tmp_path / "first.jsonl"), **how)
    (folders["results"] / "artifacts").mkdir()
    artifact.rename(folders["results"] / "artifacts" / "of any name.caddie")
    assert score_holdout(one, text, str(tmp_path / "first.jsonl"), **how) == [first]
    assert read_rows(folders["results"] / RESULTS) == [first]


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4776"


@pytest.mark.parametrize("error", [RuntimeError(GLOO), DistBackendError("NCCL communicator was aborted")])
def test_the_reason_is_that_of_the_process_that_failed_first(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "wait", lambda ranks: None)
    for ends in ([error, CheckFailed("a reason"), error, CheckFailed("another")], [error]):
        folder = tmp_path / str(len(ends))
        for rank, end in enumerate(ends):
            monkeypatch.setattr(trial, "run", Mock(side_effect=end))
            with pytest.raises(SystemExit):
                one_of(Ranks(rank, len(ends) + 1), folder)
        told = json.loads((folder / ERROR).read_text()) if (folder / ERROR).exists() else {}
        assert (told.get("state"), told.get("error")) == (("failed", "a reason") if len(ends) > 1 else (None, None))


def one_of(ranks: Ranks, folder: Path) -> None:
    """What one of several processes does with a run."""
    one = {"label": "base", "folder": str(folder), "recipe": find("tiny").to_json()}
    how = {"corpus": "", "seed": 1, "study": {"trained_with": "base"}}
    trial._do(one, folder, {"trained": str(folder), "runs": [one], **how}, ranks)


def pruned(ranks: Ranks, folder: Path) -> None:
    """The first of two processes is asked to end a run that both are at."""
    write_json(folder / STOP, {"reason": "its training loss was 9"})

    def run(*given: object, progress: Progress, **settings: object) -> None:
        ranks.wait()
        if ranks.first:
            progress.step({"event": "step"})
        ranks.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "run", run)
        with pytest.raises(SystemExit):
            one_of(ranks, folder)


@pytest.mark.long
def test_a_run_of_two_processes_that_is_pruned_stays_pruned(tmp_path: Path) -> None:
    together(pruned, 2, tmp_path)
    assert json.loads((tmp_path / ERROR).read_text())["state"] == "pruned"


@pytest.mark.slow
def test_real_runs_in_processes_of_their_own(text: str, folders: dict[str, Path]) -> None:
    doomed = Entry(diff={f"train.optimizers.{role}.lr": 1e30 for role in ("matrix", "scalar")})
    one = study(seeds=(1,), entries={"halves": study().entries["halves"], "doomed": doomed})
    rows = run_jobs(one, text, executor=Local(min(2, os.cpu_count() or 1)), **folders)
    base, halves, failed = rows
    assert base["state"] == halves["state"] == "finished"
    assert (base["trained"], base["trained_with"]) == (halves["trained"], halves["trained_with"]), "trained once"
    assert base["artifact_bytes"] < halves["artifact_bytes"]
    assert 0 < min(base["cpu_share"], halves["cpu_share"]) <= 1
    assert base["scorer_sha256"] == halves["scorer_sha256"] != ""
    assert [point[0] for point in base["curve"]] == [1, 2, 3]
    assert failed["state"] == "failed"
    assert "loss" in failed["error"]


def test_curves_are_thinned_by_means() -> None:
    steps = [
        {"step": n, "seconds": n / 10, "tokens": 64 * n, "loss": 0.0, "bits_per_byte": float(n)} for n in range(1, 241)
    ]
    points = curve(steps)
    assert len(points) == 60
    assert points[0] == [4, 0.4, 256, 2.5]
    assert points[-1][0] == 240
    assert curve([]) == []


def test_a_run_with_two_rows_is_no_result(text: str, folders: dict[str, Path]) -> None:
    """Put rows of two machines, or of a study before and after an edit, into one file."""
    run_jobs(study(), text, executor=Pretended(), **folders)
    path = folders["results"] / RESULTS
    first, *others = path.read_text().splitlines()
    other = json.dumps(json.loads(first) | {"key": "0" * 32, "bits_per_byte": 9.0})
    path.write_text("\n".join([first, *others, other]) + "\n")
    with pytest.raises(UserError, match="line 7 is of base, seed 1, as line 1 is; remove one of them"):
        write_study_report(folders["results"])
    path.rename(folders["results"] / EARLIER)
    assert len(read_rows(folders["results"] / EARLIER)) == 7, "an edited study may have had it twice"


def test_a_damaged_description_is_to_be_removed(text: str, folders: dict[str, Path]) -> None:
    rows = run_jobs(study(), text, executor=Pretended(), **folders)
    path = folders["results"] / "study.json"
    path.write_text("<<<<<<< HEAD\n" + path.read_text())
    with pytest.raises(UserError, match="remove it and run the study"):
        run_jobs(study(), text, executor=Pretended(), **folders)
    path.unlink()
    assert run_jobs(study(), text, executor=Pretended(), **folders) == rows


def test_rows_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / RESULTS
    with pytest.raises(UserError, match="run the study first"):
        read_rows(path)
    for line in ("{", "[]", '{"label": 1}'):
        path.write_text(line + "\n")
        with pytest.raises(UserError, match="line 1 is no run"):
            read_rows(path)


def test_how_a_process_ended() -> None:
    assert why_it_died(0) is why_it_died(-15) is why_it_died(143) is why_it_died(130) is None
    assert why_it_died(-9) == why_it_died(137) == "its process was ended by signal 9, out of memory?"
    assert why_it_died(-11) == why_it_died(139) == "its process was ended by signal 11"
    assert "status 1;" in str(why_it_died(1))
    assert "status 255;" in str(why_it_died(255))


def test_a_job_whose_folder_is_removed_before_it_begins_is_given_back(tmp_path: Path) -> None:
    assert list(Local(1).run([tmp_path / "gone" / JOB])) == [(tmp_path / "gone" / JOB, None)]


def test_more_workers_than_cores() -> None:
    with pytest.raises(UserError, match="would disturb one another"):
        Local(10_000)


@pytest.mark.parametrize("workers", [0, -1, 1.5, None, "2"])
def test_workers_are_a_whole_number(workers: Any) -> None:
    with pytest.raises(UserError, match="workers must be"):
        Local(workers)


@pytest.mark.parametrize(("asked", "given"), [("1", "1"), ("", "2"), ("64", "2")])
def test_a_run_gets_no_more_threads_than_the_user_allows(
    asked: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = [sys.executable, "-S", "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    monkeypatch.setattr(executors, "command", lambda job, gpus: program)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert list(filter(None, Local().run([tmp_path / JOB]))) == [(tmp_path / JOB, None)]
    assert (tmp_path / OUTPUT).read_text().strip() == given


@pytest.mark.long
def test_a_job_that_ignores_the_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); pathlib.Path('deaf').touch(); time.sleep(600)"
    )
    monkeypatch.setattr(executors, "command", lambda job, gpus: [sys.executable, "-S", "-c", code])
    monkeypatch.setattr(executors, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(executors, "GRACE_SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)
    ticks = Local().run([tmp_path / JOB])
    while not Path("deaf").exists():
        assert next(ticks) is None
    begin = time.monotonic()
    ticks.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begin < 300


def test_a_busy_machine_is_told_once(text: str, folders: dict[str, Path]) -> None:
    progress = RecordedProgress()
    run_jobs(study(), text, executor=Pretended(cpu_share=0.25), progress=progress, **folders)
    assert [note for note in progress.notes if "was busy" in note] == [
        "base, seed 1: The machine was busy: training got 25% of its threads' time. End other programs, or stop and "
        "start again with OMP_NUM_THREADS=1."
    ]
