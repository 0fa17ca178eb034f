"""Intern-S1: images and videos as InternVL's; text that its tokenizer would read as a formula is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.core.errors import PromptError
from beheld.families.inputs import LAID_OUT, FamilyInputs
from beheld.families.interns1.processing import first_formula, read
from beheld.families.internvl.inputs import INPUTS as INTERNVL

# Letters of a formula that an error shows.
_SHOWN = 60


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from transformers import AutoImageProcessor, AutoVideoProcessor, InternVLProcessor

    from beheld.checkpoint.files import CONFIG, read_json

    images = AutoImageProcessor.from_pretrained(str(path))
    if (path / "video_preprocessor_config.json").is_file():
        videos = AutoVideoProcessor.from_pretrained(str(path))
    else:
        from transformers import InternVLVideoProcessor

        videos = InternVLVideoProcessor(size=dict(images.size))
    own = read_json(path / "processor_config.json").get("image_seq_length")
    length = own or read_json(path / CONFIG).get("image_seq_length", 256)
    tokenizer = read(path)
    return InternVLProcessor(images, tokenizer, videos, length, tokenizer.chat_template)


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Return the text unchanged.

    Raises:
        PromptError: a part of it would be encoded with a vocabulary for formulas.
    """
    found = first_formula(text)
    if found is not None:
        raise PromptError(
            f"Intern-S1 would read {found[:_SHOWN]!r} as a formula, with a vocabulary of its own, which is not built.",
            "Put a space between its letters, or give the name instead.",
        )
    return text


INPUTS = FamilyInputs(
    load=load,
    read_tokenizer=read,
    rewrite=rewrite,
    rewrite_chat=rewrite,
    call=INTERNVL.call,
    places=INTERNVL.places,
    embedded={"image": ("<img>", "</img>"), "video": LAID_OUT},
    looks=INTERNVL.looks,
)
