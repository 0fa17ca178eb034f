"""Gemma 4: pictures and sounds between marks; a video is its frames, each with its time."""

from __future__ import annotations

from beheld.inputs.families import LAID_OUT, Family

FAMILY = Family(
    embedded={"image": ("<|image>", "<image|>"), "audio": ("<|audio>", "<audio|>"), "video": LAID_OUT},
)
