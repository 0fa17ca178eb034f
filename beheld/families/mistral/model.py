"""Mistral: the weights of its own layout under transformers' names.

Shapes: N heads, D numbers of a head, H inputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from beheld.core.errors import ModelError
from beheld.families.model import FamilyModel

_PARTS = (
    (r"^tok_embeddings\.", "{text}embed_tokens."),
    (r"^norm\.", "{text}norm."),
    (r"^output\.", "lm_head."),
    (r"^layers\.(\d+)\.attention_norm\.", r"{text}layers.\1.input_layernorm."),
    (r"^layers\.(\d+)\.ffn_norm\.", r"{text}layers.\1.post_attention_layernorm."),
    (r"^layers\.(\d+)\.attention\.w([qkvo])\.", r"{text}layers.\1.self_attn.\2_proj."),
    (r"^layers\.(\d+)\.feed_forward\.w1\.", r"{text}layers.\1.mlp.gate_proj."),
    (r"^layers\.(\d+)\.feed_forward\.w2\.", r"{text}layers.\1.mlp.down_proj."),
    (r"^layers\.(\d+)\.feed_forward\.w3\.", r"{text}layers.\1.mlp.up_proj."),
    (r"^vision_encoder\.(.*)\.attention\.w([qkvo])\.", r"model.vision_tower.\1.attention.\2_proj."),
    (r"^vision_encoder\.(.*)\.feed_forward\.w1\.", r"model.vision_tower.\1.feed_forward.gate_proj."),
    (r"^vision_encoder\.(.*)\.feed_forward\.w2\.", r"model.vision_tower.\1.feed_forward.down_proj."),
    (r"^vision_encoder\.(.*)\.feed_forward\.w3\.", r"model.vision_tower.\1.feed_forward.up_proj."),
    (r"^vision_encoder\.", "model.vision_tower."),
    (r"^vision_language_adapter\.w_in\.", "model.multi_modal_projector.linear_1."),
    (r"^vision_language_adapter\.w_out\.", "model.multi_modal_projector.linear_2."),
    (r"^patch_merger\.", "model.multi_modal_projector.patch_merger."),
    (r"^pre_mm_projector_norm\.", "model.multi_modal_projector.norm."),
)
_ROTATED = re.compile(r"\.attention\.w([qk])\.weight$")


def renamed(weights: Mapping[str, Tensor], raw: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return weights of consolidated.safetensors under transformers' names; None if they are not in that layout.

    Raises:
        ModelError: a weight has a name that is not known.
    """
    params = raw.get("params")
    if params is None:
        return None
    tower = params.get("vision_encoder")
    text = "model." if tower is None else "model.language_model."
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        place = next((at for at in _PARTS if re.search(at[0], name)), None)
        if place is None:
            raise ModelError(f"The weight {name!r} is not known in the layout of params.json.", "Use config.json's.")
        rotated = _ROTATED.search(f".{name}")
        if rotated is not None:
            own = name.startswith("vision_encoder.")
            heads = tower["num_attention_heads"] if own else params[{"q": "n_heads", "k": "n_kv_heads"}[rotated[1]]]
            weight = halved(weight, heads)
        made[re.sub(place[0], place[1].replace("{text}", text), name)] = weight
    return made


def halved(weight: Tensor, heads: int) -> Tensor:
    """Return a projection (N * D, H) whose heads rotate pairs of neighbours, for heads that rotate their two halves."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


MODEL = FamilyModel(renamed=renamed)
