"""Chameleon: its processor ends every prompt with a token after which the answer starts."""

from __future__ import annotations

from collections.abc import Mapping

from beheld.families.inputs import FamilyInputs

_ANSWER = "<reserved08706>"


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Append the end-of-turn token to the prompt."""
    return text + _ANSWER


INPUTS = FamilyInputs(
    template="chameleon/chat_template.jinja",
    rewrite=rewrite,
    rewrite_chat=rewrite,
    closes=f"{_ANSWER} ends every prompt, and the answer follows it",
    embedded={"image": ("<racm3:break>", "<eoss>")},
)
