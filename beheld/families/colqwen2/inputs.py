"""ColQwen2: the words of queries and pages."""

from __future__ import annotations

from beheld.families._shared.late.inputs import LatePrompts
from beheld.families.inputs import FamilyInputs

_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

_prompts = LatePrompts(
    query="Query: ",
    spare="<|endoftext|>",
    page=f"<|im_start|>user\n{_IMAGE}Describe the image.<|im_end|><|endoftext|>",
    image=_IMAGE,
)

INPUTS = FamilyInputs(
    placeholders={"image": _IMAGE},
    template="_shared/plain.jinja",
    only_template=True,
    rewrite=_prompts.rewritten,
    rewrite_chat=_prompts.rewritten,
    most={"image": 1},
    closes="the model gives vectors, and no answer",
)
