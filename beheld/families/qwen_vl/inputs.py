"""Qwen-VL: an image is `<img></img>` in a prompt, by custom after its number: `Picture 1: <img></img>`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.core.errors import PromptError
from beheld.families.inputs import FamilyInputs

_IMAGE = "<img></img>"
_MARKED = "<img><imgpad></img>"
_OTHER = re.compile(r"<img>(?!<imgpad></img>)")


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.qwen_vl.processing import load as load_own

    return load_own(path)


def read_tokenizer(path: Path) -> Any:
    """Make the tokenizer of the checkpoint in `path`; see FamilyInputs.read_tokenizer."""
    from beheld.families.qwen_vl.processing import read_tokenizer as read

    return read(path)


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Return a prompt with the token of an embedding between the tokens of each image.

    Raises:
        PromptError: the prompt has something else after `<img>`, which the published code takes for a path.
    """
    text = text.replace(_IMAGE, _MARKED)
    if _OTHER.search(text):
        raise PromptError(
            "The prompt has <img> without </img> right after it. Paths and addresses there are not read.",
            f"Write {_IMAGE} for each image, and give the images under multi_modal_data.",
        )
    return text


def rewrite_chat(text: str, counts: Mapping[str, int]) -> str:
    """As `rewrite`, for what a chat template wrote."""
    return text.replace(_IMAGE, _MARKED)


def variant(path: Path) -> FamilyInputs:
    """Return the inputs of the checkpoint in `path`: one that is not trained on conversations has a plain template."""
    plain = read_json(path / "generation_config.json").get("chat_format") == "raw"
    return replace(INPUTS, template="qwen_vl/plain_template.jinja") if plain else INPUTS


INPUTS = FamilyInputs(
    load=load,
    read_tokenizer=read_tokenizer,
    template="qwen_vl/chat_template.jinja",
    placeholders={"image": f"Picture {{number}}: {_IMAGE}"},
    rewrite=rewrite,
    rewrite_chat=rewrite_chat,
    variant=variant,
)
