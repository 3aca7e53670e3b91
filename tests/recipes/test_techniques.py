"""What is known of techniques: that all are found and documented, how they are shown, and how one is added."""

import inspect
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from filecmp import dircmp
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from conftest import TINY
from processes import CONTEXT
from reference_pages import glossary_page, techniques_page
from safetensors.torch import load_file

from caddie import cli
from caddie.config import Config, Range, field_types, parse_assignment, paths, variants
from caddie.errors import UserError
from caddie.model.parameters import Initial
from caddie.recipes import techniques
from caddie.recipes.glossary import Term, simple, terms
from caddie.recipes.recipe import Recipe
from caddie.recipes.technique_pages import details, overview
from caddie.recipes.techniques import Measurement, Socket, find, sockets
from caddie.report.tables import WIDTH, columns

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
WALK = DOCS / "tutorials" / "technique.md"

PLAIN = {
    "Constant": "a start without chance, for scales, gates and what must be zero",
    "Dense": "a learned matrix, the ordinary case; its settings are techniques",
    "FanIn": "PyTorch's default start",
    "FanInNormal": "the same with a normal distribution",
    "Float32": "a number format",
    "GPT": "the model itself; its settings are sockets",
    "GroupedQueryAttention": "attention itself; its settings are techniques",
    "Normal": "a plain start",
    "RMSNorm": "the norm that everything is measured against",
    "PlainRoPE": "positions as everywhere; its settings are techniques",
    "RowConstants": "a start without chance",
    "SequentialStream": "the text in its order",
    "TokenEmbedding": "a table; its settings are techniques",
}
"""Variants that are no technique of their own, and why not."""

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def known() -> list[Socket]:
    """All that is known, made once."""
    return sockets()


COPIED = (
    "conftest.py",
    *(f"helpers/{name}.py" for name in ("run_folder", "samples", "variations")),
    "model/test_gpt.py",
)
"""Files of tests that the commands of the page need."""


def configs(cls: type[Config] = Config) -> list[type[Config]]:
    """Every config of the package."""
    below = [found for sub in cls.__subclasses__() for found in [sub, *configs(sub)]]
    return [found for found in dict.fromkeys(below) if found.__module__.startswith("caddie.")]


# What is found


@pytest.mark.long
@pytest.mark.parametrize(("name", "made"), [("techniques", techniques_page), ("glossary", glossary_page)])
def test_the_page_is_up_to_date(name: str, made: Callable[[], str], same_as_kept: Call) -> None:
    same_as_kept(DOCS / f"{name}.md", made())


def test_every_socket_and_everything_known_is_found() -> None:
    known = {socket.name: {variant.name for variant in socket.variants} for socket in sockets()}
    for cls in configs():
        studied = cls.__module__.startswith("caddie.lab.")  # a study's settings stand in no recipe
        if inspect.isabstract(cls) and variants(cls) and not studied:
            assert known[cls.__name__] == set(variants(cls))
    shown = {name for names in known.values() for name in names}
    assert {name.partition(".")[0] for name in techniques.table()} <= shown | set(known)


def test_sockets_come_in_the_order_of_a_recipe_with_their_places() -> None:
    places = {socket.name: socket.paths for socket in sockets()}
    assert places["HeadGate"] == ("model.block.attention.gate",)
    assert places["LinearMap"] == ("model.block.attention.linear", "model.block.mlp.linear")
    assert places["Optimizer"] == ("train.optimizers.*",)
    assert {"train.lr_schedule", "train.optimizers.*.momentum"} <= set(places["Schedule"])
    tops = [paths[0].split(".")[0] for paths in places.values()]
    order = [name for name in field_types(Recipe) if name in tops]
    assert tops == sorted(tops, key=order.index)


def test_base_marks_what_the_contest_began_with() -> None:
    base = {variant.name: variant.base for socket in sockets() for variant in socket.variants}
    assert base["ReluSquared"]
    assert base["Muon"]
    assert base["UNet"]
    assert not base["LeakyReluSquared"]
    assert not base["DenseGate"]


