"""Tries a checkpoint's tokenizer before it reads anybody's text: a stranger made it, and it cannot be interrupted."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from beheld.checkpoint.checks.tokenizer import PARTS, check_parts
from beheld.core.errors import ModelError

# Seconds for all texts; usual tokenizers take some milliseconds, on a busy machine a hundred.
_MOST_S = 4.0
# One letter again and again costs patterns that backtrack the most; then one that they do not expect.
_RUN, _END = 2000, "\0"
_LETTERS = "aA1 \n.'_\u00e9\u4e2d"
_MAX_LETTERS = 64
# Most tokens of one letter: its bytes, several times over.
_MAX_GROWTH = 32
_FILES = "the tokenizer's files"
_REMEDY = "Name another tokenizer with `tokenizer`, or fetch the checkpoint again."


def try_tokenizer(tokenizer: Any) -> None:
    """Check the parts of a loaded tokenizer, and let it read texts that are hard to split.

    The files may describe no parts, since transformers makes them of other formats. Tokenizers in Python are not tried.

    Raises:
        ModelError: it makes much of little text, or takes too long.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    parts = {name: _described(getattr(backend, name)) for name in PARTS}
    check_parts(_FILES, parts)
    letters = list(dict.fromkeys((*_LETTERS, *(letter for text in _patterns(parts) for letter in text))))[:_MAX_LETTERS]
    # A pattern may only begin where the letters that it needs come later.
    end = _END + "".join(letters)
    texts = [letter * _RUN + end for letter in letters]
    counts: list[int] = []
    panicked: list[bool] = []

    def read() -> None:
        try:
            # Only calls for batches let other threads run.
            for text in texts:
                counts.append(len(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids))
        except Exception:
            # What the library cannot read, a later check refuses.
            return
        except BaseException:
            # A panic of the library's, which some engines of patterns end long searches with.
            panicked.append(True)

    reader = threading.Thread(target=read, name="beheld-tokenizer", daemon=True)
    reader.start()
    reader.join(_MOST_S)
    if reader.is_alive():
        raise ModelError(f"The tokenizer takes more than {_MOST_S:g} s for {_RUN} equal letters.", _REMEDY)
    if panicked:
        raise ModelError(f"The tokenizer cannot split {_RUN} equal letters: its patterns try too often.", _REMEDY)
    if max(counts, default=0) > _MAX_GROWTH * _RUN:
        raise ModelError(f"The tokenizer makes {max(counts)} tokens of {_RUN} equal letters.", _REMEDY)


def _described(part: Any) -> Any:
    """A part as tokenizer.json describes it; None if there is none, or it is made in Python."""
    try:
        return None if part is None else json.loads(part.__getstate__())
    except (TypeError, ValueError):
        return None


def _patterns(described: Any) -> list[str]:
    """All patterns in a description."""
    if isinstance(described, Mapping):
        own = described.get("Regex")
        inner = [text for value in described.values() for text in _patterns(value)]
        return [*([own] if isinstance(own, str) else []), *inner]
    if isinstance(described, list):
        return [text for value in described for text in _patterns(value)]
    return []
