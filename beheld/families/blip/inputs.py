"""BLIP: a caption continues the words of a prompt, which stand after the decoder's first token."""

from __future__ import annotations

from pathlib import Path

from beheld.checkpoint.files import CONFIG, read_json
from beheld.families._shared.seeing.inputs import seen

_FIRST_ID = 30522


def first(folder: Path) -> int:
    """Return the decoder's first token, which the tokenizer of published checkpoints cannot write."""
    return int((read_json(folder / CONFIG).get("text_config") or {}).get("bos_token_id", _FIRST_ID))


INPUTS = seen(first)
