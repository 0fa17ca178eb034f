"""ColPali: the words of queries and pages, with BOS as PaliGemma's processor writes it."""

from __future__ import annotations

from beheld.families._shared.late.inputs import LatePrompts
from beheld.families.inputs import FamilyInputs

_prompts = LatePrompts(
    query="<bos>Question: ", spare="<pad>", page="<image><bos>Describe the image.\n", image="<image>"
)

INPUTS = FamilyInputs(
    template="_shared/plain.jinja",
    only_template=True,
    rewrite=_prompts.rewritten,
    rewrite_chat=_prompts.rewritten,
    rewritten_ends="written",
    most={"image": 1},
    closes="the model gives vectors, and no answer",
)
