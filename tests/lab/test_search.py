"""Searches: what is drawn, what a sampler finds where the right answer is known, and what survives a kill."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import call
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from recording import RecordedProgress
from run_folder import make_result
from tiny_study import SETTINGS as TINY
from tiny_study import write_text

from caddie.errors import UserError
from caddie.files import replacing
from caddie.lab import job as trial
from caddie.lab import search as searching
from caddie.lab.runner import plan
from caddie.lab.search import JOURNAL, Between, draw, parts, read_space, search
from caddie.lab.selection import select
from caddie.lab.study import Entry, Steps, Study
from caddie.recipes.catalog import find
from caddie.report.run_files import ERROR, STOP
from caddie.run.run_folder import write_error

RATE, DEPTH, STRIDE = "train.optimizers.matrix.lr", "model.depth", "score.stride"
BASE = find("baseline_mini").but(TINY)


def setting(recipe: Mapping[str, Any], path: str) -> Any:
    """What a recipe in JSON holds at a path."""
    node: Any = recipe
    for name in path.split("."):
        node = node[name]
    return node


@dataclass
class Scored:
    """Does jobs by writing results whose score is a function of recipe and seed; None fails the run."""

    score: Callable[[Mapping[str, Any], int], float | None]
    workers: int = 1
    done: list[tuple[str, int]] = field(default_factory=list)
    stop_after: int = 10**6
    curve: Callable[[Mapping[str, Any]], list[float]] | None = None
    """Losses of a run's tenths, logged while the driver looks on; a run that is asked to stop does."""
    stopped: list[tuple[str, int]] = field(default_factory=list)
    over_cap: Callable[[Mapping[str, Any]], bool] = lambda recipe: False

    def run(self, jobs: Sequence[Path]) -> Iterator[tuple[Path, str | None] | None]:
        for job in jobs:
            told = json.loads(job.read_text())
            for one in told["runs"]:
                folder = Path(one["folder"])
                if not trial.finished(folder) and not (folder / ERROR).exists():
                    yield from self.one(one, told, folder)
            yield job, None

    def one(self, one: Mapping[str, Any], told: Mapping[str, Any], folder: Path) -> Iterator[None]:
        if len(self.done) == self.stop_after:
            raise KeyboardInterrupt
        if self.curve and one["label"] != "base":
            yield from self.logged(folder, self.curve(one["recipe"]))
        if (folder / STOP).exists():
            self.stopped.append((one["label"], told["seed"]))
            write_error(folder, "pruned")
            return
        self.done.append((one["label"], told["seed"]))
        score = self.score(one["recipe"], told["seed"])
        if score is None:
            write_error(folder, "the loss was nan")
            return
        result = make_result() | {"study": {**told["study"], "label": one["label"]}, "bits_per_byte": score}
        result["training"] |= {"threads": 1, "cpu_share": 1.0}
        result["source"] |= {"sha256": "0" * 64}
        result["under_cap"] = not self.over_cap(one["recipe"])
        with replacing(folder / "result.json") as temporary:  # `trial.write_json` indents, which is slow
            temporary.write_text(json.dumps(result))

    def logged(self, folder: Path, losses: Sequence[float]) -> Iterator[None]:
        """Write a log tenth by tenth, until the run is asked to stop."""
        for tenth, loss in enumerate(losses, 1):
            event = {"event": "step", "step": tenth, "seconds": tenth, "tokens": tenth, "progress": tenth / 10}
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps({**event, "loss": loss, "bits_per_byte": loss}) + "\n")
            yield
            if (folder / STOP).exists():
                return


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(write_text(tmp_path))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reports, without waiting for the disk, and what a search has found possible is not built again."""
    monkeypatch.setattr("caddie.lab.report.write_study_report", lambda folder, price=None: [])
    monkeypatch.setattr("caddie.lab.runner.check_recipe", lambda recipe: None)
    monkeypatch.setattr("os.fsync", lambda number: None)


def small(**settings: Any) -> Study:
    return Study(**{"name": "found", "base": BASE, "seeds": (1,), "budget": Steps(steps=3), **settings})


def bowl(recipe: Mapping[str, Any], seed: int) -> float:
    """Best at a rate of 0.02 and a stride of 16."""
    return 1.0 + math.log10(setting(recipe, RATE) / 0.02) ** 2 + 0.5 * (setting(recipe, STRIDE) != 16) + 0.01 * seed


SPACE = {RATE: Between(0.0002, 2.0), STRIDE: [16, 32]}


# What may be tried


def test_how_a_space_is_written() -> None:
    assert read_space("a.b=0.01..0.1") == ("a.b", Between(0.01, 0.1))
    assert read_space("a=1e-4..2") == ("a", Between(0.0001, 2))
    assert read_space("a=-3..7") == ("a", Between(-3, 7))
    assert read_space("a=1,2") == ("a", [1, 2])
    assert read_space("a=x..y") == ("a", ["x..y"])
    for wrong in ("a=2..1", "a=1..1", "a=1..inf", "a=nan..1"):
        with pytest.raises(UserError, match=r"is no range; write LOW\.\.HIGH"):
            read_space(wrong)
    with pytest.raises(UserError, match="names no values"):
        read_space("a=")


def test_ranges_by_hand() -> None:
    rates, steps, depths = Between(0.001, 0.1), Between(0.02, 0.1), Between(1, 4)
    assert rates.log
    assert not steps.log
    assert rates.at(0.5) == 0.01, "the geometric middle"
    assert steps.at(0.5) == 0.06, "the arithmetic one"
    assert [depths.at(part) for part in (0.0, 0.24, 0.26, 0.74, 0.76, 0.999)] == [1, 1, 2, 3, 4, 4]
    assert Between(0.0, 1.0).at(1 / 3) == 0.3333
    assert not Between(0, 100).log


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0, 1, exclude_max=True), st.booleans())
def test_what_is_drawn_lies_in_the_range(one: float, other: float, part: float, whole: bool) -> None:
    low, high = sorted((int(one), int(other)) if whole else (one, other))
    if low < high:
        drawn = Between(low, high).at(part)
        assert low <= drawn <= high
        assert not whole or isinstance(drawn, int)


def test_draws_repeat_and_begin_alike() -> None:
    few, many = draw(BASE, SPACE, 5, seed=3), draw(BASE, SPACE, 12, seed=3)
    assert list(many)[:5] == list(few) == list(draw(BASE, SPACE, 5, seed=3))
    assert len(many) == 12
    assert list(few) != list(draw(BASE, SPACE, 5, seed=4))
    label, entry = next(iter(few.items()))
    assert label == f"lr={entry.diff[RATE]}, stride={entry.diff[STRIDE]}"


def test_draws_leave_out_the_base_and_what_is_not_possible() -> None:
    assert set(draw(BASE, {DEPTH: Between(1, 4)}, 3)) == {"depth=1", "depth=3", "depth=4"}, "the base has 2"
    with pytest.raises(UserError, match=r"^4 different trials were asked for and 3 found; there are no more"):
        draw(BASE, {DEPTH: Between(1, 4)}, 4)
    with pytest.raises(UserError, match=r"and 1 found; another is not possible: .*stride"):
        draw(BASE, {STRIDE: [16, 64]}, 2)
    with pytest.raises(UserError, match=r"^no setting model\.dept \(did you mean model\.depth"):
        draw(BASE, {"model.dept": [1, 2]}, 1)
    with pytest.raises(UserError, match="a search needs a path"):
        draw(BASE, {}, 1)


# Optuna's samplers


@pytest.fixture
def optuna() -> Any:
    return pytest.importorskip("optuna", reason="optuna is not installed")


@pytest.mark.long
def test_a_sampler_finds_what_is_best(text: str, quick: None, optuna: Any) -> None:
    executor, progress = Scored(bowl), RecordedProgress()
    found = search(small(), SPACE, text, trials=20, executor=executor, progress=progress)
    told = [(event["done"], event["total"]) for event in progress.events]
    board = found.facts["board"]
    assert abs(math.log10(found.study.entries[board[0]["label"]].diff[RATE] / 0.02)) < 0.2
    assert found.study.entries[board[0]["label"]].diff[STRIDE] == 16
    late = [found.study.entries[label].diff[STRIDE] for label, _ in executor.done[13:]]
    assert late.count(16) > late.count(32), "it learns"
    assert told[-1] == (21, 21)
    assert len(executor.done) == len(found.rows) == 21


@pytest.mark.long
def test_a_search_with_impossible_trials_ends_with_all_of_its_runs(text: str, quick: None, optuna: Any) -> None:
    for trials in (6, 2):  # with fewer trials than it has made, it has nothing left to do
        progress = RecordedProgress()
        found = search(small(), {STRIDE: (16, 32, 64)}, text, trials=trials, executor=Scored(bowl), progress=progress)
        assert len(found.rows) < 6
        assert (progress.events[-1]["done"], progress.events[-1]["total"]) == (len(found.rows), len(found.rows))


@pytest.mark.long
def test_a_search_that_was_stopped_goes_on(text: str, quick: None, optuna: Any) -> None:
    def go(executor: Scored, **how: Any) -> Any:
        return search(small(seeds=(1, 2)), SPACE, text, trials=6, executor=executor, **how)

    for after in (0, 3, 9):
        with pytest.raises(KeyboardInterrupt):
            go(executor := Scored(bowl, stop_after=after))
        with Path("runs/found", JOURNAL).open("a") as journal:
            journal.write('{"half a li')
        pieces = executor.done
    found = go(last := Scored(bowl))
    assert len(found.study.entries) == 6
    assert len(found.rows) == 14
    assert not set(pieces) & set(last.done)
    again = Scored(bowl)
    assert go(again).rows == found.rows
    assert again.done == []
    more = search(small(seeds=(1, 2)), SPACE, text, trials=7, executor=again)
    assert list(more.study.entries)[:6] == list(found.study.entries)
    assert len(again.done) == 2


def test_a_search_that_was_stopped_tries_the_same(
    text: str, quick: None, optuna: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search(small(), SPACE, text, trials=6, executor=Scored(bowl))
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for after in (0, 1, 3):
        with pytest.raises(KeyboardInterrupt):
            search(small(), SPACE, text, trials=6, executor=Scored(bowl, stop_after=after))
    assert search(small(), SPACE, text, trials=6, executor=Scored(bowl)).study.entries == whole.study.entries


@pytest.mark.long
def test_what_is_another_search_begins_anew(text: str, quick: None, optuna: Any) -> None:
    first = search(small(), SPACE, text, trials=3, executor=Scored(bowl))
    for changed, space in ((small(budget=Steps(steps=4)), SPACE), (small(), {RATE: Between(0.001, 1.0)})):
        executor = Scored(bowl)
        other = search(changed, space, text, trials=3, executor=executor)
        assert len([label for label, _ in executor.done if label != "base"]) == 3
        assert len(other.study.entries) == 3
    idle = Scored(bowl)
    assert list(search(small(), SPACE, text, trials=3, executor=idle).study.entries) == list(first.study.entries)
    assert idle.done == [], "and the first is still known"


@pytest.mark.long
def test_as_many_at_once_as_there_are_workers(text: str, quick: None, optuna: Any) -> None:
    rounds: list[int] = []

    class Counting(Scored):
        def run(self, jobs: Sequence[Path]) -> Iterator[tuple[Path, str | None]]:
            rounds.append(len(jobs))
            return super().run(jobs)

    search(small(seeds=(1, 2)), SPACE, text, trials=7, executor=Counting(bowl, workers=3))
    assert rounds == [2, 6, 6, 2], "the base, and trials with two seeds each"


@pytest.mark.long
def test_what_fails_and_what_is_not_possible_counts_as_bad(text: str, quick: None, optuna: Any) -> None:
    def fails(recipe: Mapping[str, Any], seed: int) -> float | None:
        return None if setting(recipe, RATE) > 0.02 and seed == 2 else bowl(recipe, seed)

    progress = RecordedProgress()
    space = {RATE: Between(0.0002, 2.0), STRIDE: [32, 64]}  # a stride of 64 is longer than the windows
    found = search(small(seeds=(1, 2)), space, text, trials=8, executor=Scored(fails), progress=progress)
    left_out = [note for note in progress.notes if note.startswith("left out")]
    assert left_out
    assert all("stride=64: " in note for note in left_out)
    assert len(found.study.entries) + len(left_out) == 8
    assert all(entry.diff[STRIDE] == 32 for entry in found.study.entries.values())
    assert {row["state"] for row in found.rows} == {"finished", "failed"}


@pytest.mark.long
def test_an_artifact_over_its_cap_counts_as_bad(text: str, quick: None, optuna: Any) -> None:
    executor = Scored(bowl, over_cap=lambda recipe: setting(recipe, STRIDE) == 16)
    search(small(), SPACE, text, trials=6, executor=executor)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(f"runs/found/{JOURNAL}"))
    trials = optuna.load_study(study_name=None, storage=storage).trials
    assert {(one.params[STRIDE], one.state.name) for one in trials} == {("16", "PRUNED"), ("32", "COMPLETE")}


def test_a_search_looks_in_its_own_folder_of_runs(
    text: str, quick: None, optuna: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(study: Study, data: str | None, runs: Path) -> Any:
        places.add(runs)
        return plan(study, data, runs)

    places = set[Path]()
    monkeypatch.setattr(searching, "plan", looked)
    search(small(), SPACE, text, trials=1, executor=Scored(bowl), runs=Path("other"))
    assert places == {Path("other")}


@pytest.mark.parametrize("sampler", ["nsgaii", "random"])
def test_every_sampler_answers(sampler: str, text: str, quick: None, optuna: Any) -> None:
    found = search(small(), SPACE, text, trials=3, sampler=sampler, executor=Scored(bowl))
    assert len(found.study.entries) == 3


@pytest.mark.slow  # it takes seconds to think
def test_gaussian_processes_answer(text: str, quick: None, optuna: Any) -> None:
    found = search(small(), SPACE, text, trials=14, sampler="gp", executor=Scored(bowl))
    assert found.facts["board"][0]["mean"] < 1.1


@pytest.mark.parametrize("pruner", [pytest.param("median", marks=pytest.mark.long), "hyperband"])
def test_a_pruner_ends_bad_runs(pruner: str, text: str, quick: None, optuna: Any) -> None:
    def curve(recipe: Mapping[str, Any]) -> list[float]:
        return [bowl(recipe, 0) + (7.0 if setting(recipe, STRIDE) == 16 else 0.0)] * 10

    executor = Scored(lambda recipe, seed: curve(recipe)[-1], curve=curve)
    found = search(small(seeds=(1, 2)), SPACE, text, trials=6, pruner=pruner, executor=executor, runs=Path("other"))
    ended = {label for label, _ in executor.stopped}
    assert ended
    if pruner == "median":  # hyperband compares trials of one bracket, whose best may be bad
        assert all(found.study.entries[label].diff[STRIDE] == 16 for label in ended)
    assert not ended & {label for label, seed in executor.done if seed == 2}, "its other seed is not trained"
    assert len(found.rows) == 14
    folder = next(Path("other/found").glob(f"*/{STOP}")).parent
    assert json.loads((folder / STOP).read_text())["reason"].startswith("its training loss was ")
    idle = Scored(bowl)
    search(small(seeds=(1, 2)), SPACE, text, trials=6, pruner=pruner, executor=idle, runs=Path("other"))
    assert idle.done == []


def test_the_tenths_of_a_run() -> None:
    steps = [{"progress": n / 40, "bits_per_byte": float(n)} for n in range(1, 31)]
    assert parts(steps) == {1: 2.5, 2: 6.5, 3: 10.5, 4: 14.5, 5: 18.5, 6: 22.5, 7: 26.5}, "the eighth is not over"
    assert parts(steps[-7:]) == {6: 24.0, 7: 26.5}
    assert parts([]) == {}


@pytest.mark.long
def test_settings_are_tried_once_and_a_small_space_ends_the_search(text: str, quick: None, optuna: Any) -> None:
    executor, progress = Scored(bowl), RecordedProgress()
    before = optuna.logging.get_verbosity()
    found = search(small(), {STRIDE: (16, 32)}, text, trials=9, executor=executor, progress=progress)
    assert len(found.study.entries) == 2
    assert len(executor.done) <= 3
    assert progress.notes[-1] == "2 of 9 trials: the sampler proposes nothing new"
    assert optuna.logging.get_verbosity() == before
    whole = search(small(), {RATE: Between(0.01, 0.02)}, text, trials=12, executor=executor, progress=progress)
    assert len(whole.study.entries) == 12


@pytest.mark.parametrize(
    ("wrong", "said"), [({"trials": 0}, "trials"), ({"trials": 2.5}, "trials"), ({"seed": -1}, "seed")]
)
def test_numbers_of_a_search_are_checked_before_it_trains(wrong: dict[str, Any], said: str, text: str) -> None:
    with pytest.raises(UserError, match=said):
        search(small(), SPACE, text, **{"trials": 1, "executor": Scored(bowl), **wrong})


def test_a_missing_optuna_and_wrong_words(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no sampler tp; there are tpe, gp, nsgaii, random"):
        search(small(), SPACE, text, trials=1, executor=Scored(bowl), sampler="tp")
    with pytest.raises(UserError, match="no pruner some; there are none, median, hyperband"):
        search(small(), SPACE, text, trials=1, executor=Scored(bowl), pruner="some")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"run: pip install optuna"):
        search(small(), SPACE, text, trials=1, executor=Scored(bowl))


def test_two_processes_in_one_journal(text: str) -> None:
    Path("place").mkdir()
    with FileLock(f"place/.{JOURNAL}"):
        with pytest.raises(UserError, match="place is being searched by another process"):
            search(small(), SPACE, text, trials=1, executor=Scored(bowl), folder=Path("place"))


# Greedy forward selection

GAINS = {"depth": ({DEPTH: 3}, -0.05), "rate": ({RATE: 0.01}, -0.10), "stride": ({STRIDE: 16}, -0.02)}
NOISE = {1: 0.0, 2: 0.004, 3: -0.003}


def additive(recipe: Mapping[str, Any], seed: int) -> float:
    """A gain for each entry, but none of depth on top of the rate; a little noise that no two recipes share."""
    held = {name for name, (diff, _) in GAINS.items() if all(setting(recipe, path) == v for path, v in diff.items())}
    if "rate" in held:
        held.discard("depth")
    own = 0.0005 * math.sin(sum(map(ord, json.dumps(recipe))) * seed)
    return 2.0 + sum(GAINS[name][1] for name in held) + NOISE[seed] + own


def choices(**more: Entry) -> Study:
    entries = {name: Entry(diff=diff) for name, (diff, _) in GAINS.items()}
    return small(entries={**entries, **more}, seeds=tuple(NOISE), margin=0.005)


@pytest.mark.long
def test_selection_adds_the_best_until_nothing_is_better(text: str, quick: None) -> None:
    executor = Scored(additive)
    found = select(choices(idle=Entry(diff={"train.clip_norm": 2.0}, against="depth")), text, executor=executor)
    assert found.chosen == ["rate", "stride"], "depth alone gains more than stride, but not with the rate"
    assert [len(one.study.entries) for one in found.rounds] == [4, 3, 2]
    assert [one.study.name for one in found.rounds] == ["found-round1", "found-round2", "found-round3"]
    assert found.recipe.settings == small().recipe("base").but({RATE: 0.01, STRIDE: 16}).settings
    facts = found.facts
    assert json.loads(json.dumps(facts))["diff"] == {RATE: "0.01", STRIDE: "16"}
    assert [one["word"] for one in facts["chosen"]] == ["better", "better"]
    assert facts["chosen"][0]["difference"] == pytest.approx(-0.10, abs=0.002)
    assert facts["chosen"][1]["difference"] == pytest.approx(-0.02, abs=0.002), "against what was chosen before"
    assert {one["label"] for one in facts["left"]} == {"depth", "idle"}
    assert len(executor.done) == 3 * (5 + 3 + 2), "a round's base is the winner of the one before, and not run again"
    shown = str(found)
    assert "same        depth" in shown
    assert f"changes     {RATE}=0.01" in shown
    again = Scored(additive)
    assert select(choices(idle=Entry(diff={"train.clip_norm": 2.0})), text, executor=again).chosen == found.chosen
    assert again.done == []


def test_selection_says_that_one_seed_shows_nothing(text: str, quick: None) -> None:
    found = select(replace(choices(), seeds=(1,)), text, executor=Scored(additive))
    assert found.chosen == []
    assert "unclear     rate" in str(found), "it may be better all the same"


@pytest.mark.long
def test_selection_leaves_out_what_is_over_its_cap(text: str, quick: None) -> None:
    executor = Scored(additive, over_cap=lambda recipe: setting(recipe, RATE) == 0.01)
    found = select(choices(), text, executor=executor)
    assert found.chosen == ["depth", "stride"]
    assert "not valid   rate" in str(found)


@pytest.mark.long
def test_selection_of_shortened_runs_shortens_them_once(text: str, quick: None) -> None:
    study = replace(
        choices(), base=small().base.but({"train.steps": 40, "train.seconds": None}), fraction=0.1, budget=None
    )
    found = select(study, text, executor=Scored(additive))
    assert {one.study.recipe("base").train.steps for one in found.rounds} == {4}
    assert found.recipe.train.steps == 4


def test_selection_leaves_out_what_does_not_fit(text: str, quick: None) -> None:
    progress = RecordedProgress()
    wide = Entry(diff={STRIDE: 64})
    found = select(choices(wide=wide), text, executor=Scored(additive), progress=progress)
    assert found.chosen == ["rate", "stride"]
    assert [note for note in progress.notes if note.startswith("left out  wide: ")]


def test_selection_of_everything_and_of_nothing(text: str, quick: None) -> None:
    one = small(entries={"rate": Entry(diff={RATE: 0.01})}, seeds=tuple(NOISE))
    found = select(one, text, executor=Scored(additive))
    assert (found.chosen, len(found.rounds), found.facts["left"]) == (["rate"], 1, [])
    assert "nothing is left to add" in str(found)
    worse = small(name="worse", entries={"rate": Entry(diff={RATE: 0.3})}, seeds=tuple(NOISE))
    found = select(worse, text, executor=Scored(additive))
    assert (found.chosen, len(found.rounds), found.facts["diff"]) == ([], 1, {})


# The command line


@pytest.fixture
def recipe(text: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe and a study in a file, run by made-up scores."""
    Path("mine.py").write_text(
        "from caddie.lab.study import Entry, Steps, Study\nfrom caddie.recipes.catalog import find\n"
        f"tiny = find('baseline_mini').but({TINY!r})\n"
        f"study = Study(name='mine', base=tiny, budget=Steps(steps=3), seeds={tuple(NOISE)},\n"
        f"  entries={{'rate': Entry(diff={{{RATE!r}: 0.01}}), 'stride': Entry(diff={{{STRIDE!r}: 16}})}},\n"
        f"  scales={{'small': {{}}, 'large': {{'model.width': 32}}}})\n"
    )
    monkeypatch.setattr("caddie.cli.study._executor", lambda *given: Scored(additive))
    return "mine.py"


