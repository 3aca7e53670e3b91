"""Adapter for EleutherAI's lm-evaluation-harness: importing this module registers the model type `caddie` there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch.nn.utils.rnn import pad_sequence

from caddie.config import Count, coerce
from caddie.errors import UserError
from caddie.inference.sample import continuation
from caddie.pack.artifact import load
from caddie.runtime.distributed import local_device
from caddie.score.windows import windows
from caddie.share.pull import artifact_file

NAME = "caddie"
"""Model type, as in `--model caddie --model_args artifact=FILE`."""
_TOKENS = 256
"""Most tokens that are generated for a request that sets no limit, as for the harness's own models."""
Pair = tuple[list[int], list[int]]
"""Ids that are read, and the ids predicted at the last positions."""


@register_model(NAME)
class CaddieLM(TemplateLM):  # type: ignore[misc]
    """The model of an artifact: a file, a run folder or `hf:USER/NAME`. Each request is a document of its own.

    Windows and stride are those of the artifact's scoring; there is no test-time training.
    """

    def __init__(
        self,
        artifact: str,
        device: str | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self._artifact = load(artifact_file(Path(artifact)), device or local_device())
        rows = int(batch_size) if str(batch_size).isdecimal() else max_batch_size or 8
        self._rows = coerce(rows, Count, "batch_size or max_batch_size")
        scoring = self._artifact.scoring
        self._longest, self._stride = scoring.sequence_length, scoring.stride

    @property
    def eot_token_id(self) -> int:
        """Id between documents, which also stands before the first."""
        return self._artifact.tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Return the ids of a text, after BOS unless `add_special_tokens` is False."""
        ids = self._artifact.tokenizer.encode(string.encode(errors="replace")).tolist()
        return ids if add_special_tokens is False else [self.eot_token_id, *ids]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood in nats of each whole text, as `caddie score` computes it for a single document."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            (text,) = request.args
            ids = self.tok_encode(text)
            for window in windows(0, len(ids) - 1, self._longest, self._stride):
                pairs.append((ids[window.start : window.end], ids[window.first + 1 : window.end + 1]))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (loglikelihood, _) in zip(owners, self._predicted(pairs), strict=True):
            sums[owner] += loglikelihood
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        pairs = []
        for _, context, wanted in requests:
            if len(wanted) > self._longest:
                raise UserError(f"a continuation of {len(wanted):,} tokens exceeds the window of {self._longest:,}")
            pairs.append(((context + wanted)[-self._longest - 1 : -1], wanted))
        return self._predicted(pairs)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that continues each context, up to the first stop; greedy unless sampling is requested."""
        texts = []
        for request in requests:
            context, settings = request.args
            stops = settings.get("until") or []
            until = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
            temperature = float(settings.get("temperature") or 0) if settings.get("do_sample") else 0.0
            prompt = self.tok_encode(context, add_special_tokens=False)
            limit = int(settings.get("max_gen_toks") or _TOKENS)
            ids, text, ends = list[int](), "", list[int]()
            for index in continuation(self._artifact, prompt, limit, temperature):
                ids.append(index)
                text = self._artifact.tokenizer.decode(ids).decode("utf-8", "replace")
                if ends := [text.index(stop) for stop in until if stop in text]:
                    break
            texts.append(text[: min(ends, default=len(text))])
        return texts

    @torch.inference_mode()
    def _predicted(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return log-likelihood of each pair's predicted ids, and True if each of them was the most likely."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        model, bos, dtype = self._artifact.model, self.eot_token_id, getattr(torch, self._artifact.scoring.precision)
        device = next(model.parameters()).device
        longest_first = sorted(range(len(pairs)), key=lambda number: -len(pairs[number][0]))
        for begin in range(0, len(pairs), self._rows):
            numbers = longest_first[begin : begin + self._rows]
            rows = [torch.tensor(pairs[number][0], dtype=torch.long) for number in numbers]
            ids = pad_sequence(rows, batch_first=True, padding_value=bos).to(device)  # no earlier logits depend on it
            logits = model(ids, ids == bos, dtype)
            for row, number in enumerate(numbers):
                read, wanted = pairs[number]
                scores = logits[row, len(read) - len(wanted) : len(read)].double().log_softmax(-1)
                targets = torch.tensor(wanted, device=scores.device)
                chosen = scores.gather(-1, targets[:, None])
                found[number] = float(chosen.sum()), bool((scores.argmax(-1) == targets).all())
        return found
