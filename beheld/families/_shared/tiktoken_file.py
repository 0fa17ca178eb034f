"""Tokenizers stored as tiktoken's files: a line for each token, its bytes in base64 and its rank."""

from __future__ import annotations

import base64
import binascii
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers.convert_slow_tokenizer import TikTokenConverter

from beheld.core.errors import ModelError

_REMEDY = "Fetch the checkpoint again."


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the ranks, which are also the ids, of the tokens in `file`.

    Raises:
        ModelError: the file is missing or damaged.
    """
    if not file.is_file():
        raise ModelError(f"The tokenizer's file {file.name} is missing.", _REMEDY)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelError(f"Line {number} of {file.name} is not a token in base64 and its rank.", _REMEDY) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"The ranks in {file.name} are not 0, 1, 2, ...", _REMEDY)
    if missing := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
        raise ModelError(f"{file.name} has no token for the byte {missing[0]}.", _REMEDY)
    return ranks


class _Converter(TikTokenConverter):
    """transformers' conversion; its own reading of the file needs tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        """Return the ranks in the file `tiktoken_url`."""
        return read_ranks(Path(tiktoken_url))


def read(file: Path, split: str | None = None) -> Any:
    """Return a tokenizer of the library `tokenizers` that encodes as tiktoken does.

    Args:
        file: the file of ranks.
        split: the pattern that cuts a text before its pieces are encoded; None for that of GPT-4's vocabulary.

    Raises:
        ModelError: as `read_ranks`.
    """
    changed = file.stat().st_mtime_ns if file.is_file() else 0
    known = _converted(str(file), changed, split)
    made = type(known)(known.model)
    for part in ("pre_tokenizer", "post_processor", "decoder"):
        setattr(made, part, getattr(known, part))
    return made


# A vocabulary of 150,000 tokens takes seconds, and an engine reads it for its prompts and for its processor.
@lru_cache(maxsize=1)
def _converted(file: str, changed: int, split: str | None) -> Any:
    return _Converter(vocab_file=file, **({} if split is None else {"pattern": split})).converted()
