"""Chameleon: a token behind every prompt says that an answer follows, as its processor has it."""

from __future__ import annotations

from collections.abc import Mapping

from beheld.families.inputs import FamilyInputs

_ANSWER = "<reserved08706>"


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """The end of the turn behind the prompt."""
    return text + _ANSWER


INPUTS = FamilyInputs(
    template="chameleon/chat_template.jinja",
    rewrite=rewrite,
    rewrite_chat=rewrite,
    closes=f"{_ANSWER} ends every prompt, and an answer begins behind it",
    embedded={"image": ("<racm3:break>", "<eoss>")},
)
