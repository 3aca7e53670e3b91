"""A caddie model for Hugging Face transformers: the forward of the files beside this one, in a `PreTrainedModel`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from caddie.model import GPT


class CaddieConfig(PretrainedConfig):  # type: ignore[misc]
    """Settings of the model, `gpt`, as an artifact states them."""

    model_type = "caddie"

    def __init__(self, gpt: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.gpt = dict(gpt or {})
        kwargs.setdefault("use_cache", False)
        super().__init__(**kwargs)


class CaddieForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Next-token logits. Every forward computes the whole sequence: there is no cache of keys and values.

    A document begins at each `bos_token_id`; if the model was trained so, it sees nothing before.
    """

    config_class = CaddieConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"

    def __init__(self, config: CaddieConfig) -> None:
        super().__init__(config)
        self.model = GPT.from_json(config.gpt).build()
        for module in self.model.modules():  # random constants, which an artifact draws anew, come with the weights
            module._non_persistent_buffers_set.clear()
        self.post_init()

    def get_input_embeddings(self) -> None:
        """Return nothing: caddie's embeddings have several parts and cannot be resized."""
        return

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **unused: Any,
    ) -> CausalLMOutput:
        """Return logits (B, T, vocabulary) of ids (B, T), only of the last `logits_to_keep` positions unless it is 0.

        Positions that `attention_mask` leaves out have logits of 0; a row is computed without them. With `labels`
        (ids, or -100 to ignore), also the mean loss in nats; each position predicts the label after it.
        """
        last = logits_to_keep or None
        if attention_mask is None or bool(attention_mask.all()):
            logits = self._logits(input_ids, last)
        else:
            dtype = torch.promote_types(self.dtype, torch.float32)
            whole = input_ids.new_zeros((*input_ids.shape, self.config.vocab_size), dtype=dtype)
            for row, kept in enumerate(attention_mask.bool()):
                if kept.any():
                    whole[row, kept] = self._logits(input_ids[row, kept][None])[0]
            logits = whole[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)

    def _logits(self, ids: Tensor, last: int | None = None) -> Tensor:
        logits: Tensor = self.model(ids, ids == self.config.bos_token_id, self.dtype, last=last)
        return logits

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any
    ) -> dict[str, Any]:
        """Return the inputs of a step of `generate`: the latest ids, at most the model's window."""
        window = self.config.max_position_embeddings
        if attention_mask is not None:
            attention_mask = attention_mask[:, -window:]
        return {"input_ids": input_ids[:, -window:], "attention_mask": attention_mask, "logits_to_keep": 1}
