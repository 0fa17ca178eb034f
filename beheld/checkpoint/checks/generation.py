"""What generation_config.json may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.checkpoint.checks.entries import Numbers, check_numbers, refused
from beheld.checkpoint.files import GENERATION
from beheld.core.params import MIN_REPETITION_PENALTY

MAX_NO_REPEAT_NGRAM = 1024
"""The longest n-gram: each step compares this number of tokens with all earlier ones."""
_ID = Numbers(-1, 1 << 31, whole=True, each=True, strict=True)
_COUNT = Numbers(0, 1 << 31, whole=True, strict=True)

_BOUNDS = {
    # What requests may say, for those that say nothing get these.
    "temperature": Numbers(0, 100, strict=True),
    "top_p": Numbers(0, 1, above=True, strict=True),
    "top_k": Numbers(-1, 1 << 31, whole=True, strict=True),
    "min_p": Numbers(0, 1, strict=True),
    "repetition_penalty": Numbers(MIN_REPETITION_PENALTY, 100, strict=True),
    "no_repeat_ngram_size": Numbers(0, MAX_NO_REPEAT_NGRAM, whole=True, strict=True),
    "num_beams": Numbers(1, 1 << 16, whole=True, strict=True),
    "max_new_tokens": Numbers(1, 1 << 31, whole=True, strict=True),
    "min_new_tokens": _COUNT,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), _ID),
    **dict.fromkeys(("no_timestamps_token_id", "max_initial_timestamp_index"), _ID),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), _ID),
}


def check_generation(raw: Mapping[str, Any]) -> None:
    """Refuse settings that no answer can be made with.

    Raises:
        ModelError: it names the key.
    """
    check_numbers(GENERATION, raw, _BOUNDS)
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        tokens = raw.get(name)
        if tokens is not None and not _are_ids(tokens):
            raise refused(GENERATION, name, tokens, "a list of token ids")
    for name in ("lang_to_id", "task_to_id"):
        named = raw.get(name)
        if named is not None and not (isinstance(named, Mapping) and _are_ids(list(named.values()))):
            raise refused(GENERATION, name, named, "token ids by name")
    words = raw.get("bad_words_ids")
    if words is not None and not (isinstance(words, list) and all(map(_are_ids, words))):
        raise refused(GENERATION, "bad_words_ids", words, "a list of lists of token ids")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) and token >= 0 for token in value)
