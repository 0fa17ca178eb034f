"""Kimi K2.5 and K2.6: MoonViT before DeepSeek-V3's language model."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("kimi_k25",),
    tested=(
        KnownCheckpoint(
            "kimi_k25",
            "Kimi_K25ForConditionalGeneration",
            "moonshotai/Kimi-K2.5",
            IMAGE,
            "latent attention (MLA); experts; no videos, which transformers cannot compute yet",
            by_census=True,
        ),
    ),
    placeholders=lambda config: {"image": config.image_token_id},
    calls=("kimi_k2",),
    reasoning=("think",),
)
