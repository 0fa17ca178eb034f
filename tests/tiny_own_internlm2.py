"""A small random checkpoint of InternLM2 in its publisher's layout; see tiny.py for what such checkpoints share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny_media import FORMS
from tests.tiny_own_intern import (
    INTERNLM2,
    INTERNLM2_TURN,
    INTERNLM2_TURNS,
    publish,
    write_internlm2_tokenizer,
    write_model,
)

SEEDS: dict[str, int] = {"internlm2": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

CONFIG = INTERNLM2 | {"auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"}}


def published(weights: dict[str, Any]) -> dict[str, Any]:
    """A Llama's weights under InternLM2's names."""
    return {name.removeprefix("language_model."): weight for name, weight in publish(weights, groups=2).items()}


def make_internlm2(path: Path) -> None:
    """As internlm/internlm2-chat-1_8b: one matrix for all heads, and only tokenizer.model."""
    ids = write_internlm2_tokenizer(path, ())
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["</s>"]]}
    quiet = ("<unk>", "<s>", *INTERNLM2_TURNS[:4], "<|im_start|>")
    write_model(path, CONFIG, generation, ids, quiet, seed=SEEDS["internlm2"], rename=published)
    (path / "preprocessor_config.json").unlink()


TINY: dict[str, Callable[[Path], None]] = {"internlm2": make_internlm2}
TEXT_FAMILIES = tuple(TINY)
FORMS.update({"internlm2": INTERNLM2_TURN})
