"""Nemotron 3.5 Transcribe: asked in words, with the sentence that its processor asks with."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

_ASKED = (
    "Audio transcription. Language: as spoken. Wording: verbatim, including fillers and repetitions. Formatting: "
    "punctuation and capitalization. Output: transcript only."
)

INPUTS = FamilyInputs(speech=SpeechForm(_ASKED))
