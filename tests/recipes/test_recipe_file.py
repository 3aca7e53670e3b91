"""Recipes in files of TOML and JSON, and those of runs: what they mean, and the line that says what is wrong in one."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from caddie.config.schedules import Warmdown
from caddie.errors import UserError
from caddie.recipes.catalog import begun_from, find, find_base, find_shipped, shipped
from caddie.recipes.recipe import Recipe
from caddie.run.dead_settings import dead_settings
from caddie.run.run import check_recipe
from caddie.score import ChunkSGD
from caddie.train.optim import AdamW

TOML = """
base = "tiny"
why = "Mine."
model.depth = 3
score.ttt = "ChunkSGD(chunk_tokens=512)"

[train]
seconds = "none"
steps = 5
optimizers.matrix.lr = 0.03
lr_schedule = {kind = "Warmdown", fraction = 0.3}

[train.optimizers."embedding.bigrams.weight"]
kind = "AdamW"
lr = 0.01

[model.layers.1-2]
attention.xsa = true
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, held: object) -> str:
    Path(name).write_text(held if isinstance(held, str) else json.dumps(held))
    return name


def test_a_file_of_toml_is_a_diff_on_its_base() -> None:
    mine = find(write("mine.toml", TOML))
    assert (mine.name, mine.base, mine.why, mine.public) == ("mine", "tiny", "Mine.", ())
    assert find("tiny").settings.diff(mine.settings) == {
        "model.depth": 3,
        "model.layers.1-2": {"attention.xsa": True},
        "train.seconds": None,
        "train.steps": 5,
        "train.optimizers.matrix.lr": 0.03,
        "train.optimizers.embedding.bigrams.weight": AdamW(lr=0.01),
        "train.lr_schedule.fraction": 0.3,
        "score.ttt": ChunkSGD(chunk_tokens=512),
    }
    assert mine.train.lr_schedule == Warmdown(fraction=0.3)
    check_recipe(mine)


def test_the_file_of_the_documentation_is_a_recipe() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "replay.md").read_text()
    mine = find(write("mine.toml", page.split("```toml\n")[1].split("```")[0]))
    check_recipe(mine)
    changed = {*find("baseline_mini").settings.diff(mine.settings)}
    assert changed == {
        *("model.depth", "model.layers.2", "model.skips", "train.seconds", "train.steps", "train.lr_schedule.fraction"),
        *("train.optimizers.matrix.lr", "pack.quantizers.matrix", "pack.fit", "pack.cap_bytes"),
    }


def test_json_and_toml_say_the_same_and_lie_on_each_other() -> None:
    write("mine.toml", TOML)
    diff = {"base": "mine.toml", "name": "other", "model": {"skips": None, "depth": 4}, "train.steps": 7}
    other = find(write("other.json", diff))
    assert (other.name, other.base) == ("other", "mine.toml")
    assert find("mine.toml").settings.diff(other.settings) == {"model.depth": 4, "train.steps": 7}


def test_a_base_is_looked_for_beside_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("recipes").mkdir()
    write("recipes/a.toml", 'base = "tiny"\nmodel.depth = 3')
    write("recipes/b.toml", 'base = "a.toml"\nmodel.width = 48')
    write("recipes/mine.py", "import caddie\nchanged = caddie.find('tiny').but({'model.depth': 5})\n")
    write("recipes/c.toml", 'base = "mine.py:changed"\nmodel.width = 48')
    assert [find(f"recipes/{name}.toml").model.depth for name in "bc"] == [3, 5]
    monkeypatch.chdir("recipes")
    assert [find(f"{name}.toml").model.depth for name in "bc"] == [3, 5]


@pytest.mark.parametrize("name", ["growing_rows", "ngram_tilt", "champion", "tiny"])
def test_a_whole_recipe_comes_back(name: str) -> None:
    recipe = shipped()[name]
    assert find(write("whole.json", recipe.to_json())) == recipe
    assert find(write("named.json", {**recipe.to_json(), "name": ""})) == recipe.but(name="named")


def test_a_layer_s_settings_are_added_to_those_that_it_has() -> None:
    write("a.toml", TOML)
    held = find(write("b.toml", 'base = "a.toml"\n[model.layers.1-2]\nmlp.hidden = 8\n')).model.layers
    assert held == {"1-2": {"attention.xsa": True, "mlp.hidden": 8}}


def test_the_folder_of_a_run_is_its_recipe() -> None:
    held = {"recipe": find("tiny").but({"train.steps": 3}).to_json(), "seed": 5, "corpus": "data/x"}
    Path("run").mkdir()
    path = write("run/recipe.json", held)
    assert find("run") == find(path) == find("tiny").but({"train.steps": 3})
    for name in ("run", path):
        begun = begun_from(name)
        assert begun is not None
        assert (begun.seed, begun.corpus) == (5, Path("data/x"))
    assert begun_from("tiny") is begun_from(write("a.toml", TOML)) is None
    Path("run").rename("tiny")
    assert find("tiny") == shipped()["tiny"], "a shipped recipe goes before a folder"
    assert begun_from("tiny") is None


def test_the_base_of_a_file_is_looked_for_beside_it() -> None:
    Path("recipes").mkdir()
    write("recipes/a.toml", 'base = "tiny"\nmodel.depth = 3')
    write("recipes/b.toml", 'base = "a.toml"\nmodel.width = 48')
    assert find_base("recipes/b.toml") == find("recipes/a.toml")
    assert find_base("recipes/a.toml") == find("tiny")
    assert find_base(write("whole.json", find("exclusive_four").to_json())) == find(find("exclusive_four").base or "")
    assert find_base(write("baseless.json", Recipe(name="lonely").to_json())) is None


