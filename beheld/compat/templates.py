"""The chat templates of families whose checkpoints bring none, by model type."""

from __future__ import annotations

from pathlib import Path

from beheld.inputs.families import family_of_type


def get_chat_template_fallback_path(model_type: str, tokenizer_name_or_path: str = "") -> Path | None:
    """The file that conversations are written by where a checkpoint has no chat template of its own.

    Args:
        model_type: as config.json names it, for example "blip-2".
        tokenizer_name_or_path: taken as others take it; no family here has one template for each tokenizer.

    Returns:
        The file, or None for a family without an agreed form.
    """
    return family_of_type(model_type).template_path
