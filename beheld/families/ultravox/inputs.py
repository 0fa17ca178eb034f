"""Ultravox: `<|audio|>` in the text stands for an audio item; texts are encoded without special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs, ItemPlace

_MARK = "<|audio|>"


def load(path: Path) -> Any:
    """Make the processor of the checkpoint in `path`; see FamilyInputs.load."""
    from beheld.families.ultravox.processing import load as load_own

    return load_own(path)


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one audio item; see families.inputs.Call."""
    made: tuple[Mapping[str, Any], str] = processor.audio(item, options)
    return made


def rewrite(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Return the pieces of a text, each of which is encoded alone; the text has its special tokens."""
    first, *rest = text.split(_MARK)
    pieces: list[str | ItemPlace] = [first]
    for part in rest:
        pieces += [ItemPlace("audio"), part]
    return tuple(piece for piece in pieces if piece)


def rewrite_chat(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Return the pieces of a rendered conversation; without audio, the marks are text."""
    return rewrite(text, counts) if any(counts.values()) else text


INPUTS = FamilyInputs(
    load=load,
    call=call,
    placeholders={"audio": _MARK},
    rewrite=rewrite,
    rewrite_chat=rewrite_chat,
    speech=SpeechForm("Transcribe the audio{language} into text.", "Translate the audio{language} into English text."),
)
