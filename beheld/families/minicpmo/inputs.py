"""MiniCPM-o: as MiniCPM-V; `(<audio>./</audio>)` in the text becomes audio, each second between delimiters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.core.speech import SpeechForm
from beheld.families.inputs import ByCount, ItemPlace
from beheld.families.minicpmv.inputs import INPUTS as VISION
from beheld.families.minicpmv.inputs import call as call_vision
from beheld.families.minicpmv.inputs import pieces_of

PLACEHOLDERS = {**VISION.placeholders, "audio": "(<audio>./</audio>)"}
_MARKS = re.compile(r"\(<(image|video|audio)>\./</\1>\)")


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.minicpmo.processing import load as load_own

    return load_own(path, PLACEHOLDERS)


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one item; see families.inputs.Call."""
    if modality == "audio":
        made: tuple[Mapping[str, Any], str] = processor.audio(item, options)
        return made
    return call_vision(processor, modality, item, options, setting)


def counted(processor: Any, num_embeds: int) -> str:
    """Return the text that so many embeddings of audio stand for; see ByCount."""
    text: str = processor.audio_marks(num_embeds)
    return text


def rewrite(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Return the pieces of a text with marks of media; other text is unchanged."""
    return pieces_of(text, _MARKS)


def rewrite_chat(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Return the pieces of a rendered conversation; without media, the marks are text."""
    return rewrite(text, counts) if any(counts.values()) else text


INPUTS = replace(
    VISION,
    load=load,
    call=call,
    placeholders=PLACEHOLDERS,
    template="",
    variant=None,
    rewrite=rewrite,
    rewrite_chat=rewrite_chat,
    places={**VISION.places, "audio": "<|audio_start|>"},
    embedded={**VISION.embedded, "audio": ByCount(counted)},
    speech=SpeechForm(
        "Please listen to the audio snippet{language} carefully and transcribe the content.",
        "Please listen to the audio snippet{language} carefully and translate it into English.",
    ),
)
