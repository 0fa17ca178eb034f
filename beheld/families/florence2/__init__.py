"""Florence-2: an encoder reads the prompt; microsoft's layout is converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.config import KVGroup
from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE, Family, KnownCheckpoint, ShortName, decoder_group

# Our entry -> microsoft's entry, for names of DaViT's that differ from the class's.
_DAVIT = {"embed_dim": "dim_embed"} | {
    name: name
    for name in (
        *("depths", "drop_path_rate", "num_groups", "num_heads", "projection_dim", "window_size"),
        *("patch_padding", "patch_prenorm", "patch_size", "patch_stride"),
    )
}
_FLORENCE_SOURCES = ["spatial_avg_pool", "temporal_avg_pool"]


def _florence2(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Convert microsoft/Florence-2-large: a tower named davit, and a placeholder id beyond the embedding table.

    Its processor adds that token; the table has no row for it, because it only marks positions.
    """
    vision, text = raw["vision_config"], raw["text_config"]
    if "dim_embed" not in vision:
        return None
    if list(vision["image_feature_source"]) != _FLORENCE_SOURCES:
        raise ValueError(f"image_feature_source {vision['image_feature_source']} is not {_FLORENCE_SOURCES}")
    tower = {ours: vision[theirs] for ours, theirs in _DAVIT.items() if theirs in vision} | {
        "max_position_embeddings": vision["image_pos_embed"]["max_pos_embeddings"],
        "max_temporal_embeddings": vision["visual_temporal_embedding"]["max_temporal_embeddings"],
    }
    made: dict[str, Any] = {
        "architectures": ["Florence2ForConditionalGeneration"],
        "image_token_id": text["vocab_size"],
        "text_config": {**text, "model_type": "bart"},
        "tie_word_embeddings": True,
        "vision_config": tower,
    }
    made |= {name: raw[name] for name in ("torch_dtype", "dtype") if name in raw}
    return "florence2", made


def _kv_groups(config: Any) -> tuple[KVGroup, ...]:
    """Return one group: every decoder layer attends to the text."""
    return (decoder_group(config.get_text_config(decoder=True), "full"),)


def _cross_group(config: Any) -> KVGroup:
    """Return one cross group: every decoder layer attends to the encoder's states."""
    text = config.get_text_config(decoder=True)
    return decoder_group(text, "cross", text.max_position_embeddings)


# Tasks, and what the processor writes for them, that are answered with polygons.
_TRACED_BY = (
    "<OCR_WITH_REGION>",
    "What is the text in the image, with regions?",
    "<REFERRING_EXPRESSION_SEGMENTATION>",
    "<REGION_TO_SEGMENTATION>",
    "with mask",
    "polygon mask",
)

FAMILY = Family(
    model_types=("florence2",),
    short_names=(
        ShortName(
            "florence2-large",
            "florence-community/Florence-2-large",
            "florence2",
            "MIT",
            0.8,
            "captions, boxes and text by task words",
        ),
    ),
    tested=(
        KnownCheckpoint(
            "florence2",
            "Florence2ForConditionalGeneration",
            "florence-community/Florence-2-large",
            IMAGE,
            "an encoder reads the prompt; one image per prompt; forced tokens and bans on repetition; no beams; "
            "messages cannot be continued; microsoft/Florence-2-large too, without its code",
            one_image=True,
            whole_prompts=True,
            on_gpu=True,
        ),
    ),
    convert={"florence2": _florence2},
    encoder_reads="prompt",
    kv_groups=_kv_groups,
    cross_group=_cross_group,
    grounding=Grounding("label locs", 1000, cells=True, traced_by=_TRACED_BY),
)
