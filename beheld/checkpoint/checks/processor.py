"""What the files of a checkpoint's processors may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.checkpoint.checks.entries import Numbers, check_numbers, refused, settings

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SIDE = Numbers(1, 1 << 15, whole=True, each=True)
_COUNT = Numbers(1, 1 << 16, whole=True)
_PIXELS = Numbers(1, 1 << 31, whole=True)
# Smaller media are enlarged to it, so it is what each costs at least.
_LEAST = Numbers(1, 1 << 22, whole=True)

_BOUNDS = {
    "image_mean": Numbers(-1e4, 1e4, each=True),
    "image_std": Numbers(0, 1e4, above=True, each=True),
    "rescale_factor": Numbers(0, 1e4, above=True),
    **dict.fromkeys(("height", "width"), _SIDE),
    **dict.fromkeys(("shortest_edge", "min_pixels"), _LEAST),
    "crop_size": _SIDE,
    **dict.fromkeys(("patch_size", "merge_size", "temporal_patch_size"), Numbers(1, 4096, whole=True, each=True)),
    **dict.fromkeys(("longest_edge", "max_pixels"), _PIXELS),
    **dict.fromkeys(("sampling_rate", "n_fft", "hop_length", "feature_size", "chunk_length"), Numbers(1, 1e6)),
    **dict.fromkeys(("num_frames", "max_frames", "min_frames"), _COUNT),
    "fps": Numbers(0, 1e4, above=True),
    "resample": Numbers(0, 5, whole=True),
}


def check_processor(file: str, raw: Mapping[str, Any]) -> None:
    """Refuse numbers that make nothing finite of media.

    Raises:
        ModelError: it names the key.
    """
    check_numbers(file, raw, _BOUNDS)
    for where, name, value in settings(raw):
        if name.endswith(("_type", "_class")) and name != "model_type" and not isinstance(value, str | None):
            raise refused(file, where, value, "the name of a class")
        if name in ("image_mean", "image_std") and isinstance(value, list) and len(value) not in (1, 3, 4):
            raise refused(file, where, value, "one number for each channel")
