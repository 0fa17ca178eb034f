"""The processor's own picture mathematics, without the processor: resize, then cut into patches, still in 8 bits.

A test compares this with transformers' processors. Patches are in the order in which the model merges them: blocks
of 2 by 2 patches, the blocks row by row.
"""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from training.mote.checkpoint import IMAGE_PIXELS, MERGE, PATCH, TEMPORAL, VIDEO_PIXELS


def target_size(width: int, height: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """Width and height after the resize: multiples of 20 whose product keeps to the bounds where that is possible."""
    side = PATCH * MERGE
    least, most = bounds
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side * side > most:
        shrink = math.sqrt(height * width / most)
        rows = max(1, math.floor(height / shrink / side))
        columns = max(1, math.floor(width / shrink / side))
    elif rows * columns * side * side < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
    return columns * side, rows * side


def _cut(frames: np.ndarray) -> np.ndarray:
    """(T, H, W, 3) -> (patches, 3 * T * PATCH * PATCH), one row for each place of the grid."""
    count, height, width, _ = frames.shape
    block = PATCH * MERGE
    split = frames.reshape(count, height // block, MERGE, PATCH, width // block, MERGE, PATCH, 3)
    return split.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(-1, 3 * count * PATCH * PATCH)


def picture_patches(image: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
    """8-bit patches (N, 300) of one RGB picture, and its grid (1, rows, columns).

    The model sees each patch twice in time; that doubling is left to the device.
    """
    width, height = target_size(*image.size, IMAGE_PIXELS)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    return _cut(pixels[None]), (1, height // PATCH, width // PATCH)


def clip_patches(frames: Sequence[Image.Image]) -> tuple[np.ndarray, tuple[int, int, int]]:
    """8-bit patches (N, 600) of the frames of one video, and its grid (pairs of frames, rows, columns)."""
    width, height = target_size(*frames[0].size, VIDEO_PIXELS)
    small = [np.asarray(frame.resize((width, height), Image.Resampling.BICUBIC)) for frame in frames]
    if len(small) % TEMPORAL:
        small.append(small[-1])
    pairs = [_cut(np.stack(small[start : start + TEMPORAL])) for start in range(0, len(small), TEMPORAL)]
    return np.concatenate(pairs), (len(pairs), height // PATCH, width // PATCH)
