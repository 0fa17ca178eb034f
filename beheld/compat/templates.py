"""Chat templates, by model type, for families whose checkpoints have none."""

from __future__ import annotations

from pathlib import Path

from beheld.core.errors import ConfigError
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


def load_chat_template(chat_template: Path | str | None, *, is_literal: bool = False) -> str | None:
    """The text of a chat template, given as a file or as itself.

    Raises:
        ConfigError: the file does not exist, and the text is no template.
    """
    if chat_template is None or is_literal:
        return None if chat_template is None else str(chat_template)
    if "{" not in str(chat_template):
        try:
            return Path(chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"The chat template {str(chat_template)!r} cannot be read.",
                "Name a file, or give the template itself.",
                param="chat_template",
            ) from error
    return str(chat_template).encode().decode("unicode_escape")
