"""Ultravox: Whisper's encoder and a projector before Llama; further checkpoints hold some of the weights."""

from __future__ import annotations

from beheld.families.family import AUDIO, Definition, Family, KnownCheckpoint, SecondaryCheckpoint

FAMILY = Family(
    model_types=("ultravox",),
    architectures=("UltravoxModel",),
    tested=(
        KnownCheckpoint(
            "ultravox",
            "UltravoxModel",
            "fixie-ai/ultravox-v0_5-llama-3_2-1b",
            AUDIO,
            "windows of 30 s; needs the language model's checkpoint as well, which config.json names; before Llama",
            on_gpu=True,
        ),
    ),
    # The first is there in newer checkpoints alone.
    placeholder_tokens={"audio": ("<|audio|>", "<|reserved_special_token_0|>")},
    definition=Definition(config="config:UltravoxConfig", model="modeling:UltravoxForConditionalGeneration"),
    secondary=(
        SecondaryCheckpoint(named_by="text_model_id", described_in="text_config", prefix="language_model."),
        SecondaryCheckpoint(
            named_by="audio_model_id", described_in="audio_config", prefix="audio_tower.", root="model.encoder."
        ),
    ),
)
