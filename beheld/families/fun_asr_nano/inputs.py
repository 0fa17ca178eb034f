"""Fun-ASR-Nano: how it is asked for transcripts."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

# Its chat template asks for a transcript where a message has no text.
INPUTS = FamilyInputs(speech=SpeechForm())
