"""Qwen2-Audio: how it is asked for transcripts."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

INPUTS = FamilyInputs(
    speech=SpeechForm("Transcribe the speech{language} into text.", "Translate the speech{language} into English text.")
)
