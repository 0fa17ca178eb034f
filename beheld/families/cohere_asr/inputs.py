"""Cohere's transcription model: a prompt names languages and task by tokens."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families._shared.hearing.inputs import fast_conformer_states, heard

_SPEECH = SpeechForm(
    "<|startofcontext|><|startoftranscript|><|emo:undefined|><|{code}|><|{code}|><|pnc|><|noitn|><|notimestamp|><|nodiarize|>",
    written=True,
)

INPUTS = heard("<|startofcontext|>", ("input_features", "attention_mask"), fast_conformer_states, _SPEECH)
