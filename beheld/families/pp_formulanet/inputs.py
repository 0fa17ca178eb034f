"""PP-FormulaNet: an image alone is asked for its formula."""

from __future__ import annotations

from pathlib import Path

from beheld.checkpoint.files import CONFIG, read_json
from beheld.families._shared.seeing.inputs import seen

_FIRST_ID = 2


def first(folder: Path) -> int:
    """Return the token that starts every formula."""
    return int((read_json(folder / CONFIG).get("text_config") or {}).get("decoder_start_token_id", _FIRST_ID))


INPUTS = seen(first)
