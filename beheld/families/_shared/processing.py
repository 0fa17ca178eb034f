"""Frames of a video that a call chooses, for processors that receive decoded frames."""

from __future__ import annotations

from typing import Any

from transformers.video_utils import default_sample_indices_fn


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
