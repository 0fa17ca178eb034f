"""Apertus 1.5: images and audio become tokens of its vocabulary; it reads media here and makes none."""

from __future__ import annotations

from typing import Any

from beheld.families.family import IMAGE_AND_AUDIO, UNDEFINED, Family, KnownCheckpoint, OldestTransformers


def head_size(config: Any) -> int:
    """Return how many tokens the head rates; a pruned head leaves out those of media."""
    text = config.get_text_config()
    return int(text.output_vocab_size or text.vocab_size)


FAMILY = Family(
    model_types=("apertus1p5", "apertus1p5_text"),
    tested=(
        KnownCheckpoint(
            "apertus1p5",
            "Apertus1p5ForConditionalGeneration",
            "swiss-ai/Apertus-v1.5-8B",
            IMAGE_AND_AUDIO,
            "images and audio become tokens of its vocabulary; makes neither",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.24", UNDEFINED),
    head_size=head_size,
    calls=("apertus",),
    reasoning=("apertus",),
)
