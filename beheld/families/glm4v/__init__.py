"""GLM-4.1V to GLM-4.6V: three-axis positions; a flat configuration is converted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ReferenceOptions, ShortName

# Entries of a flat GLM-4V configuration that belong to the whole model; the others at its top level are the text's.
_GLM_WHOLE = frozenset(
    (
        *("architectures", "auto_map", "dtype", "model_type", "tie_word_embeddings", "torch_dtype"),
        *("quantization_config", "transformers_version", "vision_config"),
        *(f"{kind}{part}_token_id" for kind in ("image", "video") for part in ("", "_start", "_end")),
    )
)


def _glm4v(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Convert zai-org/GLM-4.1V-9B-Thinking as first published, with text entries at the top level.

    transformers' class leaves such entries there and gives the text model its defaults.
    """
    if "text_config" in raw or "hidden_size" not in raw:
        return None
    made = {name: copy.deepcopy(raw[name]) for name in raw if name in _GLM_WHOLE and name != "model_type"}
    made["text_config"] = {name: copy.deepcopy(raw[name]) for name in raw if name not in _GLM_WHOLE}
    return "glm4v", made


FAMILY = Family(
    model_types=("glm4v", "glm4v_moe", "glm46v", "glmga"),
    short_names=(
        ShortName("glm-4.1v-9b", "zai-org/GLM-4.1V-9B-Thinking", "glm4v", "MIT", 10.3, "reasons before it answers"),
    ),
    tested=(
        KnownCheckpoint(
            "glm4v",
            "Glm4vForConditionalGeneration",
            "zai-org/GLM-4.1V-9B-Thinking",
            IMAGE_AND_VIDEO,
            "three-axis positions; a configuration with the text's settings at its top is converted",
            joined=True,
        ),
        KnownCheckpoint(
            "glm4v_moe",
            "Glm4vMoeForConditionalGeneration",
            "zai-org/GLM-4.5V",
            IMAGE_AND_VIDEO,
            "three-axis positions; experts",
            joined=True,
        ),
        KnownCheckpoint(
            "glm4v_moe_fp8",
            "Glm4vMoeForConditionalGeneration",
            "zai-org/GLM-4.5V-FP8",
            IMAGE_AND_VIDEO,
            "as GLM-4.5V; FP8 weights (compressed-tensors) stay FP8 where a GPU multiplies them, else dequantized",
            joined=True,
        ),
        KnownCheckpoint(
            "glm46v",
            "Glm46VForConditionalGeneration",
            "zai-org/GLM-4.6V-Flash",
            IMAGE_AND_VIDEO,
            "three-axis positions",
            joined=True,
        ),
        KnownCheckpoint(
            "glmga",
            "Glm46VForConditionalGeneration",
            "zai-org/GLM-4.1V-9B-Thinking",
            IMAGE_AND_VIDEO,
            "GLM-4.6V's class under the type glmga, with a processor of its own",
            by_census=True,
        ),
    ),
    convert={"glm4v": _glm4v},
    reference=ReferenceOptions(joins_media=True),
    calls=("glm45",),
    reasoning=("think",),
    grounding=Grounding("lists", 1000),
)
