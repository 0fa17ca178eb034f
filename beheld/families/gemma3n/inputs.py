"""Gemma 3n: a placeholder becomes a block of embeddings between blank lines, as many for every audio item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ProcessError
from beheld.families.inputs import FamilyInputs

# Two strides of two before the tower's layers, every fourth position behind them.
_FRAMES_PER_EMBED = 16


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image or audio item; see families.inputs.Call.

    Older versions have no step of their own for that.

    Raises:
        ProcessError: the audio is shorter than a frame of features, or makes more embeddings than it has places.
    """
    if modality != "audio":
        return processor.image_processor([item], **options), processor.full_image_sequence
    outputs = processor.feature_extractor([item], **options)
    frames = int(outputs["input_features"].shape[1])
    if frames == 0:
        raise ProcessError("The sound does not fill a frame of features.", "It is too short to be heard.")
    if frames > _FRAMES_PER_EMBED * processor.audio_seq_length:
        raise ProcessError(
            f"The sound has {frames} frames of features, more than {processor.audio_seq_length} embeddings can hold.",
            "Cut it first, or leave the option truncation out: the processor then does.",
        )
    return outputs, processor.full_audio_sequence


INPUTS = FamilyInputs(
    call=call,
    embedded={
        "image": ("\n\n<start_of_image>", "<end_of_image>\n\n"),
        "audio": ("\n\n<start_of_audio>", "<end_of_audio>\n\n"),
    },
)
