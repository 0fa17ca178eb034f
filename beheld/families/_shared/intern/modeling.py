"""Models in InternVL's original layout, run by transformers' InternVL classes: the names of their weights.

The tower stores queries, keys and values as one matrix, and so does InternLM2, group by group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import InternVLForConditionalGeneration
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, WeightRenaming

from beheld.families._shared.intern.config import InternChatConfig

_TOWER = "model.vision_tower"
_TEXT = "model.language_model"
# The published name, or a part of it -> transformers'; applied in this order.
_NAMES = {
    "vision_model.embeddings.class_embedding": f"{_TOWER}.embeddings.cls_token",
    "vision_model.embeddings.patch_embedding": f"{_TOWER}.embeddings.patch_embeddings.projection",
    "vision_model.embeddings.position_embedding": f"{_TOWER}.embeddings.position_embeddings",
    "vision_model.encoder.layers": f"{_TOWER}.encoder.layer",
    ".attn.proj": ".attention.projection_layer",
    ".attn.q_norm": ".attention.q_norm",
    ".attn.k_norm": ".attention.k_norm",
    ".norm1": ".layernorm_before",
    ".norm2": ".layernorm_after",
    ".ls1": ".lambda_1",
    ".ls2": ".lambda_2",
    "mlp1.0": "model.multi_modal_projector.layer_norm",
    "mlp1.1": "model.multi_modal_projector.linear_1",
    "mlp1.3": "model.multi_modal_projector.linear_2",
    "language_model.lm_head": "lm_head",
    "language_model.output": "lm_head",
    "language_model.model": _TEXT,
}
# The same of InternLM2's text.
_INTERNLM2 = {
    ".tok_embeddings": ".embed_tokens",
    ".attention.wo": ".self_attn.o_proj",
    ".attention_norm": ".input_layernorm",
    ".feed_forward.w1": ".mlp.gate_proj",
    ".feed_forward.w2": ".mlp.down_proj",
    ".feed_forward.w3": ".mlp.up_proj",
    ".ffn_norm": ".post_attention_layernorm",
}
_QKV = ("q_proj", "k_proj", "v_proj")


class SplitGroups(ConversionOps):
    """Splits InternLM2's `wqkv`: for each key head its query heads, the key head, the value head."""

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self, input_dict: dict[str, Any], target_patterns: list[str], config: Any, **kwargs: Any
    ) -> Any:
        """Return queries, keys and values of a matrix (heads of all three, inputs) or of its bias."""
        (stored,) = input_dict.values()
        weight: Tensor = stored[0] if isinstance(stored, list) else stored
        text = config.get_text_config(decoder=True)
        groups = text.num_key_value_heads
        queries = text.num_attention_heads // groups
        split = weight.unflatten(0, (groups, queries + 2, -1)).split((queries, 1, 1), dim=1)
        parts = (part.flatten(0, 2).contiguous() for part in split)
        return dict(zip(target_patterns, parts, strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        """Checkpoints are not written in this layout."""
        raise NotImplementedError("InternLM2's matrices are only read")


def reads_chat_layout(model_class: Any) -> Any:
    """Let transformers' loader read the original layout for a class; a decorator."""
    mapping: list[WeightConverter | WeightRenaming] = [WeightRenaming(theirs, ours) for theirs, ours in _NAMES.items()]
    mapping += [WeightConverter(".attn.qkv", [f".attention.{name}" for name in _QKV], [Chunk(dim=0)])]
    register_checkpoint_conversion_mapping(model_class.__name__, [*mapping, *_internlm2()], overwrite=True)
    return model_class


def reads_internlm2(model_class: Any) -> Any:
    """Let transformers' loader read InternLM2's own layout for a class of Llama's shape; a decorator."""
    mapping = [WeightRenaming(r"^output\.", "lm_head."), *_internlm2()]
    register_checkpoint_conversion_mapping(model_class.__name__, mapping, overwrite=True)
    return model_class


def _internlm2() -> list[WeightConverter | WeightRenaming]:
    made: list[WeightConverter | WeightRenaming] = [WeightRenaming(*pair) for pair in _INTERNLM2.items()]
    return [*made, WeightConverter(".attention.wqkv", [f".self_attn.{name}" for name in _QKV], [SplitGroups()])]


@reads_chat_layout
class InternChatForConditionalGeneration(InternVLForConditionalGeneration):
    """transformers' InternVL that reads the original layout."""

    config_class = InternChatConfig
