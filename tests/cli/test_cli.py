"""The command line: what it prints, where, and with which status."""

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from json_page import fields_by_verb

from caddie.cli import ELSEWHERE, app, main
from caddie.inference import text_codec as lossless
from caddie.pack import artifact as artifacts

Call = Callable[..., Any]
HELP = Path(__file__).parent.parent / "golden" / "help.txt"
VERBS = (
    *("ablate", "board", "compare", "compress", "data", "decompress", "diff", "doctor", "export", "lm-eval"),
    *("pack", "push", "recipes", "replay", "report", "review", "run", "sample", "score"),
    *("study", "submit", "sweep", "techniques", "track", "train", "trial", "verify"),
)


def test_help_is_golden(caddie: Call, monkeypatch: pytest.MonkeyPatch, same_as_kept: Call) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    pages = []
    for arguments in (("--help",), *((verb, "--help") for verb in VERBS)):
        ended = caddie(*arguments)
        assert (ended.status, ended.err) == (0, "")
        pages.append(f"$ caddie {' '.join(arguments)}\n{ended.out}")
    same_as_kept(HELP, "\n".join(pages))


def test_every_verb_is_tested() -> None:
    assert tuple(sorted(app.commands)) == VERBS


def test_no_verb_is_a_call_for_help(caddie: Call) -> None:
    assert caddie() == caddie("--help") == caddie("-h")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("generate", " (did you mean sample?)"), ("trian", " (did you mean train or track?)"), ("zzz", "")],
)
def test_a_verb_of_another_program_is_answered_with_ours(typed: str, hint: str, caddie: Call) -> None:
    ended = caddie(typed)
    assert (ended.status, ended.err) == (2, f"caddie: no command {typed}{hint}; see `caddie --help`\n")


def test_other_names_of_verbs_are_no_verbs() -> None:
    assert ELSEWHERE.keys() <= app.commands.keys()
    assert not {name for names in ELSEWHERE.values() for name in names} & app.commands.keys()


def test_version(caddie: Call) -> None:
    ended = caddie("--version")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("caddie, version 0.")


def test_help_waits_for_no_library() -> None:
    code = (
        "import sys\n"
        "from caddie import cli\n"
        "for arguments in (['--help'], ['run', '--help'], ['score', '-h']):\n"
        "    sys.argv = ['caddie', *arguments]\n"
        "    try:\n"
        "        cli.main()\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'sentencepiece', 'safetensors', 'jinja2', 'huggingface_hub'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize(
    ("stream", "arguments", "status", "says"),
    [("stdout", ["techniques", "ChannelSmear"], 0, b"x_t ? (1 - "), ("stderr", ["K\u00fcrbis"], 2, b"K?rbis")],
    ids=["stdout", "stderr"],
)
def test_a_character_that_the_encoding_lacks_is_replaced(
    stream: str, arguments: list[str], status: int, says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["caddie", *arguments])
    monkeypatch.setattr(sys, stream, io.TextIOWrapper(written, "ascii", write_through=True))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert says in written.getvalue()