@pytest.mark.parametrize(
    "socket", [s for s in sockets() if s.paths[0].startswith(("model", "train"))], ids=lambda s: s.name
)
def test_every_part_of_model_and_training_says_why_and_whence(socket: techniques.Socket) -> None:
    for variant in socket.variants:
        entries = [entry for entry in variant.settings if entry.why or entry.source]
        if variant.name in PLAIN:
            assert not variant.why, f"{variant.name} is known, take it from PLAIN"
        elif variant.name != socket.name or not entries:
            entries.append(variant)  # type: ignore[arg-type]
        for entry in entries:
            assert re.fullmatch(r"[A-Z0-9`].*\.", entry.why), f"{entry.name}: why, as a sentence"
            assert entry.source, f"{entry.name}: paper or record"
            assert entry.what, f"{entry.name}: what"


def test_every_line_of_facts_is_about_a_class_or_setting_and_stands_once() -> None:
    lines = (Path(techniques.__file__).with_name("techniques.txt")).read_text().splitlines()
    assert len(techniques.table()) == len([line for line in lines if not line.startswith("#")])
    named = {cls.__name__: cls for cls in configs()}
    for name, facts in techniques.table().items():
        cls, _, setting = name.partition(".")
        assert not setting or setting in field_types(named[cls]), name
        assert facts not in [techniques.facts_of(base, setting) for base in named[cls].__mro__[1:]], (
            f"{name}: inherited"
        )


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "true or false"),
        (Annotated[int, Range(1, 1 << 40)], "whole number of at least 1"),
        (Annotated[float, Range(0.5, 1.0)] | None, "number from 0.5 to 1 or none"),
        (Annotated[float, Range(1e-30, 1e30)], "number above 0"),
        (Literal["row", "document"], "row or document"),
        (tuple[int, ...], "list of whole number"),
        (dict[str, Initial], "mapping to Initial"),
        (dict[str, Any], "mapping to anything"),
    ],
)
def test_types_in_words(annotation: Any, words: str) -> None:
    assert techniques._type(annotation) == words


# What was measured


MEASURED = Measurement(
    difference=-0.0021, interval=(-0.004, -0.0002), seeds=3, verdict="better", entry="it", study="study.py:scale"
)


def test_what_was_measured_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"SwiGLU": [MEASURED.but(interval=None), MEASURED], "Muon.beta2": [MEASURED]}
    monkeypatch.setattr(techniques, "measurements", lambda: known)
    said = "better, -0.0021 (-0.0040 to -0.0002, 3 seeds): it, study.py:scale"
    exact = "better, -0.0021 (3 seeds): it, study.py:scale"
    assert f"- measured here: {exact}; {said}" in " ".join(details("SwiGLU").split())
    assert "not measured" not in details("SwiGLU")
    assert said in " ".join(details("Muon.beta2").split())
    assert techniques_page().count(f"- measured here: {said}") == 1


def test_what_is_recorded_belongs_to_techniques() -> None:
    names = {
        entry.name for socket in sockets() for variant in socket.variants for entry in (variant, *variant.settings)
    }
    names |= {setting.name for socket in sockets() for setting in socket.settings}
    assert set(techniques.measurements()) <= names
    with pytest.raises(UserError, match="needs difference"):
        Measurement.from_json({})


# What is shown


def test_the_overview_has_a_line_for_each_and_fits_a_terminal() -> None:
    lines = overview().splitlines()
    assert max(map(columns, lines)) <= WIDTH
    assert "attention gate, HeadGate  model.block.attention.gate" in lines
    assert "  DenseGate: Gated attention: σ(W h + b), W (heads, width) (arXiv 2505.06708)." in lines
    assert "  ReluSquared (base): MLP activation: the square of ReLU, as in the baseline." in lines
    assert "    xsa: Each head's output minus its projection on the position's own value." in lines
    for socket in sockets():
        for variant in socket.variants:
            mark = r" \(base\)" if variant.base else ""
            line = rf"  (\S.*, )?{variant.name}{mark}: .*"
            assert variant.name == socket.name or any(re.fullmatch(line, one) for one in lines), variant.name


def test_the_sections_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    known = sockets()
    monkeypatch.setattr(techniques, "sockets", lambda: known)  # found once
    for socket in known:
        text = details(socket.name)
        assert max(columns(line) for line in text.splitlines() if " " in line.strip(" -`,")) <= WIDTH, socket.name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("headgate", {"HeadGate": ["DenseGate", "NarrowGate", "SparseGate"]}),
        ("model.block.attention.gate", {"HeadGate": ["DenseGate", "NarrowGate", "SparseGate"]}),
        ("LEAKYRELUSQUARED", {"MLP": ["LeakyReluSquared"]}),
        ("GroupedQueryAttention.xsa", {"Attention": ["GroupedQueryAttention"]}),
        ("model.block.attention.xsa", {"Attention": ["GroupedQueryAttention"]}),
        ("softcap", {"Head": []}),
        ("clip_norm", {"Train": ["Train"]}),
    ],
)
def test_anything_is_found_by_its_name(name: str, found: dict[str, list[str]]) -> None:
    assert {socket.name: [variant.name for variant in socket.variants] for socket in find(name)} == found


