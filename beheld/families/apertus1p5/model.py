"""Apertus 1.5: its tokenizers of images and audio, which cut each item to its own size, choose codes in float32."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(
    host_features=frozenset(("image_sizes", "padding_mask")),
    exact_features=frozenset(("pixel_values", "input_values")),
    towers={"image": ("model.vision_tokenizer",), "audio": ("model.audio_tokenizer",)},
)
