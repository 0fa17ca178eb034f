"""Options of own processors: tiles, frames of a video that a call chooses, and those of Whisper's features."""

from __future__ import annotations

from typing import Any, TypedDict

from transformers.video_utils import default_sample_indices_fn

MOST_TILES = 100
"""The most tiles of an image that a call may ask for. An image is enlarged to them, and for InternVL's the time to list
the grids grows with the third power: 0.03 s for 100, 0.7 s for 300."""


class AudioOptions(TypedDict, total=False):
    """The options of one call of Whisper's feature extractor."""

    do_normalize: bool


class FrameChoice:
    """Chooses frames as transformers' video processors do, if a call says so."""

    do_sample_frames = False

    def sample_frames(self, metadata: Any, num_frames: int | None = None, fps: float | None = None, **_: Any) -> Any:
        """Return the indices of frames that a call chooses, evenly spread.

        Raises:
            ValueError: both numbers are given, or one does not fit the video.
        """
        if num_frames is not None and fps is not None:
            raise ValueError("num_frames and fps exclude each other")
        return default_sample_indices_fn(metadata=metadata, num_frames=num_frames, fps=fps)
