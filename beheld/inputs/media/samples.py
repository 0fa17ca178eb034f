"""One item of each modality, with which an engine tests at its start what its checkpoint makes of media."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import BeheldError, LimitError, ModelError, ProcessError, WorkerError, first_line
from beheld.core.media import MediaItem, MediaRef
from beheld.families.inputs import FamilyInputs
from beheld.inputs.fetch.fetch import FetchRules
from beheld.inputs.media.item_maker import ItemMaker
from beheld.inputs.media.processor import ItemProcessor
from beheld.inputs.media.workers import MediaWorkers
from beheld.utils.cancellation import CancelToken
from beheld.utils.hf_log import errors_only
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# In pixels. Small, so that a start takes no longer for it; a processor enlarges what its model cannot take.
_SIDE = 112
# The size of many images: towers use all their kernels for it.
_LARGE_SIDE = 448
_FRAMES = 2
# Patches of an item that are enough to test a tower.
_PATCHES = 64
# Modality -> a processor's names of patches and of their grids: times, height, width.
_GRIDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
_RATE = 16_000


def sample_items(
    info: ModelInfo,
    config: EngineConfig,
    args: EngineArgs,
    processor: ItemProcessor,
    family: FamilyInputs,
    rules: FetchRules,
    workers: MediaWorkers,
    *,
    large: bool = False,
) -> list[MediaItem]:
    """An item of each modality that is not switched off, made as those of requests are; no cache keeps them.

    Args:
        info, config, args, processor, family, rules, workers: those of the pipeline.
        large: images have the size of many requests' instead of a small one.

    Raises:
        ModelError: the checkpoint's processor cannot make one.
    """
    bare = replace(config, processor_cache_bytes=0), replace(args, strict_media=False)
    maker = ItemMaker(info, *bare, processor, family, rules, workers)
    try:
        items: list[MediaItem] = []
        # What transformers warns of concerns requests, which repeat it.
        with errors_only():
            for modality in info.modalities:
                item = _made(modality, maker, config, _LARGE_SIDE if large else _SIDE, only=not items)
                items += [] if item is None else [item]
        return items
    finally:
        maker.close()


def _made(modality: str, maker: ItemMaker, config: EngineConfig, side: int, *, only: bool) -> MediaItem | None:
    """An item of the modality; `only`: nothing of another modality could be made so far."""
    if not config.limit_per_prompt.get(modality):
        return None
    try:
        made = maker.make_all([MediaRef(modality, _content(modality, side))], {}, b"", CancelToken())
        return made[0].item
    except (LimitError, WorkerError) as error:
        # Of this machine's bounds, not of the checkpoint.
        logger.warning("The processor was not tried with the modality %s: %s", modality, error)
        return None
    except ModelError:
        # The processor cannot be loaded, whatever the modality.
        raise
    except Exception as error:
        if isinstance(error, ProcessError) and not only:
            # The processor works, and says what this modality lacks: a font for videos, say, or an option.
            logger.warning("Requests with the modality %s will fail: %s", modality, error)
            return None
        reason = error.reason if isinstance(error, BeheldError) else f"{type(error).__name__}: {first_line(error)}"
        own = error.remedy if isinstance(error, BeheldError) else ""
        detail = error.detail if isinstance(error, BeheldError) else ""
        raise ModelError(
            f"The checkpoint's processor makes nothing of the modality {modality}: {reason}",
            f"{own} Check preprocessor_config.json and processor_config.json, or switch {modality} off with "
            f"limit_mm_per_prompt={{{modality!r}: 0}}.".lstrip(),
            detail=detail,
        ) from error


def first_rows(item: MediaItem) -> MediaItem:
    """Return the upper rows of an image or of frames that their processor enlarged; of features that are the patches of
    one grid alone.

    A tower takes any grid, and its attention grows with the square of the patches. Other items stay as they are. For
    towers alone: `replacement_ids` stay those of the whole item.
    """
    names = _GRIDS.get(item.modality)
    if names is None or item.features.keys() != set(names) or not item.num_embeds:
        return item
    patches, grid = (item.features[name] for name in names)
    times, height, width = grid.reshape(-1, 3)[0].tolist()
    # Patches of `merge` x `merge` become one embedding.
    merge = math.isqrt(len(patches) // item.num_embeds)
    if grid.numel() != 3 or times != 1 or len(patches) != height * width or merge**2 * item.num_embeds != len(patches):
        return item
    rows = merge * math.ceil(_PATCHES / (width * merge))
    if rows >= height or width % merge or height % merge:
        return item
    cut = grid.clone()
    cut[..., 1] = rows
    features = dict(zip(names, (patches[: rows * width], cut), strict=True))
    return replace(item, features=features, num_embeds=rows * width // merge**2)


def _content(modality: str, side: int) -> Any:
    """Something that is neither uniform nor random; images of `side` x `side` pixels."""
    import numpy as np

    if modality == "audio":
        return np.sin(np.arange(_RATE, dtype=np.float32) / 16), _RATE
    ramp = np.arange(side).astype(np.uint8)
    image = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None, :], ramp[::-1, None]), axis=-1)
    if modality == "video":
        frames = np.stack([np.roll(image, shift, axis=0) for shift in range(_FRAMES)])
        return frames, {"fps": 1.0, "total_num_frames": _FRAMES, "frames_indices": list(range(_FRAMES))}
    from PIL import Image

    return Image.fromarray(image)
