"""PaliGemma: images come before the prompt, the BOS token after them, and a line break at the end."""

from __future__ import annotations

from collections.abc import Mapping

from beheld.core.errors import PromptError
from beheld.families.inputs import FamilyInputs

_IMAGE = "<image>"
_START = "<bos>"


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Add missing placeholders at the start, the BOS token after the last one, and a line break at the end."""
    pictures = counts.get("image", 0)
    if not pictures:
        raise PromptError("This model requires an image.", "Send an image with the prompt.")
    if _IMAGE not in text:
        text = _IMAGE * pictures + text
    cut = text.rfind(_IMAGE) + len(_IMAGE)
    return text[:cut] + _START + text[cut:] + "\n"


INPUTS = FamilyInputs(
    template="_shared/plain.jinja",
    rewrite=rewrite,
    rewrite_chat=rewrite,
    rewritten_ends="written",
    closes="a line break ends every prompt, and the answer follows it",
)