def test_random_and_searched_sweeps_from_the_command_line(recipe: str, text: str, optuna: Any) -> None:
    given = ("sweep", f"{recipe}:tiny", f"{RATE}=0.001..1.0", "--data", text, "--steps", 3, "--seeds", 2, "--json")
    drawn = json.loads(call(*given, "--random", 3, "--quiet").out)
    assert (drawn["study"], len(drawn["verdicts"])) == ("random-tiny", 3)
    searched = json.loads(call(*given, "--search", "random", "--trials", 2, "--quiet").out)
    assert (searched["study"], len(searched["verdicts"])) == ("search-tiny", 2)
    for wrong in (("--search", "tpe"), ("--trials", 2), ("--random", 2, "--search", "tpe", "--trials", 2)):
        ended = call(*given, *wrong)
        assert (ended.status, ended.err.count("\n")) == (2, 1)
        assert "a search is --search SAMPLER --trials N" in ended.err
    assert "has no end of combinations" in call(*given).err


@pytest.mark.long
def test_selection_and_ladder_from_the_command_line(recipe: str, text: str) -> None:
    chosen = json.loads(call("study", recipe, "--select", "--data", text, "--json", "--quiet").out)
    assert [one["label"] for one in chosen["chosen"]] == ["rate", "stride"]
    assert "nothing is left to add" in call("study", recipe, "--select", "--data", text, "--quiet").out
    climbed = json.loads(call("study", recipe, "--ladder", "--data", text, "--json", "--quiet").out)
    assert climbed["scales"] == ["small", "large"]
    assert "how well small predicts large" in call("study", recipe, "--ladder", "--data", text, "--quiet").out
    assert "one at a time" in call("study", recipe, "--ladder", "--select").err
