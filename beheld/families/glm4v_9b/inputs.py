"""GLM-4V-9B: three tokens in a row mark an image, and all of them become its embeddings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.families.inputs import FamilyInputs, ItemPlace

BEGIN, IMAGE, END = "<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>"
_MARK = BEGIN + IMAGE + END
# What the tokenizer puts before every text.
_FIRST = "[gMASK]<sop>"
# What starts a message, and the place of an image. The line break after a role is encoded without what follows it.
_BORDERS = re.compile(rf"(<\|(?:system|user|assistant|observation)\|>[^\n<]*\n|{re.escape(_MARK)})")


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.glm4v_9b.processing import load as load_own

    return load_own(path)


def read_tokenizer(path: Path) -> Any:
    """Make the tokenizer of tokenizer.model; None where another is named; see FamilyInputs.read_tokenizer."""
    from beheld.families.glm4v_9b.processing import read

    return read(path)


def rewrite_chat(text: str, counts: Mapping[str, int]) -> tuple[str | ItemPlace, ...]:
    """Return the pieces of a rendered conversation as the repository's code encodes them."""
    pieces = (piece for piece in _BORDERS.split(text.removeprefix(_FIRST)) if piece)
    return (_FIRST, *(ItemPlace("image") if piece == _MARK else piece for piece in pieces))


INPUTS = FamilyInputs(
    load=load,
    read_tokenizer=read_tokenizer,
    template="glm4v_9b/chat_template.jinja",
    placeholders={"image": _MARK},
    places={"image": (BEGIN, IMAGE, END)},
    embeds_all=frozenset(("image",)),
    rewrite_chat=rewrite_chat,
    embedded={"image": (BEGIN, END)},
    most={"image": 1},
)
