"""The artifact holds exactly what was packed, wherever it lies, and the checks on it can fail."""

import hashlib
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from caddie.data.corpus import Corpus
from caddie.errors import UserError
from caddie.model.parameters import assign
from caddie.pack import artifact as artifacts
from caddie.pack import container
from caddie.pack.artifact import Artifact
from caddie.pack.codecs import Brotli
from caddie.pack.coding import Packed
from caddie.pack.compress import Pack, pack
from caddie.pack.fit import FillCap
from caddie.recipes.recipe import Recipe
from caddie.run.policy import Part, apply_policies
from caddie.run.run import metadata_of
from caddie.run.stages import calibrate_recipe
from caddie.score import Scoring
from caddie.verify.verify import file_checks

Call = Callable[..., Any]
CAP = 16_000_000


@pytest.fixture(scope="module")
def packed(tiny_run: Any) -> Artifact:
    return artifacts.load(tiny_run.artifact)


@pytest.fixture(scope="module")
def recipe(tiny_run: Any) -> Recipe:
    return Recipe.from_json(json.loads((tiny_run.folder / "recipe.json").read_text())["recipe"])


def test_weights_come_back_as_their_quantizers_say(
    tiny_run: Any, packed: Artifact, recipe: Recipe, tmp_path: Path
) -> None:
    """Of a file whose steps were fitted to its cap: a small one, since all that is learnt from two steps is little."""
    trained = load_file(tiny_run.folder / "weights.safetensors")
    corpus = Corpus.load(tiny_run.corpus)
    known = calibrate_recipe(recipe, trained, corpus)
    fitted = recipe.pack.but(fit=FillCap(), cap_bytes=4000, coding=Packed(codec=Brotli()))
    again = tmp_path / "again"
    found = pack(metadata_of(recipe, 1337, corpus), trained, fitted, again, known)
    quantizers = {name: one.quantizer for name, one in found.candidate.weights.items()}
    assert {type(quantizer).__name__ for quantizer in quantizers.values()} == {"Waterfilling", "Float16"}
    assert quantizers != assign(recipe.pack.quantizers, packed.model, "pack.quantizers"), "nothing was fitted"
    changed = 0
    for name, weight in artifacts.load(again).model.named_parameters():
        arrays = quantizers[name].quantize(trained[name], known[name])
        assert torch.equal(weight, quantizers[name].dequantize(arrays, tuple(weight.shape))), name
        changed += not torch.equal(weight, trained[name])
    assert changed  # else nothing was quantized, and nothing shown


def test_settings_come_back(packed: Artifact, recipe: Recipe) -> None:
    assert packed.model.config == recipe.model
    assert packed.scoring == recipe.score
    assert packed.manifest.recipe_sha256 == recipe.sha256
    assert packed.manifest.parameters == recipe.parameters == sum(p.numel() for p in packed.model.parameters())
    assert packed.tokenizer.sha256 == packed.manifest.tokenizer_sha256


def test_ledger_counts_the_file_on_disk(tiny_run: Any, packed: Artifact) -> None:
    size = tiny_run.artifact.stat().st_size
    assert packed.file_bytes == sum(packed.ledger.values()) == size
    assert packed.ledger["weights"] == sum(packed.tensor_bytes.values())
    assert set(packed.tensor_bytes) == {name for name, _ in packed.model.named_parameters()}
    assert min(packed.ledger.values()) > 0
    assert tiny_run.printed["artifact_bytes"] == size
    assert tiny_run.printed["ledger"] == {"file_bytes": size, "parts": packed.ledger}


def test_policies_know_every_part_of_the_file(tiny_run: Any, packed: Artifact) -> None:
    assert set(packed.ledger) <= set(get_args(Part))
    contest, strict, hutter = apply_policies(tiny_run.printed)
    source = tiny_run.printed["source"]
    assert strict["bytes"] == packed.file_bytes + source["needed_bytes"] + source["training_bytes"]
    assert contest["bytes"] == strict["bytes"] - packed.ledger["tokenizer"]
    assert hutter["bytes"] == packed.file_bytes + source["needed_bytes"] + hutter["parts"]["text"]
    text = tiny_run.printed["corpus"]["source_bytes"]["validation"] * tiny_run.printed["bits_per_byte"] / 8
    assert text <= hutter["parts"]["text"] < text + 1
    seconds = tiny_run.printed["seconds"]  # training text is read again to calibrate
    assert 0 < seconds["train"] < seconds["train"] + seconds["calibrate"] == contest["training"]["seconds"]
    assert contest["training"]["seconds"] < strict["training"]["seconds"]


