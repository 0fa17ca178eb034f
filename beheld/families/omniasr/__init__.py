"""OmniASR: a wav2vec 2.0 encoder of raw audio before Llama; the prompt names the language."""

from __future__ import annotations

from beheld.families.family import AUDIO, UNDEFINED, Family, KnownCheckpoint, OldestTransformers

FAMILY = Family(
    model_types=("omniasr",),
    tested=(
        KnownCheckpoint(
            "omniasr",
            "OmniASRForConditionalGeneration",
            "hf-audio/omniasr-llm-300m-v2",
            AUDIO,
            "one audio per prompt, which has a token of its language (`lang:eng_latn`, or `lang:auto`)",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.24", UNDEFINED),
)
