"""T5Gemma 2: images as Gemma 3 has them, in the encoder's prompt."""

from __future__ import annotations

from dataclasses import replace

from beheld.families.gemma3.inputs import INPUTS as GEMMA3

INPUTS = replace(
    GEMMA3,
    placeholders={"image": "<start_of_image>"},
    template="_shared/plain.jinja",
    closes="its encoder reads the whole prompt, and the answer starts a new sequence",
)