def test_a_setting_is_found_without_the_others() -> None:
    (socket,) = find("xsa")
    assert [setting.name for setting in socket.variants[0].settings] == ["GroupedQueryAttention.xsa"]
    assert not socket.settings
    assert [setting.name for setting in find("LeakyReluSquared")[0].settings] == ["MLP.hidden", "MLP.linear"]


def test_the_verb_lists_and_prints_the_section_of_the_page(caddie: Call) -> None:
    listed = caddie("techniques")
    assert (listed.status, listed.err, listed.out) == (0, "", overview() + "\n")
    printed = caddie("techniques", "HeadGate")
    assert (printed.status, printed.err) == (0, "")
    start = techniques_page().index("### attention gate, HeadGate\n")
    section = techniques_page()[start:].split("\n### ")[0]
    assert " ".join(section.split()) in " ".join(printed.out.split())


def test_the_verb_prints_json(caddie: Call) -> None:
    facts = json.loads(caddie("techniques", "LeakyReluSquared", "--json").out)
    (variant,) = facts["sockets"][0]["variants"]
    assert (variant["name"], variant["base"]) == ("LeakyReluSquared", False)
    assert variant["settings"][0]["default"] == "0.5"
    assert {"what", "why", "source", "elsewhere", "here"} <= set(variant)
    assert facts["words"][0]["names"][0] == "LeakyReLU squared"
    assert len(json.loads(caddie("techniques", "--json").out)["sockets"]) == len(sockets())


def test_the_name_of_a_recipe_leads_to_its_techniques(caddie: Call) -> None:
    for name in ("champion", "best_record", "baseline_mini", "champion_scale"):
        ended = caddie("techniques", name)
        expected = f"caddie: {name} is a recipe, not a technique; `caddie diff {name}` lists what it changes\n"
        assert (ended.status, ended.out, ended.err) == (2, "", expected)


def test_a_misspelt_name_is_a_mistake_with_a_suggestion(caddie: Call) -> None:
    for wrong, meant in (
        ("HaedGate", "HeadGate"),
        ("chmpion", "champion"),
        ("haedgate", "HeadGate"),
        ("pack.cap_byte", "pack.cap_bytes"),
        ("model.blok.mlp", "model.block.mlp"),
        ("softcap_formm", "softcap_form"),
        ("model.head.softcp", "model.head.softcap"),
    ):
        ended = caddie("techniques", wrong)
        assert (ended.status, ended.out) == (2, "")
        assert ended.err.startswith(f"caddie: no technique {wrong} (did you mean {meant}, ")
        assert ended.err.endswith("?); `caddie techniques` lists them\n")
        assert ended.err.count("\n") == 1


def test_a_word_of_the_texts_alone_leads_to_what_they_explain(caddie: Call) -> None:
    ended = caddie("techniques", "Kendall")
    assert ended.err.startswith("caddie: no technique Kendall"), "in no text"
    ended = caddie("techniques", "MultiPhaseGlobalSGD")
    expected = "caddie: no technique is called MultiPhaseGlobalSGD, but the word is in the text of GlobalSGD"
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.rstrip().startswith(expected)


def test_a_word_is_found_in_singular_and_plural() -> None:
    for one, more in (("parallel residual", "parallel residuals"), ("tied embedding", "tied embeddings")):
        assert find(one) == find(more)


@pytest.mark.parametrize(
    "path", ["data.validation_fraction", "model.depth", "train.seconds", "pack.cap_bytes", "score.stride"]
)
def test_every_setting_is_explained_by_its_path(path: str, caddie: Call) -> None:
    told = caddie("techniques", path)
    assert (told.status, told.err) == (0, "")
    assert f"`{path.rpartition('.')[2]}` (" in told.out