@pytest.fixture(scope="module")
def copy(tiny_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder to pack and report anew."""
    return Path(shutil.copytree(tiny_run.folder, tmp_path_factory.mktemp("cli") / "run"))


def other_seed(run: Path, path: Path) -> Path:
    """The result of a run as another seed would have left it."""
    result = json.loads((run / "result.json").read_text())
    result["seed"], result["sha256"]["artifact"] = 2, "0" * 64
    path.write_text(json.dumps(result))
    return path


def small_file(path: Path) -> Path:
    """A file to compress."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"abcdefgh ij" * 4 + b"\xff")
    return path


@cache
def compressed(artifact: Path, content: bytes) -> bytes:
    """What `caddie compress` makes of a file with this content."""
    return lossless.compress(artifacts.load(artifact), [content])


def arguments(verb: str, tiny: Any, copy: Path, out: Path) -> list[object]:
    """A quick use of a verb."""
    run = ["tiny", *tiny.settings, "--data", tiny.corpus, "--out", out]
    if verb == "decompress":
        path = small_file(out.with_suffix(".cz"))
        path.write_bytes(compressed(tiny.artifact, path.read_bytes()))
        return [verb, tiny.artifact, path]
    return {
        "compare": ["compare", tiny.folder, "--against", other_seed(tiny.folder, out.with_suffix(".json"))],
        "compress": ["compress", tiny.artifact, small_file(out.with_suffix(".txt"))],
        "data": ["data", tiny.text, "data.tokenizer=RawBytes", "model.vocabulary=257", "--out", out],
        "diff": ["diff", "tiny"],
        "pack": ["pack", copy, "cap=60000", "pack.coding=Packed"],
        "recipes": ["recipes"],
        "report": ["report", copy],
        "sample": ["sample", tiny.artifact, "--tokens", 3],
        "score": ["score", tiny.artifact, "--data", tiny.corpus],
        "techniques": ["techniques", "HeadGate"],
        "train": ["train", *run],
        "verify": ["verify", tiny.artifact],
    }[verb]


FACTS = {verb: fields for verb, fields in fields_by_verb().items() if verb != "study"}
"""Verb to the fields that docs/json.md gives it."""
NOT_ALWAYS = {"known_bad", "not_run"}

QUIET = ("compress", "data", "decompress", "pack", "score", "train", "verify")


@pytest.mark.parametrize("verb", FACTS)
def test_json_is_one_object_and_progress_goes_elsewhere(
    verb: str, tiny_run: Any, copy: Path, alive_once: None, unprobed: None, caddie: Call, tmp_path: Path
) -> None:
    ended = caddie(*arguments(verb, tiny_run, copy, tmp_path / "out"), "--json")
    assert ended.status == 0
    assert ended.out.count("\n") == 1
    facts = json.loads(ended.out, parse_constant=pytest.fail)
    assert FACTS[verb] - NOT_ALWAYS == set(facts)
    assert "caddie: " not in ended.err


@pytest.mark.long
@pytest.mark.parametrize("verb", FACTS)
def test_people_get_text_and_quiet_is_quiet(
    verb: str, tiny_run: Any, copy: Path, alive_once: None, unprobed: None, caddie: Call, tmp_path: Path
) -> None:
    given = arguments(verb, tiny_run, copy, tmp_path / "out")
    ended = caddie(*given, *(["--quiet"] if verb in QUIET else []))
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.strip()
    assert not ended.out.startswith("{")


def test_what_comes_next_can_be_pasted(
    tiny_run: Any, alive_once: None, caddie: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = SimpleNamespace(steps=2, tokens=256, final_loss=5.0)
    monkeypatch.setattr("caddie.run.run.train_recipe", lambda *arguments: trained)
    out = tmp_path / "two words"
    ended = caddie("train", "tiny", *tiny_run.settings, "--data", tiny_run.corpus, "--out", out, "--quiet")
    assert ended.out.endswith(f"; next: caddie pack '{out}'\n")


def test_a_file_comes_back(tiny_run: Any, caddie: Call, tmp_path: Path) -> None:
    file = small_file(tmp_path / "file")
    assert caddie("compress", tiny_run.artifact, file).status == 0
    ended = caddie("decompress", tiny_run.artifact, tmp_path / "file.cz", "--out", tmp_path / "again")
    assert ended.out == f"{tmp_path / 'again'}: {file.stat().st_size} bytes\n"
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    for again in (["compress", tiny_run.artifact, file], ["decompress", tiny_run.artifact, tmp_path / "file.cz"]):
        ended = caddie(*again)
        assert (ended.status, ended.out) == (2, "")
        assert "exists; name another file with --out or remove it" in ended.err, "nothing is overwritten"


def test_progress_is_told_on_standard_error(
    tiny_run: Any, copy: Path, alive_once: None, caddie: Call, tmp_path: Path
) -> None:
    told = caddie(*arguments("train", tiny_run, copy, tmp_path / "out"), "--json").err.splitlines()
    assert told[0] == "prepare"
    assert "train" in told
    assert any(line.startswith("100%  step 2  loss ") for line in told)
    assert told[-1].strip().startswith("forecast: file about ")


@pytest.mark.long
def test_pack_at_another_cap_keeps_the_artifact_that_was_scored(copy: Path, caddie: Call, tmp_path: Path) -> None:
    scored = (copy / "artifact.caddie").read_bytes()
    quick = ("pack.fit=FillCap", "pack.coding=Packed(codec=Zlib)")
    ended = caddie("pack", copy, "cap=4500", *quick)
    assert ended.status == 0
    [path] = copy.glob("artifact-4500-*.caddie")
    assert f"written  {path}\nnext     caddie score {path} --data " in ended.out
    assert 0.98 * 4500 <= path.stat().st_size <= 4500, "a few bytes are a step"
    assert (copy / "artifact.caddie").read_bytes() == scored
    assert re.match(r"calibrate\n 50%  .+ of .+ tokens\n(100%  .+\n)?pack\n      candidate 1: a file of ", ended.err)
    result = json.loads((copy / "result.json").read_text())
    (copy / "result.json").write_text(json.dumps(result | {"world": 2}))
    assert "several processes calibrated this run" in caddie("pack", copy, "cap=4500", *quick).err
    given = ("cap=4000", *quick, "--out", tmp_path / "a", "--json", "--quiet")
    facts = json.loads(caddie("pack", copy, *given).out)
    assert facts["artifact"] == str(tmp_path / "a")
    assert (tmp_path / "a").stat().st_size == facts["artifact_bytes"] <= 4000
    assert facts["compression"]["predicted_bits_per_byte"] > 0
    assert facts["compression"]["step_more_bits_per_byte"] < 0 < facts["compression"]["step_fewer_bits_per_byte"]
    assert len(facts["compression"]["curve"]) > 1
    assert not list(copy.glob("artifact-4000*"))
    kept = path.read_bytes()
    assert caddie("pack", copy, "cap=4500", *quick[:1], "pack.coding=Packed(codec=Lzma)").status == 0
    assert (path.read_bytes(), len(list(copy.glob("artifact-4500-*.caddie")))) == (kept, 2), "one for each setting"


@pytest.mark.long
def test_a_policy_s_cap_counts_the_code(copy: Path, unprobed: None, caddie: Call) -> None:
    quick = ("pack.fit=FillCap", "pack.coding=Packed(codec=Zlib)")
    kept = (copy / "recipe.json").read_text()
    recipe = json.loads(kept)
    recipe["recipe"]["pack"]["policy"] = "contest-2026"
    (copy / "recipe.json").write_text(json.dumps(recipe))
    source = json.loads((copy / "result.json").read_text())["source"]
    code = source["needed_bytes"] + source["training_bytes"]
    ended = caddie("pack", copy, f"cap={code + 4500}", *quick, "--json")
    facts = json.loads(ended.out)
    path = Path(facts["artifact"])
    counted, free = facts["cap"].pop("code"), facts["ledger"]["tokenizer"]
    assert (
        f"less code of {counted['source_needed']:,} to score and {counted['source_training']:,} to train" in ended.err
    )
    assert facts["cap"] == {"policy": "contest-2026", "bytes": code + 4500, "uncounted": {"tokenizer": free}}
    assert counted["source_needed"] == source["needed_bytes"]
    assert abs(sum(counted.values()) - code) < 100, "the script holds these settings"
    left = code + 4500 - sum(counted.values())
    assert facts["cap_bytes"] == left + free
    assert 0.98 * left <= path.stat().st_size - free <= left
    checks = json.loads(caddie("verify", path, "--json").out)["checks"]
    (copy / "recipe.json").write_text(kept)
    evidence = next(check["evidence"] for check in checks if "bytes" in check["evidence"])
    cap_bytes = int(re.search(r" of ([\d,]+) bytes", evidence)[1].replace(",", ""))  # type: ignore[index]
    assert abs(cap_bytes - (left + free)) < 100, "the recipe beside it has another name for its coding"


@pytest.mark.usefixtures("alive_once")
def test_what_a_policy_leaves_for_the_file_is_told_before_training(tiny_run: Any, caddie: Call, tmp_path: Path) -> None:
    given = ("train", "tiny", *tiny_run.settings, "pack.policy=strict", "--data", tiny_run.corpus, "--out", tmp_path)
    lines = caddie(*given).err.splitlines()
    told = next(number for number, line in enumerate(lines) if "for the file" in line)
    assert lines[told].strip().startswith("strict: 1,000,000 bytes, less code of ")
    assert told < next(number for number, line in enumerate(lines) if "loss" in line)


def test_run_prints_the_result_and_keeps_it(tiny_run: Any) -> None:
    kept = json.loads((tiny_run.folder / "result.json").read_text())
    assert tiny_run.printed == {"folder": str(tiny_run.folder), **kept}
    assert kept["bits_per_byte"] < 6, "two steps of learning the eleven letters; without a model a byte has 8 bits"
    assert kept["artifact_bytes"] == tiny_run.artifact.stat().st_size


@pytest.mark.long
def test_score_prints_both_figures_at_the_top(tiny_run: Any, caddie: Call) -> None:
    facts = json.loads(caddie("score", tiny_run.artifact, "--data", tiny_run.corpus, "--json", "--quiet").out)
    assert facts["bits_per_byte"] == pytest.approx(tiny_run.printed["bits_per_byte"], abs=1e-6)
    assert facts["artifact_bytes"] == tiny_run.printed["artifact_bytes"]


def test_recipes_are_listed_with_size_and_public_figures(caddie: Call) -> None:
    listed = {recipe["name"]: recipe for recipe in json.loads(caddie("recipes", "--json").out)["recipes"]}
    assert {"baseline", "fp16_embedding", "lower_lr", "tiny"} <= set(listed)
    sizes = {"baseline": 17_059_912, "fp16_embedding": 16_765_000, "lower_lr": 17_059_912, "tiny": 4_424_323}
    assert {name: listed[name]["parameters"] for name in sizes} == sizes
    assert all(recipe["why"].endswith(".") for recipe in listed.values())
    own, records = (part.splitlines() for part in caddie("recipes").out.split("Public results"))
    assert own[3].split()[:3] == ["tiny", "4,424,323", "The"], "the first without a public score"
    scores = [float(line.split()[2]) for line in records if line[:1].isalpha() and line.split()[2].startswith("1.")]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == len([recipe for recipe in listed.values() if recipe["public"]])
    assert listed["baseline"]["base"] is None
    assert {listed[name]["base"] for name in ("fp16_embedding", "lower_lr", "tiny")} == {"baseline"}
    assert listed["tiny"]["public"] == []
    figure = listed["fp16_embedding"]["public"][0]
    assert figure["bits_per_byte"] == 1.21972502
    assert figure["artifact_bytes"] == 15_896_222
    assert figure["label"] == "8xH100, seed 1337"
    assert figure["source"].endswith("2026-03-18_FP16Embed_WD3600")


def test_diff_shows_what_a_recipe_changes(caddie: Call) -> None:
    lines = caddie("diff", "lower_lr").out.splitlines()
    assert [line.split() for line in lines] == [
        ["setting", "baseline", "->", "lower_lr"],
        ["train.optimizers.matrix.lr", "0.04", "->", "0.02"],
        ["train.optimizers.embedding.lr", "0.05", "->", "0.03"],
        ["train.optimizers.scalar.lr", "0.04", "->", "0.02"],
        [],
        ["from", "to", "difference"],
        ["parameters", "17,059,912", "17,059,912", "none"],
        ["training", "MFLOP", "per", "token", "130.6", "130.6", "none"],
    ]


def test_diff_tells_what_a_class_in_anothers_place_has_by_default(caddie: Call) -> None:
    lines = caddie("diff", "tiny", "tiny", "model.block.mlp=SwiGLU").out.splitlines()
    assert lines[1].split(maxsplit=1)[1] == "ReluSquared(hidden=128) -> SwiGLU"
    assert lines[2].split(maxsplit=1) == ["model.block.mlp.hidden", "128 -> 1024, the default of SwiGLU"]
    assert "default" not in caddie("diff", "tiny", "tiny", "model.block.mlp=SwiGLU(hidden=64)").out


def test_diff_tells_size_and_work(caddie: Call) -> None:
    lines = caddie("diff", "baseline", "three_layer_recurrence").out.splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["parameters", "17,059,912", "35,944,536", "+110.7%"],
        ["training", "MFLOP", "per", "token", "at", "the", "start", "130.6", "284.7", "+118.1%"],
        ["training", "MFLOP", "per", "token", "at", "the", "end", "130.6", "426.3", "+226.5%"],
    ]
    facts = json.loads(caddie("diff", "baseline", "baseline", "--json").out)
    assert facts["diff"] == {}
    assert facts["training_flops_per_token"]["from"] == facts["training_flops_per_token"]["to"]
    assert facts["training_flops_per_token"]["to"]["end"] == pytest.approx(130.5e6, rel=0.001)
    assert caddie("diff", "baseline").out.startswith("baseline -> baseline: the same settings\n")


def test_diff_shows_the_name_that_was_typed(caddie: Call) -> None:
    assert caddie("diff", "best_record", "ngram_tilt").out.startswith("best_record (ngram_tilt) -> ngram_tilt: ")
    alone = caddie("diff", "best_record_mini", "model.depth=6").out
    assert alone.splitlines()[0].endswith(" -> best_record_mini")
    assert alone.splitlines()[1].strip() == "(ngram_tilt_mini)"
    facts = json.loads(caddie("diff", "champion", "best_record", "--json").out)
    assert (facts["from"], facts["to"]) == ("champion", "ngram_tilt")


def test_diff_has_a_line_for_each_key_that_changed(caddie: Call) -> None:
    lines = caddie("diff", "ngram_tilt", "champion").out.splitlines()
    starts = [line.split()[0] for line in lines if line.startswith("pack.quantizers")]
    assert starts == [f"pack.quantizers.{key}" for key in ("embedding", "matrix", "head", "blocks.*.mlp.*")]
    assert "pack.quantizers.head            Rows -> Waterfilling" in lines
    assert "                                -> (absent)" in lines


@pytest.mark.parametrize("arguments", [["recipes"], *(["diff", name] for name in ("tiny", "own_mlps", "ternary"))])
def test_lists_fit_a_terminal(arguments: list[str], caddie: Call) -> None:
    assert max(map(len, caddie(*arguments).out.splitlines())) <= 79


def test_diff_takes_two_recipes_and_settings(caddie: Call) -> None:
    given = ("diff", "fp16_embedding", "lower_lr", "train.optimizers.matrix.lr=0.06")
    assert caddie(*given).out.splitlines()[0].split() == ["setting", "fp16_embedding", "->", "lower_lr"]
    facts = json.loads(caddie(*given, "--json").out)
    assert (facts["from"], facts["to"]) == ("fp16_embedding", "lower_lr")
    assert facts["diff"]["model.block.mlp.hidden"] == 1024
    assert "train.optimizers.matrix.lr" not in facts["diff"]
    assert facts["parameters"] == {"from": 16_765_000, "to": 17_059_912}
    alone = json.loads(caddie("diff", "tiny", "model.depth=6", "--json").out)
    assert alone["from"] == "baseline"
    assert alone["diff"]["model.depth"] == 6


@pytest.mark.long
def test_a_recipe_whose_file_has_an_equals_sign_is_no_setting(
    caddie: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("depth=3.toml").write_text('base = "tiny"\nmodel.depth = 3\n')
    assert json.loads(caddie("diff", "tiny", "depth=3.toml", "--json").out)["diff"] == {"model.depth": 3}
    assert json.loads(caddie("doctor", "depth=3.toml", "--quick", "--json").out)["recipe"] == "depth=3.toml"
    assert caddie("diff", "tiny", "depth=4.toml").err.startswith("caddie: no setting depth"), "there is no such file"


@pytest.mark.long
@pytest.mark.parametrize("where", [("tiny",), (), ("lower_lr", "tiny")], ids=["one", "none", "two"])
def test_cap_is_short_for_a_setting(where: tuple[str, ...], caddie: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    if where:
        facts = json.loads(caddie("diff", *where, "cap=300000", "--json").out)
        assert facts["diff"]["pack.cap_bytes"] == 300_000
        assert caddie("diff", *where, "cap=1", "pack.cap_bytes=2").err.startswith("caddie: pack.cap_bytes is set twice")
    else:  # a verb that knows a recipe by default
        examined = list[Any]()
        found = SimpleNamespace(to_json=dict, text=str, go=True)
        monkeypatch.setattr("caddie.doctor.examine", lambda *given, **how: examined.append(given) or found)
        assert caddie("doctor", "cap=300000").status == 0
        assert examined == [("tiny", ("pack.cap_bytes=300000",))]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The studies that verbs made, which are not run."""
    studies = list[Any]()
    monkeypatch.setattr("caddie.cli.study._run", lambda study, *how, **more: studies.append(study) or 0)
    return studies


def test_a_sweep_takes_caps(made: list[Any], caddie: Call) -> None:
    assert caddie("sweep", "tiny", "cap=200000,300000", "--steps", 2).status == 0
    assert [entry.diff for entry in made[0].entries.values()] == [
        {"pack.cap_bytes": 200_000},
        {"pack.cap_bytes": 300_000},
    ]


def test_a_path_of_one_value_in_a_sweep_is_set_in_its_recipe_too(made: list[Any], caddie: Call) -> None:
    assert caddie("sweep", "tiny", "model.depth=2,3", "train.clip_norm=0.5").status == 0
    assert caddie("sweep", "tiny", "model.depth=2", "train.clip_norm=0.5").status == 0
    assert [study.base.train.clip_norm for study in made] == [0.5, None]
    assert [[entry.diff for entry in study.entries.values()] for study in made] == [
        [{"model.depth": 2}, {"model.depth": 3}],
        [{"model.depth": 2, "train.clip_norm": 0.5}],
    ]


def test_a_missing_text_is_told_before_anything_else(caddie: Call, tmp_path: Path) -> None:
    ended = caddie("run", "tiny", "--data", tmp_path / "none", "--out", tmp_path / "run")
    assert ended.status == 2
    assert ended.err.startswith(f"caddie: {tmp_path / 'none'}: no such file or folder; give text, JSON lines")
    assert ended.err.count("\n") == 1


@pytest.mark.long
def test_seconds_is_short_for_a_setting(tiny_run: Any, alive_once: None, caddie: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = [setting for setting in tiny_run.settings if not setting.startswith("train.seconds=")]
    ended = caddie("train", "tiny", *settings, "--seconds", 90, "--data", tiny_run.corpus, "--out", out, "--quiet")
    assert ended.status == 0
    trained = json.loads((out / "recipe.json").read_text())
    assert trained["recipe"]["train"]["seconds"] == 90
    assert trained["seed"] == 1337


def test_a_sample_cannot_steer_the_terminal(tiny_run: Any, caddie: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        import_module("caddie.inference.sample"), "sample", lambda *arguments: b"one\n\x1b[2Jtwo\x07 \xc3\xa9"
    )
    assert caddie("sample", tiny_run.artifact).out == "one\n\ufffd[2Jtwo\ufffd é\n"


def test_a_stranger_s_long_word_is_shortened(caddie: Call) -> None:
    ended = caddie("run", "tiny", "model.width=" + "x\x1b[2J" * 5000)
    assert ended.status == 2
    assert ended.err.startswith("caddie: model.width must be a whole number, not x")
    assert len(ended.err) < 700
    assert "\x1b" not in ended.err


def raises(error: type[BaseException] | BaseException) -> Call:
    """A function that takes anything and raises this."""

    def function(*given: object, **how: object) -> NoReturn:
        raise error

    return function


def test_a_model_that_memory_cannot_hold(caddie: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
    monkeypatch.setattr("caddie.recipes.catalog.find", raises(error))
    ended = caddie("diff", "tiny")
    assert ended.status == 2
    assert ended.err == "caddie: not enough memory; take a smaller model, batch or sequence length\n"


def test_our_own_mistakes_are_not_hidden(caddie: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caddie.recipes.catalog.find", raises(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        caddie("diff", "tiny")


def test_ctrl_c_is_one_line_and_status_130(caddie: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caddie.recipes.catalog.find", raises(KeyboardInterrupt))
    ended = caddie("diff", "tiny")
    assert (ended.status, ended.out, ended.err.strip()) == (130, "", "caddie: interrupted")


def test_a_study_says_what_it_will_do_and_how_to_go_on(caddie: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caddie.lab.runner.run_study", raises(KeyboardInterrupt))
    ended = caddie("sweep", "tiny", "model.depth=2,3", "--seeds", 2, "--steps", 5)
    assert (ended.status, ended.out) == (130, "")
    first, last = ended.err.splitlines()
    assert first == "6 runs: 3 recipes, 2 seeds each; after the first run the time left is known"
    assert last.startswith("caddie: stopped; go on with: caddie ")
    monkeypatch.setattr("caddie.cli.study.typed_command", lambda: ".venv/bin/caddie sweep tiny")
    typed = caddie("sweep", "tiny", "model.depth=2,3").err.splitlines()[-1]
    assert typed == "caddie: stopped; go on with: .venv/bin/caddie sweep tiny"
    timed = caddie("sweep", "tiny", "model.depth=2,3", "--seeds", 2, "--seconds", 30).err
    assert "2 seeds each; training takes up to 3.0 min, after" in timed


def test_the_table_of_packings_comes_after_the_display(
    tiny_run: Any, caddie: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caddie.run.compare_packings.compare", lambda *given: {})
    monkeypatch.setattr("caddie.run.compare_packings.summary", lambda facts: "table")
    monkeypatch.setattr("caddie.report.display.Display.__exit__", lambda *given: print("closed"))
    assert caddie("pack", tiny_run.folder, "--compare").out == "closed\ntable\n"


@pytest.mark.parametrize("verb", ["run", "replay"])
def test_how_to_go_on_is_the_last_line_below_the_display(
    verb: str, tiny_run: Any, caddie: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"caddie.run.{verb}.{verb}", raises(KeyboardInterrupt))
    monkeypatch.setattr("caddie.report.display.Display.__exit__", lambda *given: print("closed", file=sys.stderr))
    lines = caddie(verb, tiny_run.folder, "--out", tmp_path / "again").err.splitlines()
    assert lines[-2] == "closed"
    assert "go on with: caddie " in lines[-1]


def test_many_processes_without_a_gpu_are_told_first(
    tiny_run: Any, caddie: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caddie.runtime.distributed.local_device", lambda: SimpleNamespace(type="cpu"))
    monkeypatch.setattr("caddie.runtime.distributed.launch", lambda gpus, arguments: 0)
    monkeypatch.setattr("caddie.runtime.distributed.allowed_cores", lambda: {0, 1})
    given = ("run", "tiny", *tiny_run.settings, "--data", tiny_run.corpus, "train.micro_batches=4", "--gpus")
    assert caddie(*given, 4).err == "no GPU here: 4 processes on 2 cores of a CPU\n"
    assert caddie(*given, 2).err == ""


@pytest.mark.usefixtures("unprobed")
def test_verify_holds_a_file_against_the_cap_that_it_was_packed_for(
    tiny_run: Any, caddie: Call, tmp_path: Path
) -> None:
    def size(path: Path, *settings: str) -> str:
        checks = json.loads(caddie("verify", path, *settings, "--json").out)["checks"]
        return next(str(check["evidence"]) for check in checks if "bytes" in check["evidence"])

    cap = tiny_run.printed["cap_bytes"]
    assert f" of {cap:,} bytes" in size(tiny_run.artifact)
    assert " of 70,001 bytes" in size(tiny_run.artifact, "cap=70001")
    of_name = dict.fromkeys(("artifact-65432.caddie", "artifact-65432-0a1b2c3d.caddie"), "65,432")
    others = dict.fromkeys(("elsewhere.caddie", "artifact-999999999.caddie"), "16,000,000")
    for name, expected in (of_name | others).items():
        shutil.copy(tiny_run.artifact, tmp_path / name)
        assert f" of {expected} bytes" in size(tmp_path / name)


@pytest.mark.usefixtures("unprobed")
def test_verify_fails_a_file_that_the_result_beside_it_is_not_of(tiny_run: Any, caddie: Call, tmp_path: Path) -> None:
    shutil.copy(tiny_run.artifact, tmp_path)
    result = json.loads((tiny_run.folder / "result.json").read_text())
    for sha256, expected in ((result["sha256"]["artifact"], 0), ("0" * 64, 1)):
        result["sha256"]["artifact"] = sha256
        (tmp_path / "result.json").write_text(json.dumps(result))
        ended = caddie("verify", tmp_path / tiny_run.artifact.name)
        assert (ended.status, "FAIL  file of the result: " in ended.out) == (expected, bool(expected))


@pytest.mark.parametrize(("chunk", "learned"), [(32_768, False), pytest.param(512, True, marks=pytest.mark.long)])
def test_a_text_shorter_than_a_chunk_says_that_nothing_is_learned(
    chunk: int, learned: bool, tiny_run: Any, caddie: Call
) -> None:
    ttt = (f"score.ttt=ChunkSGD(chunk_tokens={chunk})", "score.ttt.sgd.epochs=1")
    facts = json.loads(caddie("score", tiny_run.artifact, "--data", tiny_run.corpus, *ttt, "--json", "--quiet").out)
    gained = abs(facts["adaptive"]["bits_per_byte"] - facts["sliding"]["bits_per_byte"])
    assert (gained > 1e-4) == learned
    tokens = facts["adaptive"]["tokens"]
    said = f"Test-time training makes no update: the text has {tokens:,} predictions, a chunk 32,768"
    found = [note for note in facts["notes"] if note.startswith("Test-time training makes")]
    assert found == ([] if learned else [f"{said}; set score.ttt.chunk_tokens below {tokens:,}."])


@pytest.mark.parametrize("documents", [1, 2])
def test_a_score_of_one_document_says_how_little_that_is(
    documents: int, tiny_run: Any, caddie: Call, tmp_path: Path
) -> None:
    texts = [f"{number} " * 400 for number in range(documents)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    known = ("--tokenizer", tiny_run.artifact, "--against", tiny_run.corpus)
    caddie("data", tmp_path / "few.jsonl", *known, "--out", tmp_path / "few", "--quiet")
    facts = json.loads(caddie("score", tiny_run.artifact, "--data", tmp_path / "few", "--json", "--quiet").out)
    little = "The held-out text is a single document: other texts may score quite differently."
    assert facts["notes"] == [little] * (documents == 1)


def test_a_setting_typed_as_an_option_is_shown_as_a_setting(caddie: Call) -> None:
    ended = caddie("run", "tiny", "--steps", "10")
    assert ended.status == 2
    assert "No such option '--steps'" in ended.err
    assert "settings have no dashes: PATH=VALUE, as train.steps=100; see `caddie run --help`" in ended.err
    assert "settings" not in caddie("recipes", "--steps").err, "it takes none"


def test_a_wrong_option_is_not_said_to_mean_a_hidden_one(caddie: Call) -> None:
    assert "--events" not in caddie("score", "artifact.caddie", "--device").err
    assert "'--documents'" in caddie("score", "artifact.caddie", "--document").err


def test_a_run_that_is_not_there_is_named(caddie: Call, tmp_path: Path) -> None:
    ended = caddie("compare", tmp_path / "none", "--against", tmp_path)
    assert (ended.status, ended.err) == (2, f"caddie: no {tmp_path / 'none'}; name the folders of finished runs\n")
