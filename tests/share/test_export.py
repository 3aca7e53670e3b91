"""Exports of artifacts: what other programs load gives caddie's own logits and ids, without caddie."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TinyRun, call
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from caddie.data.tokenizers import ByteTokenizer, ByteTokenizer260, CaseOps, SentencePieceBPE, Tokenizer
from caddie.inference.sample import sample
from caddie.model import GPT, build
from caddie.pack.artifact import Artifact, Manifest, Metadata, load
from caddie.pack.coding import Packed
from caddie.pack.compress import Pack, pack
from caddie.pack.quantize.floats import Float16
from caddie.recipes.catalog import find, shipped
from caddie.recipes.shrink import small_copy
from caddie.score import Scoring
from caddie.share.export import FORMATS, export, standalone

needs_transformers = pytest.mark.skipif(not find_spec("transformers"), reason="pip install '.[transformers]'")
TEXT = "def read(self, name):\n\treturn self.Headers[name]  # 'naïve' ▁ <s> ЖЖ \U0001f600 <|1|> THE The \0 end\n"
PROGRAM = """
import sys
sys.modules["caddie"] = None  # importing it fails
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

def answers(folder, ids, text):
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    encoded = tokenizer(text)["input_ids"]
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == encoded[1:]
    behind = torch.cat([torch.full((len(ids), 3), tokenizer.pad_token_id), ids], 1)
    mask = torch.cat([torch.zeros(len(ids), 3), torch.ones_like(ids)], 1).long()
    with torch.no_grad():
        found = {
            "logits": model(ids).logits,
            "last": model(ids, logits_to_keep=2).logits,
            "more than all": model(ids[:, :3], logits_to_keep=4).logits,
            "loss": model(ids, labels=ids).loss,
            "behind": model(behind, attention_mask=mask).logits[:, 3:],
        }
    found["encoded"] = torch.tensor(encoded)
    found["decoded"] = torch.tensor(list(tokenizer.decode(encoded, skip_special_tokens=True).encode()))
    prompt = tokenizer(["a", "a b c d"], return_tensors="pt", padding=True)
    written = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    found["written"] = written[:, prompt["input_ids"].shape[1]:]
    return model, tokenizer, found

for given in sorted(Path(sys.argv[1]).glob("*.inputs")):
    ids, text = load_file(given)["ids"], given.with_suffix(".txt").read_bytes().decode()
    model, tokenizer, found = answers(given.with_suffix(".hf"), ids, text)
    if not list(given.parent.glob("*.again")):
        model.save_pretrained(given.with_suffix(".again"))
        tokenizer.save_pretrained(given.with_suffix(".again"))
        *_, again = answers(given.with_suffix(".again"), ids, text)
        assert all(torch.equal(again[name], value) for name, value in found.items()), given
    save_file({name: value.contiguous() for name, value in found.items()}, given.with_suffix(".outputs"))
    with torch.no_grad():
        half, mask = model.bfloat16(), torch.ones_like(ids)
        mask[0, 20:] = 0
        padded, cut = half(ids, attention_mask=mask).logits, half(ids[:1, :20]).logits
    assert padded.dtype == cut.dtype == torch.float32
    assert torch.equal(padded[:1, :20], cut), given
