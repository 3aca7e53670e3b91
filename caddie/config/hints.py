"""Hints at the setting that is meant by an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from caddie.config.renamed import modernized_path

ELSEWHERE = {
    "model.width": ("d_model", "dim", "embed_dim", "hidden_size", "n_embd"),
    "model.depth": ("layers", "n_layer", "n_layers", "num_hidden_layers", "num_layers"),
    "model.block.attention.heads": ("n_head", "n_heads", "num_attention_heads", "num_heads"),
    "model.block.attention.key_value_heads": ("n_kv_head", "n_kv_heads", "num_key_value_heads", "num_kv_heads"),
    "model.block.mlp.hidden": ("d_ff", "intermediate_size"),
    "model.vocabulary": ("vocab_size",),
    "train.sequence_length": ("block_size", "context_length", "max_seq_len", "seq_len", "seq_length"),
    "train.batch_tokens": ("batch_size", "train_batch_tokens"),
    "train.optimizers.matrix.lr": ("learning_rate", "lr", "matrix_lr"),
    "train.optimizers.matrix.weight_decay": ("wd", "weight_decay"),
    "train.steps": ("epochs", "iterations", "max_iters", "max_steps", "num_iterations"),
    "train.seconds": ("max_wallclock_seconds",),
    "train.lr_schedule": ("lr_decay", "scheduler", "warmdown", "warmdown_iters", "warmup", "warmup_iters"),
    "train.clip_norm": ("grad_clip", "grad_clip_norm", "max_grad_norm"),
    "train.precision": ("dtype",),
    "score.stride": ("eval_stride",),
}
"""By setting: its names in nanoGPT, nanochat, transformers and the public scripts."""


def hint_at(path: str, known: Sequence[str]) -> str:
    """Return the end of a message on an unknown path: the one of `known` that is meant, or where to look it up."""
    if path == "seed":
        return "; a run takes it by --seed"
    now = modernized_path(path)
    if now != path and now in known:
        return f"; it is now {now}"
    look_up = f"; `caddie techniques {path.rpartition('.')[2]}` looks the word up"
    return hint_elsewhere(now, known) or _similar(now.lower(), known) or look_up


def hint_elsewhere(path: str, known: Sequence[str] | None = None) -> str:
    """Return a hint at the setting, one of `known`, that other programs call so; else an empty string."""
    last = path.rpartition(".")[2].lower()
    ours = next((one for one, names in ELSEWHERE.items() if last in names and (known is None or one in known)), None)
    return f" (did you mean {ours}?)" if ours else ""


def _similar(path: str, known: Sequence[str]) -> str:
    """Return a hint at the path spelled most alike: whole, beside the one meant, or by its last part alone."""
    parent, _, last = path.rpartition(".")
    siblings = [one for one in known if parent and one.rpartition(".")[0] == parent]
    by_last: dict[str, str] = {}
    for one in sorted(known, key=lambda one: (-difflib.SequenceMatcher(None, path, one).ratio(), len(one))):
        by_last.setdefault(one.rpartition(".")[2].lower(), one)
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.9)
    close += difflib.get_close_matches(path, siblings, n=1, cutoff=0.76)
    close += [by_last[one] for one in difflib.get_close_matches(last, by_last, n=1, cutoff=0.65)]
    return f" (did you mean {close[0]}?)" if close else ""