@pytest.mark.long
@pytest.mark.parametrize("base", ["got/evil.py:x", "got/evil.toml"])
def test_the_base_that_a_strangers_run_names_is_not_run(base: str, caddie: Callable[..., Any]) -> None:
    Path("got").mkdir()
    write("got/evil.py", "from pathlib import Path\nimport caddie\nPath('ran').touch()\nx = caddie.find('tiny')\n")
    write("got/evil.toml", 'base = "evil.py:x"\n')
    write("got/recipe.json", run(recipe=find("tiny").but(name="of a stranger", base=base).to_json()))
    for verb in ("diff", "ablate"):
        ended = caddie(verb, "got")
        assert (ended.status, f"got is based on {base}, which caddie does not ship" in ended.err) == (2, True)
    assert find_shipped(base) is find_shipped("got") is None
    dead_settings(find("got"))
    assert not Path("ran").exists()


def run(**changes: Any) -> dict[str, Any]:
    return {"recipe": find("tiny").to_json(), "seed": 5, "corpus": "data/x", **changes}


@pytest.mark.parametrize(
    ("name", "held", "says"),
    [
        ("a.toml", 'base = "tiny"\n[trian]\nsteps = 2', "a.toml: no setting trian (did you mean train?)"),
        ("a.toml", 'base = "tiny"\n[train]\nstepz = 2', "a.toml: no setting train.stepz (did you mean train.steps?)"),
        ("a.toml", 'base = "tiny"\n[train]\nsteps = "two"', "a.toml: train.steps must be a whole number, not two"),
        ("a.toml", 'base = "tiny"\ntrain.steps = 1979-05-27', "a.toml: train.steps must be a whole number"),
        ("a.toml", 'base = "tiny"\ntrain.optimizers.matrix = {kind = "Muun"}', "did you mean Muon?"),
        ("a.toml", 'base = "tinny"', "a.toml: no recipe tinny (did you mean tiny?)"),
        ("a.toml", "train.steps = 2", 'a.toml: it names no base; write base = "tiny"'),
        ("a.toml", "base = tiny", "a.toml is not TOML: Invalid value (at line 1, column 8)"),
        ("a.toml", 'base = "a.toml"', "a.toml: a.toml is based on itself"),
        ("a.toml", 'base = "tiny"\nname = "../a"', "a.toml: name must be a short word without slashes"),
        ("a.toml", 'base = "tiny"\nname = 3', "a.toml: name must be text"),
        ("a.json", "{", "a.json is not JSON"),
        ("a.json", "[1]", "a.json is no recipe: it holds no object"),
        ("a.json", '{"train": {"steps": 3, "steps": 4}}', "a.json is not JSON: steps is set twice; leave one out"),
        ("a.json", "[" * 100_000, "a.json is not JSON: nested too deeply"),
        ("a.json", " " * (2 << 20), "a.json is no recipe: it has 2,097,152 bytes"),
        ("a.json", {"kind": "Recipe", "modle": {}}, "a.json: Recipe has no setting modle (did you mean model?)"),
        ("a.json", run(seed=-1), "a.json: seed must be from 0 to"),
        ("a.json", run(corpus=3), "a.json: corpus must be text"),
        ("a.json", run(corpus={"name": "text"}), "a.json: it is the result of a run; name the recipe.json beside it"),
        ("a.json", run(recipe=[]), "a.json: config must be one of Recipe"),
        ("a.json", run(recipe=find("tiny").but(name="a/b").to_json()), "a.json: name must be a short word"),
        ("a.json", {"recipe": {}}, "a.json: it is no recipe.json of a run, for it has no seed"),
    ],
)
def test_a_line_names_the_file_and_what_is_wrong(name: str, held: object, says: str) -> None:
    write(name, held)
    with pytest.raises(UserError) as error:
        find(name)
    assert str(error.value).startswith(name)
    assert says in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_misspelt_base_names_the_file_where_the_base_is_asked_for() -> None:
    write("a.toml", 'base = "tinny"')
    with pytest.raises(UserError, match=r"^a\.toml: no recipe tinny"):
        find_base("a.toml")


@pytest.mark.parametrize("name", ["none.toml", "none.json", "/dev/null/a.toml"])
def test_a_file_that_is_not_there_is_said_to_be_so(name: str) -> None:
    with pytest.raises(UserError, match=f"no file {name}; name a recipe that is there"):
        find(name)


def test_a_file_that_cannot_be_read_is_not_waited_for() -> None:
    os.mkfifo("a.toml")
    with pytest.raises(UserError, match=r"a\.toml: cannot be read \(not a regular file\)"):
        find("a.toml")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(TOML)), st.integers(0, 40), st.text(max_size=8))
@example(0, 0, "\0")
def test_a_damaged_file_is_read_or_refused_in_a_line(at: int, length: int, new: str) -> None:
    Path("a.toml").write_bytes((TOML[:at] + new + TOML[at + length :]).encode("utf-8", "surrogatepass"))
    with contextlib.suppress(UserError):  # nothing else
        assert isinstance(find("a.toml"), Recipe)


def test_a_recipe_is_found_by_the_path_of_its_file() -> None:
    assert find(write("a.toml", 'base = "tiny"\ntrain.steps = 2')) == find(Path("a.toml"))
    nothing: Any = None
    with pytest.raises(UserError, match="a recipe is found by its name or file, not by None"):
        find(nothing)