def test_a_flipped_bit_in_a_weight_is_found(tiny_run: Any, packed: Artifact, tmp_path: Path) -> None:
    """Also where the stream would give other numbers without complaint: sections have checksums."""
    whole = tiny_run.artifact.read_bytes()
    end = len(whole) - 32
    begin = end - packed.ledger["weights"]
    chance = random.Random(0)
    bad = tmp_path / "flipped"
    for place in chance.sample(range(begin, end), 60):
        bad.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"section weights/.*: the checksum does not match; the file is damaged"):
            artifacts.load(bad)


def test_the_same_weights_give_the_same_file(tiny_run: Any, caddie: Call, tmp_path: Path) -> None:
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    (tmp_path / "run" / "artifact.caddie").unlink()
    assert caddie("pack", tmp_path / "run").status == 0
    assert (tmp_path / "run" / "artifact.caddie").read_bytes() == tiny_run.artifact.read_bytes()


@pytest.mark.long
def test_the_default_coding_gives_the_same_weights(
    tiny_run: Any, packed: Artifact, caddie: Call, tmp_path: Path
) -> None:
    """The run was coded in a way that is read quickly, as many tests do."""
    shutil.copytree(tiny_run.folder, tmp_path / "run")
    again, coding = tmp_path / "again", type(Pack().coding).__name__
    assert coding not in " ".join(tiny_run.settings)
    assert caddie("pack", tmp_path / "run", f"pack.coding={coding}", "--out", again).status == 0
    found = artifacts.load(again)
    assert found.tensor_bytes != packed.tensor_bytes
    for weight, expected in zip(found.model.parameters(), packed.model.parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_score_is_the_same_elsewhere_and_without_the_training_data(tiny_run: Any, caddie: Call, tmp_path: Path) -> None:
    shutil.copytree(tiny_run.corpus, tmp_path / "corpus")
    for shard in (tmp_path / "corpus").glob("train_*.bin"):
        shard.unlink()
    copy = shutil.copy(tiny_run.artifact, tmp_path / "moved.caddie")
    there, here = (
        json.loads(caddie("score", artifact, "--data", corpus, "--json", "--quiet").out)
        for artifact, corpus in ((copy, tmp_path / "corpus"), (tiny_run.artifact, tiny_run.corpus))
    )
    for told in (there, here):
        told.pop("seconds", None)
        for scored in (told["plain"], told["sliding"]):
            del scored["seconds"]
    assert there == here
    assert there["bits_per_byte"] == there["sliding"]["bits_per_byte"]
    assert there["bits_per_byte"] == pytest.approx(tiny_run.printed["bits_per_byte"], abs=1e-6)


class Doctored(nn.Module):
    """A model whose logits are changed after the fact."""

    def __init__(self, model: Any, change: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.config, self.change = model, model.config, change

    def forward(
        self,
        ids: Tensor,
        starts: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        last: int | None = None,
        cache: Any = None,
    ) -> Tensor:
        logits = self.change(self.model, ids, self.model(ids, starts, dtype, cache=cache))
        return logits if last is None else logits[:, -last:]


def spoil(model: Any, ids: Tensor, logits: Tensor) -> Tensor:
    """One logit that is not a number."""
    logits = logits.clone()
    logits[0, 1, 2] = torch.nan
    return logits


def failed(artifact: Artifact, cap: int = CAP) -> set[str]:
    return {check.name for check in file_checks(artifact, cap) if not check.passed}


def test_the_cap_itself_is_allowed_and_a_byte_more_is_not(packed: Artifact) -> None:
    assert failed(packed, packed.file_bytes) == set()
    assert failed(packed, packed.file_bytes - 1) == {"file is under the cap"}


def test_a_score_that_is_no_number_is_a_failed_check(
    tiny_run: Any, caddie: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = artifacts.load(tiny_run.artifact)
    monkeypatch.setattr(artifacts, "load", lambda *given: replace(loaded, model=Doctored(loaded.model, spoil)))
    ended = caddie("score", tiny_run.artifact, "--data", tiny_run.corpus, "--json", "--quiet")
    assert (ended.status, ended.out) == (1, "")
    assert ended.err == f"caddie: the score of {tiny_run.artifact} is nan: its model gives no probabilities\n"


def test_a_false_parameter_count_fails(tiny_run: Any, tmp_path: Path) -> None:
    sections = container.read(tiny_run.artifact).sections
    manifest = json.loads(sections["manifest"])
    manifest["parameters"] -= 1
    sections["manifest"] = json.dumps(manifest).encode()
    false = tmp_path / "false"
    container.write(false, [container.Section(name, data, Brotli()) for name, data in sections.items()])
    assert failed(artifacts.load(false)) == {"parameter count is as stated"}


# Limits on what a file from a stranger may ask for, each tried at the limit and one beyond.

GOOD = Path(__file__).parent.parent / "golden" / "formats" / "scoring-plain.artifact"
"""15,522 parameters in 11,263 bytes, with 257 ids and one layer."""
Edit = Callable[[dict[str, Any]], object]


def edited(folder: Path, edit: Edit = lambda config: None, **sections: bytes | None) -> Path:
    """GOOD with a changed config and other sections, of which None are left out."""
    found: dict[str, Any] = container.read(GOOD).sections
    config = json.loads(found["config"])
    edit(config)
    found |= {"config": json.dumps(config).encode(), **sections}
    path = folder / "edited"
    container.write(path, [container.Section(name, data) for name, data in found.items() if data is not None])
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        artifacts.load(path)
    return str(caught.value)


def test_windows_are_as_long_as_logits_fit(tmp_path: Path) -> None:
    """2**28 logits of 257 ids are 1,044,495 tokens, in a window or in a batch."""

    def of(length: int) -> Edit:
        return lambda config: config["score"].update(sequence_length=length, batch_tokens=1 << 40)

    assert artifacts.load(edited(tmp_path, of(1_044_495))).scoring.batch_tokens == 1_044_495
    assert "windows of 1,044,496 tokens are too long for a vocabulary of 257" in refusal(
        edited(tmp_path, of(1_044_496))
    )
    assert artifacts.load(GOOD).scoring.batch_tokens == 65_536


def test_a_model_is_in_proportion_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = container.read
    assert (artifacts._RATIO, artifacts._SMALLEST_BOMB) == (16, 64 << 20)
    for ratio, smallest, refused in ((0, 15_522, False), (0, 15_521, True), (2, 0, False), (1, 0, True)):
        monkeypatch.setattr(artifacts, "_RATIO", ratio)
        monkeypatch.setattr(artifacts, "_SMALLEST_BOMB", smallest)
        monkeypatch.setattr(container, "read", lambda path, most: read(path))
        if refused:
            assert refusal(GOOD) == "the artifact's model has 15,522 parameters, too many for its 11,263 bytes"
        else:
            artifacts.load(GOOD)


def test_the_memory_of_sections_is_in_proportion_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sparse"
    monkeypatch.setattr(container, "regular_bytes", lambda path: b"")
    monkeypatch.setattr(container, "unpack", lambda blob, raw_bytes: raw_bytes)
    for size, raw in (
        (0, 64 << 20),
        (4 << 20, 64 << 20),
        (5 << 20, 80 << 20),
        (128 << 20, 2 << 30),
        (1 << 30, 2 << 30),
    ):
        with open(path, "wb") as file:
            file.truncate(size)
        assert container.read(path, artifacts.most_parameters) == raw
    assert container.RAW_BYTES == 2 << 30
    assert re.search("null (byte|character).*; name an artifact", refusal(Path("a\0b")))  # 3.13 and 3.14


def test_a_model_has_no_more_layers_than_weights(tmp_path: Path) -> None:
    def deep(layers: int) -> Edit:
        return lambda config: config["model"].update(depth=layers)

    assert "has 12 layers, too many for its 11 weights" in refusal(edited(tmp_path, deep(12)))
    assert "is missing" in refusal(edited(tmp_path, deep(11)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantizers": dict.fromkeys(map(str, range(256)))}, None),
        ({"quantizers": dict.fromkeys(map(str, range(257)))}, "has 257 rules for quantizers, over the limit of 256"),
        ({"model": {"layers": dict.fromkeys(map(str, range(64))), "depth": 1024}}, None),
        ({"model": {"layers": dict.fromkeys(map(str, range(65))), "depth": 1024}}, "65 exceptions for 1024 layers"),
        ({"model": {"layers": dict.fromkeys(map(str, range(65))), "depth": 1024.0}}, "65 exceptions for 1024.0 layers"),
        ({"model": {"layers": dict.fromkeys(map(str, range(64))), "depth": 1024.5}}, "64 exceptions for 1024.5 layers"),
        ({"model": {"layers": dict.fromkeys(map(str, range(7282)))}}, "7,282 exceptions for None layers"),  # of nine
        ({"model": {"layers": dict.fromkeys(map(str, range(7281)))}}, None),
        ({"model": {"layers": [0] * 99_999, "depth": 1024}, "quantizers": [0] * 999}, None),
        ({"model": [], "quantizers": None}, None),
        ({}, None),
    ],
)
def test_rules_and_exceptions_are_few(config: dict[str, Any], message: str | None) -> None:
    if message is None:
        artifacts._check_rules(config, 0)
    else:
        with pytest.raises(UserError, match=message):
            artifacts._check_rules(config, 0)


def test_packing_may_add_a_rule_for_each_weight() -> None:
    """Corrections and protected matrices have rules of their own."""
    rules = {"quantizers": dict.fromkeys(map(str, range(300)))}
    artifacts._check_rules(rules, 44)
    with pytest.raises(UserError, match="has 300 rules for quantizers, over the limit of 299"):
        artifacts._check_rules(rules, 43)


def test_random_constants_are_few() -> None:
    def check(sizes: list[int]) -> None:
        buffers = [SimpleNamespace(numel=lambda size=size: size) for size in sizes]
        model: Any = SimpleNamespace(config=SimpleNamespace(vocabulary=257), buffers=lambda: buffers)
        artifacts.check_readable(model, Scoring())

    for sizes in ([], [1 << 23] * 8, [1 << 23, 1]):
        check(sizes)
    for sizes in ([*[1 << 23] * 8, 1], [(1 << 23) + 1], [1, (1 << 23) + 1]):
        said = rf"has {sum(sizes):,} random constants, over the limit of 67,108,864, or more than 8,388,608 in one"
        with pytest.raises(UserError, match=said):
            check(sizes)


def test_source_is_a_mebibyte_at_most(tmp_path: Path) -> None:
    loaded = artifacts.load(edited(tmp_path, source=bytes(1 << 20)))
    assert loaded.ledger["source"] == 1 << 20
    assert loaded.file_bytes == (tmp_path / "edited").stat().st_size
    path = edited(tmp_path, source=bytes((1 << 20) + 1))
    assert refusal(path) == f"{path} carries 1,048,577 bytes of source, over the limit of 1,048,576"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"config": None}, "is not a complete artifact: it has no config"),
        ({"manifest": None}, "is not a complete artifact: it has no manifest"),
        ({"tokenizer": None}, "is not a complete artifact: it has no tokenizer"),
        ({"code": b""}, "is not an artifact: it has a section code, which nothing reads"),
        ({"config": b"{"}, "the artifact's config is not JSON"),
        ({"config": b"[" * 100_000}, "the artifact's config is not JSON"),
        ({"config": b"[]"}, "the artifact's config is not a JSON object"),
        ({"config": b"{}"}, "the artifact's config is not valid: no GPT"),
        ({"manifest": b"{}"}, "the artifact's manifest is not valid: "),
        ({"weights/blocks.0.mix": None}, "the artifact's weights do not fit its model: blocks.0.mix is missing"),
        ({"weights/a": b""}, "the artifact's weights do not fit its model: a is unknown"),
        (
            {"weights/blocks.0.mix": b"\1\0\0\0"},
            "the artifact's weights do not fit its model: blocks.0.mix ends within",
        ),
    ],
)
def test_sections_that_are_none_are_refused_by_name(
    sections: dict[str, bytes | None], message: str, tmp_path: Path
) -> None:
    assert message in refusal(edited(tmp_path, **sections))


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    def smaller(config: dict[str, Any]) -> None:
        config["model"]["vocabulary"] = 256

    assert "the artifact's tokenizer has 257 ids and its model 256" in refusal(edited(tmp_path, smaller))
    mix = container.read(GOOD).sections["weights/blocks.0.mix"]
    assert "blocks.0.mix has 3 bytes too many" in refusal(edited(tmp_path, **{"weights/blocks.0.mix": mix + b"abc"}))
    manifest = json.loads(container.read(GOOD).sections["manifest"]) | {"tokenizer_sha256": "0" * 64}
    assert "is not the one its manifest names" in refusal(edited(tmp_path, manifest=json.dumps(manifest).encode()))


def test_what_is_loaded_is_ready_to_score(tmp_path: Path) -> None:
    path, before = edited(tmp_path), time.perf_counter()
    loaded = artifacts.load(str(path))
    assert 0 < loaded.load_seconds <= time.perf_counter() - before
    assert (loaded.path, loaded.sha256) == (path, hashlib.sha256(path.read_bytes()).hexdigest())
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert list(loaded.ledger) == ["weights", "tokenizer", "config", "manifest", "container"]
    assert artifacts.load_tokenizer(path).sha256 == loaded.tokenizer.sha256
