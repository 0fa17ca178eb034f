"""Gemma 4: images and audio between delimiters; a video is its frames, each with its time."""

from __future__ import annotations

from beheld.core.speech import SpeechForm
from beheld.families.inputs import LAID_OUT, EffectiveSize, FamilyInputs, ProcessedItem
from beheld.inputs.media.effective_size import at_positions


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks."""
    patch = item.edge("patch_size")
    if patch is None:
        return None
    step = patch * (item.edge("pooling_kernel_size") or 1)
    return EffectiveSize(*at_positions(item.outputs["image_position_ids"], patch), step=step)


def look_at_frames(item: ProcessedItem) -> EffectiveSize | None:
    """Return the effective size of a video's frames; see FamilyInputs.looks."""
    patch = item.edge("patch_size")
    positions = item.outputs["video_position_ids"]
    return (
        None if patch is None else EffectiveSize(*at_positions(positions, patch), frames=positions.shape[:-2].numel())
    )


INPUTS = FamilyInputs(
    embedded={"image": ("<|image>", "<image|>"), "audio": ("<|audio>", "<audio|>"), "video": LAID_OUT},
    looks={"image": look, "video": look_at_frames},
    speech=SpeechForm(
        "Transcribe this audio{language} into text.", "Translate this audio{language} into English text."
    ),
)
