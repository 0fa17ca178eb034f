"""PaliGemma: images stand before the prompt, the start of the text behind them, and a line break ends it."""

from __future__ import annotations

from collections.abc import Mapping

from beheld.core.errors import PromptError
from beheld.families.inputs import FamilyInputs

_IMAGE = "<image>"
_START = "<bos>"


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Put missing placeholders first, the start of text behind the last one, and a line break at the end."""
    pictures = counts.get("image", 0)
    if not pictures:
        raise PromptError("This model answers about pictures only.", "Give a picture with the prompt.")
    if _IMAGE not in text:
        text = _IMAGE * pictures + text
    cut = text.rfind(_IMAGE) + len(_IMAGE)
    return text[:cut] + _START + text[cut:] + "\n"


INPUTS = FamilyInputs(
    template="_shared/plain.jinja",
    rewrite=rewrite,
    rewrite_chat=rewrite,
    rewritten_ends="written",
    closes="a line break ends every prompt, all of which is read both ways, and an answer begins behind it",
)
