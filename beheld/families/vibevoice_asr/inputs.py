"""VibeVoice-ASR: its chat template writes the length of an audio, which is not known where templates are rendered."""

from __future__ import annotations

from collections.abc import Mapping

from beheld.core.errors import PromptError
from beheld.families.inputs import FamilyInputs

_LENGTH = "<|AUDIO_DURATION|>"


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Return the text as it is.

    Raises:
        PromptError: it has the mark in whose place transformers' processor writes the seconds of an audio.
    """
    if _LENGTH in text:
        raise PromptError(
            f"{_LENGTH}, which stands for the seconds of an audio, cannot be filled in yet.",
            'Send a prompt instead of messages, with the seconds in its text, as in "This is a 7.56 seconds audio".',
        )
    return text


INPUTS = FamilyInputs(
    placeholders={"audio": "<|object_ref_start|><|box_start|><|object_ref_end|>"},
    rewrite=rewrite,
    rewrite_chat=rewrite,
)