# The field's words


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("RoPE", "RoPE"),
        ("rotary", "RoPE"),
        ("partial rope", "PlainRoPE.dims"),
        ("XSA", "GroupedQueryAttention.xsa"),
        ("exclusive self-attention", "GroupedQueryAttention.xsa"),
        ("GQA", "GroupedQueryAttention"),
        ("attention gate", "HeadGate"),
        ("value residual", "ValueResidual"),
        ("VRL", "ValueResidual"),
        ("Value-Embeddings", "ValueEmbedding"),
        ("depth recurrence", "Recurrence"),
        ("looped_layers", "Recurrence"),
        ("parallel residual", "Block.parallel"),
        ("U-Net skips", "Skips"),
        ("unet", "UNet"),
        ("SmearGate", "Smear"),
        ("BigramHash", "HashedNGrams"),
        ("leakyrelu²", "LeakyReluSquared"),
        ("leaky relu squared", "LeakyReluSquared"),
        ("tied embeddings", "TiedHead"),
        ("logit softcap", "Head.softcap"),
        ("caseops", "CaseOps"),
        ("QAT", "QAT"),
        ("STE", "StraightThrough"),
        ("GPTQ", "Gptq"),
        ("SDClip", "SigmaClip"),
        ("LQER", "LowRank"),
        ("rate-distortion", "Waterfilling"),
        ("TCQ", "Trellis"),
        ("ANS", "EntropyModel"),
        ("Muon", "Muon"),
        ("MuonEq-R", "Muon.normalize_rows"),
        ("muon eq r", "Muon.normalize_rows"),
        ("NorMuon", "Muon.beta2"),
        ("Polar Express", "Muon.coefficients"),
        ("newton schulz", "Muon.steps"),
        ("EMA", "ProgressEMA"),
        ("SWA", "SWA"),
        ("LAWA", "SWA"),
        ("warmdown", "Warmdown"),
        ("gradient clipping", "Train.clip_norm"),
        ("train.optimizers.matrix.normalize_rows", "Muon.normalize_rows"),
        ("TTT", "TestTimeTraining"),
        ("Test Time Training", "TestTimeTraining"),
        ("score-first TTT", "ChunkSGD"),
        ("LoRA-TTT", "DocumentLoRA"),
    ],
)
def test_techniques_are_found_by_the_words_of_the_field(
    word: str, found: str, known: list[Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(techniques, "sockets", lambda: known)
    names = set()
    for socket in find(word):
        names |= {entry.name for entry in (socket, *socket.settings, *socket.variants)}
        names |= {setting.name for variant in socket.variants for setting in variant.settings}
    assert found in names
    assert found.rpartition(".")[2] in details(word)


def test_the_verb_explains_words_that_are_no_technique(caddie: Call) -> None:
    told = caddie("techniques", "bits", "per", "byte")
    assert (told.status, told.err) == (0, "")
    assert told.out.startswith("bpb, bits per byte: Loss in bits, divided by the bytes of the text")
    assert "caddie score" in told.out


@pytest.mark.parametrize("term", terms(), ids=lambda term: term.names[0])
def test_what_the_glossary_names_exists(term: Term) -> None:
    """Settings are taken by a recipe, classes and settings of classes exist, and so do verbs, options and files."""
    classes = {cls.__name__: cls for cls in configs()}
    for place in term.places:
        path, sign, _ = place.partition("=")
        owner, _, setting = place.partition(".")
        if place.startswith("caddie "):
            verb, *options = place.split()[1:]
            known = {option for parameter in cli.app.commands[verb].params for option in parameter.opts}
            assert set(options) <= known, place
        elif "/" in place:
            assert (ROOT / place).is_file(), place
        elif owner in classes:
            assert not setting or setting in field_types(classes[owner]), place
        elif sign:
            Recipe().but(dict([parse_assignment(place)]))
        else:
            assert path in paths(Recipe()), place


@pytest.mark.parametrize("path", ["train.batch_tokens", "train.sequence_length", "train.prefix_loss"])
def test_a_number_that_may_be_a_schedule_comes_before_the_schedules(path: str) -> None:
    own, *others = find(path)
    assert [setting.name for variant in own.variants for setting in variant.settings] == [f"Train.{path[6:]}"]
    assert others
    assert all(path in other.paths for other in others)


def test_a_word_of_the_glossary_has_one_meaning_in_a_plain_sentence() -> None:
    names = [simple(name) for term in terms() for name in term.names]
    assert {name for name in names if names.count(name) > 1} == set()
    for term in terms():
        assert re.fullmatch(r"[A-Z0-9].*[^.]\.", term.meaning), term.meaning
        assert not re.match(r"(What|Whether|How|Where|Who|When|As)\b", term.meaning), term.meaning


def test_links_of_the_glossary_lead_to_headings() -> None:
    headings = [line.lstrip("# ") for line in techniques_page().splitlines() if line.startswith("#")]
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\((?:techniques\.md#)?([^)]*)\)", glossary_page())
    assert len(links) > 80
    for link in links:
        assert link in anchors or (DOCS / link).is_file(), link


# How one is added


def follow(folder: Path, commands: list[str], small: list[str]) -> None:
    """Do what the page says with the package in `folder`, in a process of its own; `out` there is what it printed."""
    with (folder / "out").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # What was imported for all processes was the package itself, not its copy.
    copied = {"caddie", *(Path(name).stem for name in COPIED)}
    for name in [name for name in sys.modules if name.split(".")[0] in copied]:
        del sys.modules[name]
    added = [str(folder), str(folder / "tests"), str(folder / "tests" / "helpers")]
    sys.path[:0] = added
    os.environ["PYTHONPATH"] = os.pathsep.join(added)
    os.chdir(folder)

    from run_folder import make_result, write_run

    import caddie
    from caddie import cli

    assert caddie.__file__.startswith(str(folder / "caddie"))
    # Comparing tensors would import what spreads them over machines, for a second.
    torch.testing._comparison._HAS_DTENSOR = False
    for command in commands:
        name, *words = shlex.split(command)
        print("$", command, flush=True)
        if name == "pytest":
            assert pytest.main(["-p", "no:cacheprovider", *words]) == 0
            continue
        assert name == "caddie"
        if words[0] == "run":  # packing and scoring take long, and know nothing of gates
            words = ["train", *words[1:], *small]
        try:
            sys.argv = [name, *words]
            cli.main()
        except SystemExit as ended:
            if ended.code:
                raise
        if words[0] == "train":
            run = Path(words[words.index("--out") + 1])
            weights = load_file(run / "weights.safetensors")
            moved = {name for name, weight in weights.items() if ".gate." in name and weight.any()}
            print(run.name, "moved", *sorted(moved), flush=True)
            result = make_result()
            result["sha256"]["recipe"] = result["sha256"]["artifact"] = run.name.ljust(64, "0")
            write_run(run, result)
    sys.stdout.flush()


@pytest.mark.long
def test_following_the_page_adds_a_technique_with_a_class_and_a_line(tmp_path: Path) -> None:
    text = WALK.read_text()
    (file,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (source,) = re.findall(
        r"^class SignedGate.*?(?=\n\n\ngate = )", file, flags=re.DOTALL | re.MULTILINE
    )  # the two classes
    (facts,) = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    blocks = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    commands.remove(f'pytest tests/recipes/{Path(__file__).name} -m "" --update-golden -k up_to_date')

    package, tests = tmp_path / "caddie", tmp_path / "tests"
    shutil.copytree(ROOT / "caddie", package)
    for name in COPIED:
        (tests / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, tests / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (package / "model" / "gates.py").open("a") as file:
        file.write(f"\n\n{source}")
    with (package / "recipes" / "techniques.txt").open("a") as file:
        file.write(facts)
    changed = differing(dircmp(ROOT / "caddie", package, ignore=["__pycache__"]))
    assert sorted(changed) == ["gates.py", "techniques.txt"]

    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"Paragraph {number}: {'some words ' * 30}" for number in range(300))
    )
    small = [*(setting.replace("train.steps=2", "train.steps=3") for setting in TINY), "--data", "text.txt", "--quiet"]
    process = CONTEXT.Process(target=follow, args=(tmp_path, commands, small))
    process.start()
    process.join()
    out = (tmp_path / "out").read_text()
    assert process.exitcode == 0, out
    parts = dict(re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", out, flags=re.MULTILINE))
    assert list(parts) == commands
    told = [parts[command] for command in commands]
    assert "\n#### SignedGate\n\n1 + W h[:channels]" in told[0]
    assert "- why: A head can take back what another wrote, and its gate never saturates." in told[0]
    assert re.search(r"[^0]\d* passed", told[1])
    assert "shipped moved blocks.0.attention.gate.map.weight blocks.1.attention.gate.map.weight" in told[2]
    assert told[3].endswith("base moved\n")


def differing(compared: dircmp[str]) -> list[str]:
    """Files that two folders do not share."""
    here = [*compared.left_only, *compared.right_only, *compared.diff_files, *compared.funny_files]
    return here + [name for inner in compared.subdirs.values() for name in differing(inner)]
