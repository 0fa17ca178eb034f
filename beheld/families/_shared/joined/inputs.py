"""Prompts of models that are made of two published ones."""

from __future__ import annotations

from pathlib import Path

from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.info import added_tokens


def start_token(folder: Path) -> str:
    """Return the token that starts every answer, by the checkpoint's files."""
    config = read_json(folder / CONFIG)
    decoder = config.get("decoder") or {}
    named = (part.get("decoder_start_token_id") for part in (config, decoder))
    start = next((found for found in named if found is not None), decoder.get("bos_token_id"))
    return next((token for token, index in added_tokens(folder).items() if index == start), "<s>")
