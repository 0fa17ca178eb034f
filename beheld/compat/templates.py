"""Chat templates, by model type, for families whose checkpoints have none."""

from __future__ import annotations

from pathlib import Path

from beheld.families import registry


def get_chat_template_fallback_path(model_type: str, tokenizer_name_or_path: str = "") -> Path | None:
    """Return the chat template file of a family whose checkpoints have no chat template.

    Args:
        model_type: as in config.json, for example "blip-2".
        tokenizer_name_or_path: accepted for vLLM's signature; no template here depends on the tokenizer.

    Returns:
        The file, or None for a family without an agreed format.
    """
    return registry.inputs(registry.find(model_type)).template_path
