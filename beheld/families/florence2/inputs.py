"""Florence-2: a prompt is a task token, which is replaced by a sentence about one image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import PromptError
from beheld.families.inputs import FamilyInputs

_IMAGE = "<image>"
_ALONE = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
}
_WITH_TEXT = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {} describe?",
    "<REGION_TO_OCR>": "What text is in the region {}?",
}


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Put the image first, then the task's sentence between BOS and EOS.

    Raises:
        PromptError: text follows a task that takes none.
    """
    text = _sentence(text.removeprefix(_IMAGE) if counts.get("image") else text)
    return f"{_IMAGE}<s>{text}</s>" if counts.get("image") else text


def _sentence(text: str) -> str:
    for task, sentence in _ALONE.items():
        if task in text:
            if text != task:
                raise PromptError(f"The task {task} takes no text.", "Write the task and nothing else.")
            return sentence
    for task, sentence in _WITH_TEXT.items():
        if task in text:
            return sentence.format(text.replace(task, "").strip())
    return text


def load(path: Path) -> Any:
    """Load the processor of a checkpoint; microsoft's repositories have custom code for what transformers also has."""
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, Florence2Processor

    from beheld.inputs.prompt.tokenizer import extended

    if read_json(path / "processor_config.json"):
        return AutoProcessor.from_pretrained(str(path))
    ours = own_config(read_json(path / CONFIG))
    tokenizer = extended(AutoTokenizer.from_pretrained(str(path), **ours), ADDED)
    tokenizer.image_token = _IMAGE
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids(_IMAGE)
    return Florence2Processor(AutoImageProcessor.from_pretrained(str(path), **ours), tokenizer)


def _pairs(*names: str) -> tuple[str, ...]:
    return tuple(mark for name in names for mark in (f"<{name}>", f"</{name}>"))


ADDED = (
    *_pairs("od", "ocr"),
    *(f"<loc_{place}>" for place in range(1000)),
    *_pairs("cap", "ncap", "dcap", "grounding", "seg"),
    "<sep>",
    *_pairs("region_cap", "region_to_desciption", "proposal", "poly"),
    "<and>",
    _IMAGE,
)
"""Add the processor's tokens and the placeholder after them to BART's tokenizer."""

INPUTS = FamilyInputs(
    template="_shared/plain.jinja",
    rewrite=rewrite,
    rewrite_chat=rewrite,
    rewritten_ends="written",
    closes="its encoder reads the whole prompt, and the answer starts a new sequence",
    most={"image": 1},
    load=load,
    added=ADDED,
)
