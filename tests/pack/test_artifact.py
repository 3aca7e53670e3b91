"""The artifact holds exactly what was packed, wherever it lies, and the checks on it can fail."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
from caddie.run.policy import Part, state
from caddie.run.run import metadata_of
from caddie.run.stages import calibrate_recipe
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
    quantizers = {tensor.name: tensor.quantizer for tensor in found.tensors}
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
    contest, strict, hutter = state(tiny_run.printed)
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
