"""Export to Hugging Face transformers: a folder that its Auto classes load, with the code of model and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from caddie.errors import UserError
from caddie.files import making, write_json
from caddie.pack.artifact import Artifact, load
from caddie.share.standalone import standalone
from caddie.share.to_safetensors import settings, write_model

CODE = ("caddie.share.modeling_caddie", "caddie.share.tokenization_caddie")
"""Modules that transformers is told of; it copies them, and all that they import, where it runs them."""
_README = """# {name}

A caddie artifact (recipe `{recipe}`, SHA-256 `{sha256}`) for transformers. The weights are dequantized; the code beside
them is caddie's own, and caddie need not be installed.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
ids = model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=50, do_sample=True, temperature=0.8)
print(tokenizer.decode(ids[0], skip_special_tokens=True))
```

There is no cache of keys and values: each new token computes the window again. `caddie sample` is faster.
"""


def to_transformers(path: Path, out: Path) -> Path:
    """Write a new folder for `from_pretrained(folder, trust_remote_code=True)`, and return it.

    Raises `UserError` for an artifact with classes in a user's file, whose code is not caddie's.
    """
    artifact = load(path)
    if artifact.parts:
        names = " and ".join(file.stated.name for file in artifact.parts)
        raise UserError(f"{path} has classes in {names}, which transformers would run; export it to safetensors")
    bos = artifact.tokenizer.bos
    ids = {"bos_token_id": bos, "eos_token_id": bos, "pad_token_id": bos, "use_cache": False}
    readme = {"name": out.name, "recipe": artifact.manifest.recipe, "sha256": artifact.sha256}
    with making(out) as folder:
        write_model(artifact, folder, _config(artifact) | ids, "model.")
        write_json(folder / "generation_config.json", ids)
        write_json(folder / "tokenizer_config.json", _tokenizer_config(artifact))
        (folder / "README.md").write_text(_README.format(**readme), encoding="utf-8")
        for name, text in standalone(CODE).items():
            (folder / name).write_text(text, encoding="utf-8")
    return out


def _config(artifact: Artifact) -> dict[str, Any]:
    gpt = artifact.model.config
    module, _ = (name.rpartition(".")[2] for name in CODE)
    return {
        "architectures": ["CaddieForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.CaddieConfig",
            "AutoModelForCausalLM": f"{module}.CaddieForCausalLM",
        },
        "model_type": "caddie",
        "dtype": "float32",
        "vocab_size": gpt.vocabulary,
        "hidden_size": gpt.width,
        "num_hidden_layers": gpt.depth,
        "max_position_embeddings": artifact.scoring.sequence_length,
        **settings(artifact),
    }


def _tokenizer_config(artifact: Artifact) -> dict[str, Any]:
    _, module = (name.rpartition(".")[2] for name in CODE)
    return {
        "tokenizer_class": "CaddieTokenizer",
        "auto_map": {"AutoTokenizer": [f"{module}.CaddieTokenizer", None]},
        "kind": artifact.tokenizer.kind,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
