"""Hints at the setting that is meant by an unknown one."""

import difflib
from collections.abc import Sequence

from caddie.config.renamed import modernized_path

ELSEWHERE = {
    "model.width": ("d_model", "dim", "embed_dim", "hidden_size", "model_dim", "n_embd"),
    "model.depth": ("layers", "n_layer", "n_layers", "num_hidden_layers", "num_layers"),
    "model.block.attention.heads": ("n_head", "n_heads", "num_attention_heads", "num_heads"),
    "model.block.attention.key_value_heads": ("n_kv_head", "n_kv_heads", "num_key_value_heads", "num_kv_heads"),
    "model.block.attention.rope.base": ("rope_base", "rope_theta"),
    "model.block.attention.rope.dims": ("rope_dims", "rotary_dim"),
    "model.block.mlp": ("act_fn", "activation", "activation_function", "hidden_act"),
    "model.block.mlp.hidden": ("d_ff", "intermediate_size", "mlp_mult", "mlp_ratio", "n_inner"),
    "model.head.softcap": ("logit_softcap", "final_logit_softcapping"),
    "model.vocabulary": ("vocab", "vocab_size"),
    "train.sequence_length": (
        *("block_size", "context_length", "max_position_embeddings", "max_seq_len"),
        *("n_ctx", "n_positions", "seq_len", "seq_length", "train_seq_len"),
    ),
    "train.batch_tokens": ("batch_size", "total_batch_size", "train_batch_tokens"),
    "train.micro_batches": (
        *("device_batch_size", "grad_accum_steps", "gradient_accumulation_steps", "per_device_train_batch_size"),
    ),
    "train.optimizers.embedding.lr": ("embed_lr", "embedding_lr", "tied_embed_lr"),
    "train.optimizers.head.lr": ("head_lr", "unembedding_lr"),
    "train.optimizers.matrix.lr": ("learning_rate", "lr", "matrix_lr"),
    "train.optimizers.matrix.momentum": ("muon_momentum",),
    "train.optimizers.scalar.lr": ("scalar_lr",),
    "train.optimizers.matrix.weight_decay": ("wd", "weight_decay"),
    "train.steps": ("epochs", "iterations", "max_iters", "max_steps", "num_iterations"),
    "train.seconds": ("max_wallclock_seconds",),
    "train.lr_schedule": (
        *("lr_decay", "lr_scheduler_type", "min_lr", "scheduler", "warmdown", "warmdown_iters", "warmdown_ratio"),
        "warmup_iters",
    ),
    "train.clip_norm": ("grad_clip", "grad_clip_norm", "max_grad_norm"),
    "train.precision": ("dtype",),
    "score.stride": ("eval_stride",),
}
"""By setting: its names elsewhere, as in nanoGPT, nanochat, transformers and the public scripts."""


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
    ours = setting_called(path.rpartition(".")[2])
    return f" (did you mean {ours}?)" if ours and (known is None or ours in known) else ""


def setting_called(word: str) -> str | None:
    """Return the setting that other programs call by this word; None if it is no such word."""
    return next((ours for ours, names in ELSEWHERE.items() if word.lower() in names), None)


def _similar(path: str, known: Sequence[str]) -> str:
    """Return a hint at the path spelled most alike: whole, beside the one meant, or by its last part alone."""
    parent, _, last = path.rpartition(".")
    siblings = [one for one in known if parent and one.rpartition(".")[0] == parent]
    by_last: dict[str, str] = {}
    for one in sorted(known, key=lambda one: (-difflib.SequenceMatcher(None, path, one).ratio(), len(one))):
        by_last.setdefault(one.rpartition(".")[2].lower(), one)
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.9)
    close += difflib.get_close_matches(path, siblings, n=1, cutoff=0.76)
    close += [by_last[one] for one in difflib.get_close_matches(last, by_last, n=1, cutoff=0.78)]
    return f" (did you mean {close[0]}?)" if close else ""
