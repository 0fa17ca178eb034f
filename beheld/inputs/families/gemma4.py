"""Gemma 4: pictures and sounds between marks; a video is its frames, each with its time."""

from __future__ import annotations

from beheld.inputs.families import LAID_OUT, Family
from beheld.inputs.media.effective_size import Seen, Sight, at_positions


def look(sight: Sight) -> Seen | None:
    """How large the picture stands before the tower; see Family.looks."""
    patch = sight.edge("patch_size")
    if patch is None:
        return None
    step = patch * (sight.edge("pooling_kernel_size") or 1)
    return Seen(*at_positions(sight.outputs["image_position_ids"], patch), step=step)


def look_at_frames(sight: Sight) -> Seen | None:
    """How large the frames of a video stand before the tower; see Family.looks."""
    patch = sight.edge("patch_size")
    positions = sight.outputs["video_position_ids"]
    return None if patch is None else Seen(*at_positions(positions, patch), frames=positions.shape[:-2].numel())


FAMILY = Family(
    embedded={"image": ("<|image>", "<image|>"), "audio": ("<|audio>", "<audio|>"), "video": LAID_OUT},
    looks={"image": look, "video": look_at_frames},
)
