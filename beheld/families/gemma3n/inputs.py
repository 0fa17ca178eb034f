"""Gemma 3n: a placeholder becomes a block of embeddings between blank lines, equally many for every audio item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ProcessError
from beheld.core.speech import SpeechForm
from beheld.families.inputs import FamilyInputs

# Two strides of two before the tower's layers, every fourth position after them.
_FRAMES_PER_EMBED = 16


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image or audio item; see families.inputs.Call.

    Older versions have no separate step for it.

    Raises:
        ProcessError: the audio is shorter than one feature frame, or needs more embeddings than it has places.
    """
    if modality != "audio":
        return processor.image_processor([item], **options), processor.full_image_sequence
    outputs = processor.feature_extractor([item], **options)
    frames = int(outputs["input_features"].shape[1])
    if frames == 0:
        raise ProcessError("The audio is shorter than one feature frame.", "Use a longer audio file.")
    if frames > _FRAMES_PER_EMBED * processor.audio_seq_length:
        raise ProcessError(
            f"The audio has {frames} feature frames, more than {processor.audio_seq_length} embeddings can hold.",
            "Cut it first, or leave out the option truncation: the processor then cuts it.",
        )
    return outputs, processor.full_audio_sequence


INPUTS = FamilyInputs(
    call=call,
    embedded={
        "image": ("\n\n<start_of_image>", "<end_of_image>\n\n"),
        "audio": ("\n\n<start_of_audio>", "<end_of_audio>\n\n"),
    },
    speech=SpeechForm(
        "Transcribe this audio{language} into text.", "Translate this audio{language} into English text."
    ),
)
