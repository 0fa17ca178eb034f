"""Pieces of own definitions: media in the places of their placeholders, the head, and fused matrices.

Shapes: B prompts, N positions, H hidden size, E embeddings of an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""What outputs call the cache: transformers 5.24 has given it its second name."""


def with_media(embeds_BNH: Tensor, ids_BN: Tensor | None, token: int, parts: Sequence[Tensor]) -> Tensor:
    """Return the embeddings of prompts with those of items (E, H), in the prompts' order, in the places of `token`."""
    assert ids_BN is not None, "media come with ids"
    places = (ids_BN == token)[..., None]
    return embeds_BNH.masked_scatter(places, torch.cat(list(parts)).to(embeds_BNH))


class HeadedModel(PreTrainedModel, GenerationMixin):
    """A model with a head; a subclass sets `model` and `lm_head`.

    generate() computes masks and positions only for a `forward` that names them.
    """

    model: Any
    lm_head: Any

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: Any = 0,
        **keywords: Any,
    ) -> Any:
        """Return the logits at the positions to keep."""
        keywords.pop("labels", None)
        keywords.pop("return_dict", None)
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **keywords)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits(out.last_hidden_state[:, kept])
        cache: dict[str, Any] = {CACHE: getattr(out, CACHE)}
        return CausalLMOutputWithPast(logits=logits, **cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (B, positions, vocabulary) of last hidden states (B, positions, H)."""
        made: Tensor = self.lm_head(hidden)
        return made


class SplitHeads(ConversionOps):
    """Splits a matrix of all queries, then all keys, then all values into the three."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Any:
        """Return the three parts of a matrix (heads of all three, inputs) or of its bias."""
        config = kwargs["config"]
        (stored,) = input_dict.values()
        weight: Tensor = stored[0] if isinstance(stored, list) else stored
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        parts = (part.contiguous() for part in weight.split((queries, keys, keys)))
        return dict(zip(target_patterns, parts, strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        """Checkpoints are not written in this layout."""
        raise NotImplementedError("fused matrices are only read")


class Unbatched(ConversionOps):
    """Drops the first dimension of a tower's stored positions (1, patches, width)."""

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], target_patterns: list[str], **kwargs: Any
    ) -> Any:
        """Return the positions (patches, width)."""
        (stored,) = input_dict.values()
        weight: Tensor = stored[0] if isinstance(stored, list) else stored
        return {target_patterns[0]: weight[0]}

    @property
    def reverse_op(self) -> ConversionOps:
        """Checkpoints are not written in this layout."""
        raise NotImplementedError("a tower's positions are only read")
