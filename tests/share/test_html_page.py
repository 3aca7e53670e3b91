"""The page of `caddie export --to html`: opened from disk without a network, and beside the package's own numbers."""

import ast
import base64
import html
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Browser
from packed_models import BYTES, write_artifact
from rich_models import RICH, TINY
from run_folder import make_result

from caddie.config import field_types
from caddie.data.tokenizers import SentencePieceTokenizer, bpe
from caddie.errors import UserError
from caddie.model import GPT, MUDD, HashedNGrams, RandomMap
from caddie.pack.artifact import Artifact
from caddie.pack.compress import Pack
from caddie.recipes.catalog import find, shipped
from caddie.recipes.recipe import Recipe
from caddie.recipes.shrink import small_copy
from caddie.score import Scoring, Text, score
from caddie.share import program as program_module
from caddie.share.export import export

pytestmark = pytest.mark.long  # a browser, or a whole page made

DOCUMENT = (Path(__file__).resolve().parent.parent / "golden" / "recipes_before_0.2.json").read_bytes()[:3000]
"""A text that stays: with other words the model of the test ends its text before the page has written 40 tokens."""
LEFT_OUT = {
    **dict.fromkeys(("random_maps", "random_mlps"), "RandomMap"),
    **dict.fromkeys(("mudd", "last_layer_mudd"), "dense_connections"),
    "signed_bigrams": "signs",
    "gated_xsa": "xsa_gate",
}
"""Recipe to what the page cannot run: what only PyTorch can draw, and parts that it has no code for."""


def small(recipe: Recipe) -> GPT:
    """A model with every choice of a recipe, small, with ids for bytes alone."""
    return small_copy(recipe)[0].but(vocabulary=BYTES.vocabulary)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser without a network."""
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as started:
        started.ask("Network.enable")
        started.ask(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        without_motion(started)
        yield started


def without_motion(browser: Browser, value: str = "reduce") -> None:
    """Ask pages to do nothing by themselves."""
    browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": value}])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model of text, with a result beside it."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = SentencePieceTokenizer(bpe.train([DOCUMENT], 400, 100_000))
    gpt = small(find("tiny")).but(vocabulary=400)
    scoring = Scoring(sequence_length=64, stride=32)
    made = write_artifact(folder / "artifact.caddie", gpt, Pack(fit=None), tokenizer, scoring)
    result = make_result()
    result["sha256"]["artifact"] = made.sha256
    (folder / "result.json").write_text(json.dumps(result))
    return made


@pytest.fixture(scope="module")
def page(artifact: Artifact) -> Path:
    """Its page."""
    return export(artifact.path, "html", artifact.path.with_suffix(".html"))


def opened(browser: Browser, page: Path) -> Browser:
    browser.said.clear()
    browser.open(page.as_uri())
    browser.until("document.body?.dataset.ready", "yes")
    return browser


def logits_differ(browser: Browser, artifact: Artifact, page: Path) -> float:
    """Largest difference of logits on documents that are longer than a block of the page's."""
    chance = np.random.default_rng(0)
    text, bos = chance.integers(0, artifact.tokenizer.vocabulary, 45), artifact.tokenizer.bos
    text[[0, 21, 22]] = bos
    ids = torch.from_numpy(text)[None]
    with torch.no_grad():
        wanted = artifact.model(ids, ids == bos)[0].numpy()
    found = opened(browser, page).run(f"caddie.ask('logits', {{ids: {text.tolist()}}})")
    return float(np.abs(np.array(found) - wanted).max())


@pytest.mark.parametrize("name", [*RICH, "growing_rows", "tiny", "baseline", "longer_warmdown"])
def test_logits_are_the_packages(name: str, tmp_path: Path, browser: Browser) -> None:
    gpt = RICH[name].but(vocabulary=BYTES.vocabulary) if name in RICH else small(find(name))
    made = write_artifact(tmp_path / "a.caddie", gpt, Pack() if name in RICH else find(name).pack)
    assert logits_differ(browser, made, export(made.path, "html", tmp_path / "a.html")) < 1e-3


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_recipe(name: str, tmp_path: Path, browser: Browser) -> None:
    recipe = find(name)
    made = write_artifact(tmp_path / "a.caddie", small(recipe), recipe.pack)
    if name in LEFT_OUT:
        with pytest.raises(UserError, match=f"cannot run .*{LEFT_OUT[name]}"):
            export(made.path, "html", tmp_path / "a.html")
        return
    assert logits_differ(browser, made, export(made.path, "html", tmp_path / "a.html")) < 1e-3