assert not [name for name, module in sys.modules.items() if name.split(".")[0] == "caddie" and module]
"""


def written(path: Path, gpt: GPT, tokenizer: Tokenizer) -> Artifact:
    """Write an artifact of weights in which nothing is zero, and return it as it is read."""
    model = build(gpt, 1)
    chance = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=chance)
    manifest = Manifest(
        caddie="0",
        recipe="made",
        recipe_sha256="",
        seed=1,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokenizer=tokenizer.kind,
        tokenizer_sha256=tokenizer.sha256,
        train_documents_sha256="",
        validation_fraction=None,
    )
    metadata = Metadata(gpt, tokenizer, Scoring(sequence_length=32, stride=16), manifest)
    pack(metadata, dict(model.named_parameters()), Pack(fit=None, coding=Packed(), quantizers={"*": Float16()}), path)
    return load(path)


def without_caddie(folder: Path, artifacts: Mapping[str, Artifact], text: str = TEXT) -> dict[str, dict[str, Any]]:
    """Export artifacts, and return what transformers makes of each in a process that cannot import caddie."""
    for name, artifact in artifacts.items():
        ended = call("export", artifact.path, "--to", "transformers", "--out", folder / f"{name}.hf")
        assert (ended.status, ended.err) == (0, "")
        ids = torch.randint(artifact.tokenizer.vocabulary, (2, 24), generator=torch.Generator().manual_seed(3))
        ids[:, (0, 11)] = artifact.tokenizer.bos
        save_file({"ids": ids}, folder / f"{name}.inputs")
        (folder / f"{name}.txt").write_bytes(text.encode())
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: load_file(folder / f"{name}.outputs") for name in artifacts}


def check_logits(folder: Path, name: str, artifact: Artifact, found: Mapping[str, torch.Tensor]) -> None:
    """Logits with and without padding, the loss, and greedy continuations are caddie's own."""
    ids = load_file(folder / f"{name}.inputs")["ids"]
    with torch.inference_mode():
        own = artifact.model(ids, ids == artifact.tokenizer.bos)
    assert own.std() > 0.1, "logits that say nothing would be equal too"
    assert (found["logits"] - own).abs().max() < 1e-4, name
    assert (found["last"] - own[:, -2:]).abs().max() < 1e-4, name
    assert (found["more than all"] - own[:, :3]).abs().max() < 1e-4, name
    assert (found["behind"] - own).abs().max() < 1e-4, name
    loss = torch.nn.functional.cross_entropy(own[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(found["loss"] - loss) < 1e-4, name
    for row, prompt in enumerate(("a", "a b c d")):
        mine = artifact.tokenizer.encode(sample(artifact, prompt, 6, temperature=0)).tolist()
        new = found["written"][row].tolist()
        new = new[: new.index(artifact.tokenizer.bos)] if artifact.tokenizer.bos in new else new
        assert artifact.tokenizer.decode([*artifact.tokenizer.encode(prompt.encode()), *new]) == (
            artifact.tokenizer.decode(mine)
        ), name


def small_model(name: str) -> GPT:
    """Return the model of a recipe at a size of milliseconds, with every choice kept."""
    return small_copy(find(name))[0].but(vocabulary=257)


def check_models(folder: Path, names: list[str]) -> None:
    models = {name: small_model(name) for name in names}
    artifacts = {name: written(folder / f"{name}.caddie", gpt, ByteTokenizer()) for name, gpt in models.items()}
    for name, found in without_caddie(folder, artifacts, "a").items():
        check_logits(folder, name, artifacts[name], found)


@needs_transformers
@pytest.mark.long
def test_transformers_gives_the_logits_of_each_kind_of_model(tmp_path: Path) -> None:
    check_models(tmp_path, ["tiny", "champion", "ngram_tilt"])


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_transformers_gives_the_logits_of_every_recipe(part: int, tmp_path: Path) -> None:
    different = {repr(small_model(name).to_json()): name for name in shipped()}
    check_models(tmp_path, sorted(different.values())[part::4])


@needs_transformers
@pytest.mark.long
def test_transformers_gives_the_ids_of_every_tokenizer(tmp_path: Path, tiny_run: TinyRun, real_data: Path) -> None:
    documents = [part.encode() for part in Path(__file__).read_text().split("\n\n")]
    kinds: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "bytes260": ByteTokenizer260()}
    kinds["bpe"] = SentencePieceBPE().build(400, lambda: documents)
    kinds["caseops"] = CaseOps().build(400, lambda: documents)
    gpt = GPT(width=32, depth=2).but({"block.attention.heads": 2, "block.attention.key_value_heads": 1})
    artifacts = {
        name: written(tmp_path / f"{name}.caddie", gpt.but(vocabulary=tokenizer.vocabulary), tokenizer)
        for name, tokenizer in kinds.items()
    }
    for name, found in without_caddie(tmp_path, artifacts).items():
        tokenizer = kinds[name]
        assert found["encoded"].tolist() == [tokenizer.bos, *tokenizer.encode(TEXT.encode()).tolist()], name
        assert bytes(found["decoded"].tolist()) == TEXT.encode(), name
        check_logits(tmp_path, name, artifacts[name], found)


def test_the_modules_beside_a_model_import_each_other_alone() -> None:
    files = standalone()
    assert {"modeling_caddie.py", "tokenization_caddie.py", "caddie_model_gpt.py"} <= files.keys()
    for name, text in files.items():
        compile(text, name, "exec")
        assert not [line for line in text.splitlines() if line.lstrip().startswith(("from caddie", "import caddie"))]
    assert "Depth recurrence" in files["caddie_model_recurrence.py"], "readable, with what explains it"


def test_safetensors_hold_the_weights_that_are_scored(tiny_run: TinyRun, tmp_path: Path) -> None:
    ended = call("export", tiny_run.folder, "--to", "safetensors", "--out", tmp_path / "out", "--json")
    assert ended.status == 0
    assert json.loads(ended.out) == {"path": str(tmp_path / "out"), "format": "safetensors"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    artifact = load(tiny_run.artifact)
    assert config["manifest"] == artifact.manifest.to_json()
    model = GPT.from_json(config["gpt"]).build()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    ids = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(model(ids), artifact.model(ids))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "whoever reads one of the files may read the weights"


@pytest.mark.parametrize("form", sorted(FORMATS.keys() - {"html"}))
def test_an_export_lies_beside_its_artifact(form: str, tmp_path: Path) -> None:
    gpt = GPT(vocabulary=257, width=16, depth=1).but(
        {"block.attention.heads": 2, "block.attention.key_value_heads": 1, "skips": None}
    )
    written(tmp_path / "model.caddie", gpt, ByteTokenizer())
    first = call("export", tmp_path / "model.caddie", "--to", form)
    assert (first.status, first.out) == (0, f"{tmp_path / f'model-{form}'}\n")
    before = sorted(tmp_path.rglob("*"))
    again = call("export", tmp_path / "model.caddie", "--to", form)
    assert (again.status, again.err) == (2, f"caddie: {tmp_path / f'model-{form}'} exists; name a new folder\n")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("revision", ["", "@main", "@ada/wider"])
def test_an_export_of_the_hub_is_named_by_its_repository(
    revision: str, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("caddie.share.export.artifact_file", lambda place: tiny_run.artifact)
    assert export(Path(f"hf:ada/tiny.lm{revision}"), "safetensors") == Path("tiny.lm-safetensors")


def test_what_cannot_be_exported_is_one_line(tiny_run: TinyRun, tmp_path: Path) -> None:
    for words, message in (
        ([tiny_run.artifact, "--to", "gguf"], f"no format gguf; there are {', '.join(FORMATS)}"),
        ([tmp_path / "none", "--to", "safetensors"], "No such file"),
        ([tiny_run.artifact, "--to", "safetensors", "--out", tiny_run.text / "x"], "make it, or name another file"),
        ([tiny_run.artifact, "--to", "html", "--out", tiny_run.text], "exists; name another file with --out"),
    ):
        ended = call("export", *words)
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
        assert message in ended.err


def test_help_names_every_format() -> None:
    page = call("export", "--help").out
    assert all(form in page for form in FORMATS)
