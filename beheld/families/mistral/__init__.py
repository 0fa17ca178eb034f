"""Mistral: text only, with sliding layers. Its own layout also holds models with Pixtral's tower."""

from __future__ import annotations

from beheld.families.family import Family, KnownCheckpoint, PublisherLayout
from beheld.families.mistral.config import MODEL_TYPE, PARAMS, convert

FAMILY = Family(
    model_types=("mistral", MODEL_TYPE),
    tested=(
        KnownCheckpoint(
            "mistral",
            "MistralForCausalLM",
            "mistralai/Mistral-7B-v0.1",
            note="sliding layers; also in Mistral's own layout (params.json), where Pixtral's tower is read too",
        ),
    ),
    convert={MODEL_TYPE: convert},
    calls=("mistral",),
    reasoning=("mistral",),
    layout=PublisherLayout("mistral", PARAMS, "consolidated*.safetensors", "processing:files"),
)