def test_bits_are_those_of_the_plain_score(artifact: Artifact, page: Path, browser: Browser) -> None:
    tokenizer, text = artifact.tokenizer, DOCUMENT[:1500].decode()
    ids = np.concatenate([[tokenizer.bos], tokenizer.encode(text.encode())]).astype(np.uint16)
    size = len(text.encode())
    wanted = score(artifact.model, Text(ids, tokenizer.bos, size, size, size), artifact.scoring.plain)
    found = opened(browser, page).run(f"caddie.ask('score', {{text: {json.dumps(text)}}})")
    assert found["bytes"] == size
    assert found["bits"] / size == pytest.approx(wanted.bits_per_byte, abs=1e-5)
    assert [token["id"] for token in found["tokens"]] == ids[1:].tolist()
    assert sum(token["bits"] for token in found["tokens"]) == pytest.approx(found["bits"])
    best = [share for _, share, _ in found["tokens"][0]["likely"]]
    assert len(best) == 5
    assert best == sorted(best, reverse=True)


def test_it_writes_what_the_package_would(artifact: Artifact, page: Path, browser: Browser) -> None:
    settings = {"prompt": "The file ", "tokens": 100, "temperature": 0, "topK": 0, "seed": 1}
    found = opened(browser, page).run(f"caddie.ask('write', {json.dumps(settings)}).then((x) => x.ids)")
    length, bos = artifact.scoring.sequence_length, artifact.tokenizer.bos
    window = [bos, *artifact.tokenizer.encode(b"The file ").tolist()]
    given = len(window)
    assert found[:given] == window
    for chosen in found[given:]:  # a full window begins anew, half full, as in `caddie sample`
        ids = torch.tensor([window])
        with torch.no_grad():
            assert int(artifact.model(ids, ids == bos)[0, -1].argmax()) == chosen
        window.append(chosen)
        if len(window) > length:
            window = window[-(length // 2) :]


def test_a_seed_gives_one_text_and_top_k_keeps_the_likely(page: Path, browser: Browser) -> None:
    opened(browser, page)

    def written(seed: int, **others: object) -> Any:
        settings = {"prompt": "a", "tokens": 30, "temperature": 1.0, "topK": 0, "seed": seed, **others}
        return browser.run(f"caddie.ask('write', {json.dumps(settings)}).then((x) => x.ids)")

    assert written(1) == written(1) != written(2)
    assert written(1, topK=1) == written(2, topK=1) == written(3, temperature=0)


@pytest.mark.parametrize("width", [1200, 360])
def test_the_page_from_disk_without_a_network(width: int, page: Path, browser: Browser, artifact: Artifact) -> None:
    browser.size(width)
    without_motion(browser)
    opened(browser, page)
    assert browser.run("document.querySelector('h1').textContent") == "random"
    assert f"{artifact.file_bytes:,} bytes" in browser.run("document.querySelector('header').textContent")
    assert "1.5301" in browser.run("document.querySelector('header').textContent")

    browser.run("document.getElementById('prompt').value = 'caddie '; document.getElementById('tokens').value = 40; 1")
    browser.click("#go")
    browser.until("/^40 tokens/.test(document.getElementById('rate').textContent)")
    assert browser.run("document.getElementById('given').textContent") == "caddie "
    assert browser.run("document.getElementById('continued').textContent.length") > 10

    browser.run("document.getElementById('text').value = 'A file\\nof <b>bytes</b>.'; 1")
    browser.click("#bits")
    browser.until("document.getElementById('result').hidden", False)
    spans = "[...document.querySelectorAll('#map [data-index]')]"
    assert browser.run(f"{spans}.map((one) => one.textContent).join('')") == "A file\u21b5\nof <b>bytes</b>."
    assert browser.run(f"new Set({spans}.map((one) => one.style.getPropertyValue('--share'))).size") > 3
    assert browser.run("document.getElementById('source').textContent") == str(len("A file\nof <b>bytes</b>."))
    browser.click("#map [data-index='1']")
    assert browser.run("document.querySelector('#map .here').dataset.index") == "1"
    assert browser.run("document.querySelectorAll('#detail li').length") == 5
    browser.run("document.getElementById('map').focus()")
    browser.press("ArrowRight")
    assert browser.run("document.querySelector('#map .here').dataset.index") == "2"
    browser.press("End")
    assert browser.run(f"document.querySelector('#map .here') === {spans}.at(-1)")

    assert browser.run("document.documentElement.scrollWidth") <= width
    unnamed = (
        "[...document.querySelectorAll('textarea, input, button')].filter((x) => !x.labels?.length && !x.textContent)"
    )
    assert browser.run(f"{unnamed}.length") == 0
    assert browser.said == []


def test_it_begins_by_itself(page: Path, browser: Browser) -> None:
    without_motion(browser, "no-preference")
    opened(browser, page)
    browser.until("/^200 tokens|per second/.test(document.getElementById('rate').textContent)")
    browser.until("document.getElementById('result').hidden", False)
    without_motion(browser)


def test_stop_ends_it(page: Path, browser: Browser) -> None:
    without_motion(browser)
    opened(browser, page)
    # The likeliest token goes round and round, where a drawn one soon ends the text.
    browser.run("document.getElementById('tokens').value = 100000; document.getElementById('top').value = 1")
    browser.click("#go")
    browser.until("document.getElementById('rate').textContent !== ''")
    assert browser.run("document.getElementById('go').disabled")
    browser.click("#stop")
    browser.until("document.getElementById('go').disabled", False)
    assert browser.run("document.getElementById('continued').textContent.length") > 0


def test_it_hands_out_the_artifact(artifact: Artifact, page: Path, browser: Browser, tmp_path: Path) -> None:
    opened(browser, page)
    browser.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.click("#save")
    saved = tmp_path / "artifact.caddie"
    latest = time.monotonic() + 10
    while not saved.exists() and time.monotonic() < latest:
        time.sleep(0.05)
    assert saved.read_bytes() == artifact.path.read_bytes()


def test_it_fetches_nothing(page: Path) -> None:
    text = page.read_text()
    assert "default-src 'none'" in text
    assert "connect-src" not in text
    scripts = re.sub(r'<script type="text/plain" id="(artifact|engine|words)">[^<]*', "", text)
    assert not re.findall(r"https?://|src=|@import|url\(", scripts)


@pytest.mark.parametrize("place", [0.01, 0.5, 0.99])
def test_a_changed_byte_is_one_sentence(place: float, artifact: Artifact, tmp_path: Path, browser: Browser) -> None:
    data = artifact.path.read_bytes()
    changed = bytearray(data)
    changed[int(place * len(data))] ^= 4
    page = export(artifact.path, "html", tmp_path / "a.html")
    text = page.read_text()
    whole, damaged = (base64.b64encode(one).decode() for one in (data, bytes(changed)))
    assert whole in text
    page.write_text(text.replace(whole, damaged))
    browser.open(page.as_uri())
    browser.until("document.getElementById('fault')?.hidden", False)
    sentence = "This page is damaged: the model's bytes do not match their checksum; copy the page again."
    assert browser.run("document.getElementById('fault').textContent") == sentence
    assert browser.run("document.getElementById('go').disabled && document.getElementById('bits').disabled")


def test_a_browser_without_simd_is_one_sentence(page: Path, browser: Browser) -> None:
    added = browser.ask("Page.addScriptToEvaluateOnNewDocument", source="WebAssembly.validate = () => false")
    browser.open(page.as_uri())
    browser.until("document.getElementById('fault')?.hidden", False)
    browser.ask("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
    found = browser.run("document.getElementById('fault').textContent")
    assert found.startswith("This browser has no WebAssembly SIMD")
    assert found.count(".") == 1


def test_only_the_result_of_this_artifact_is_told(artifact: Artifact, page: Path, tmp_path: Path) -> None:
    assert "1.5301" in page.read_text()
    (tmp_path / "artifact.caddie").write_bytes(artifact.path.read_bytes())
    assert "held-out text" not in export(tmp_path / "artifact.caddie", "html", tmp_path / "alone.html").read_text()
    other = make_result()
    (tmp_path / "result.json").write_text(json.dumps(other))
    assert "held-out text" not in export(tmp_path / "artifact.caddie", "html", tmp_path / "other.html").read_text()


@pytest.mark.parametrize("cap", ["x", 10**400, [1]], ids=["text", "huge", "list"])
def test_a_result_of_other_kinds_is_one_line(cap: object, artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "artifact.caddie").write_bytes(artifact.path.read_bytes())
    result = json.loads(artifact.path.with_name("result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(result | {"cap_bytes": cap}))
    with pytest.raises(UserError, match=re.escape("result.json lacks what a page needs")):
        export(tmp_path / "artifact.caddie", "html")
    assert not (tmp_path / "artifact.html").exists()


def test_names_are_shown_whatever_they_are(artifact: Artifact, tmp_path: Path) -> None:
    made = tmp_path / os.fsdecode(b"my <b>; \xff.caddie")
    made.write_bytes(artifact.path.read_bytes())
    result = json.loads(artifact.path.with_name("result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(result | {"why": "half a pair: \ud800"}))
    text = export(made, "html", tmp_path / "page.html").read_text()
    assert html.unescape(text).count("caddie verify 'my <b>; ?.caddie'\n") == 1
    assert "half a pair: ?" in text
    assert "<b>;" not in text


def test_a_text_is_shown_however_long_it_is(page: Path, browser: Browser) -> None:
    """The spans of its tokens are one argument, for a call takes no 130,000."""
    browser.open(page.as_uri())
    browser.until("document.body?.dataset.ready", "yes")
    answer = "{ tokens: Array(3).fill({ piece: Uint8Array.of(97), bits: 1, likely: [], id: 0 }), bits: 3, bytes: 4 }"
    spied = "function (...given) { this.given = given.length; Element.prototype.replaceChildren.apply(this, given); }"
    browser.run(f"at('map').replaceChildren = {spied}; ask = async () => ({answer}); 1")
    browser.run("at('text').value = 'a'; measure().then(() => 1)")
    assert browser.run("[at('map').given, at('map').children.length, at('map').textContent]") == [1, 3, "aaa"]


def test_no_text_is_told_before_the_last_was_shown(page: Path, browser: Browser) -> None:
    without_motion(browser)
    opened(browser, page)
    browser.run("globalThis.post = worker.postMessage.bind(worker); globalThis.texts = 0; 1")
    browser.run("worker.postMessage = (message) => message.verb === 'seen' || post(message); 1")
    browser.run("worker.onmessage = (event) => { texts += 'told' in event.data; answered(event); }; 1")
    browser.run("document.getElementById('tokens').value = 3000; document.getElementById('top').value = 1")
    browser.click("#go")
    browser.until("document.getElementById('go').disabled", False)
    assert browser.run("texts") <= 1, "of some hundred that there would be"
    browser.run("worker.postMessage = post; texts = 0; 1")
    browser.click("#go")
    browser.until("document.getElementById('go').disabled", False)
    assert browser.run("texts") > 1


def test_the_verb(artifact: Artifact, tmp_path: Path, caddie: Callable[..., Any]) -> None:
    beside = artifact.path.with_suffix(".html")
    beside.unlink(missing_ok=True)
    ended = caddie("export", artifact.path.parent, "--to", "html")
    assert (ended.status, ended.out.strip()) == (0, str(beside))
    assert beside.exists()
    ended = caddie("export", artifact.path, "--to", "html", "--out", tmp_path / "page.html", "--json")
    assert json.loads(ended.out)["path"] == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == beside.read_bytes()
    ended = caddie("export", artifact.path, "--to", "htm")
    assert ended.status == 2
    assert ended.err.count("\n") == 1
    assert "html" in ended.err
    for wrong in ((tmp_path,), (artifact.path, "--out", artifact.path), (artifact.path, "--out", tmp_path)):
        ended = caddie("export", *wrong, "--to", "html")
        assert ended.status == 2
        assert ended.err.count("\n") == 1
    assert artifact.path.read_bytes().startswith(b"caddie")
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".html"], "nothing half-written"


def test_scripts_are_sound() -> None:
    folder = Path(program_module.__file__).parent / "html"
    try:
        for path in sorted(folder.glob("*.js")):
            subprocess.run(["node", "--check", path], check=True)
    except FileNotFoundError:
        pytest.skip("no node")


def test_every_setting_of_what_the_page_runs_is_read_or_needless() -> None:
    """A new setting of the model must be added to the operations, be refused, or be listed here."""
    needless = {
        *("initial", "std", "query_gain", "gain"),  # values that parameters start with
        *("recurrence", "bigrams", "trigrams", "channels"),  # read from the model that they build
    }
    source = (Path(program_module.__file__)).read_text()
    read = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    for cls in program_module._KNOWN:
        missing = field_types(cls).keys() - read - needless
        assert not missing, (cls.__name__, missing)


@pytest.mark.parametrize(
    ("setting", "diff"),
    [
        ("block.mlp.linear=RandomMap", {"block.mlp.linear": RandomMap(rank=2)}),
        ("block.attention.xsa_gate", {"block.attention.xsa": True, "block.attention.xsa_gate": 0.5}),
        ("head.learned_caps=trained", {"head.learned_caps": "trained"}),
        ("dense_connections", {"dense_connections": MUDD(after=(0,), values=(), windows=())}),
        (
            "embedding.bigrams.signs",
            {"embedding.bigrams": HashedNGrams(buckets=61), "embedding.bigrams.signs": 8},
        ),
    ],
)
def test_settings_that_the_page_cannot_run_are_named(setting: str, diff: dict[str, Any], tmp_path: Path) -> None:
    made = write_artifact(tmp_path / "a.caddie", TINY.but({"vocabulary": BYTES.vocabulary, **diff}), Pack())
    with pytest.raises(UserError, match=re.escape(f"the page cannot run model.{setting};")):
        export(made.path, "html", tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()
