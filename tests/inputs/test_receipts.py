"""Receipts tell what stands before the tower, of every family, and strict_media refuses nothing but what was lost."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from beheld.core.errors import MediaLossError
from beheld.core.media import MediaItem, MediaReceipt
from beheld.core.request import Request
from beheld.families.inputs import EffectiveSize, ProcessedItem
from beheld.families.mllama.inputs import INPUTS as MLLAMA
from beheld.inputs.media.receipt import used_image
from beheld.inputs.pipeline import InputPipeline, RequestOrder
from tests import tiny
from tests.inputs import pipes

SQUARE, WIDE, TALL, HUGE = (112, 112), (168, 56), (56, 168), (1200, 400)

# Families that bring every picture to one square, whatever its shape, or cut a square out of it.
SQUASHING = ("gemma3", "gemma3n", "paligemma", "paligemma2", "blip2", "mantis", "florence2", "got_ocr2", "glm4v_9b")
SQUASHING += ("qwen_vl", "qwen_vl_chat")
CROPPING = ("llava", "chameleon")
# A side of their tiny checkpoints is rounded up to two patches or tiles, so a narrow picture grows wider: that is how
# they read every picture, so it is told and not lost.
ROUNDING = ("mistral3", "lighton_ocr", "idefics3", "smolvlm")
SHAPELY = tuple(name for name in tiny.IMAGE_FAMILIES if name not in (*SQUASHING, *CROPPING, *ROUNDING))

LARGE = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "max_encoder_tokens": 2048}

# Where the tower's overview of the whole stands among the tiles.
OVERVIEW_FIRST = ("llava_next", "llava_next_video", "llava_onevision", "bee", "phi3_v", "phi4_mm", "gemma3")
OVERVIEW_LAST = ("aya_vision", "cohere2_vision", "internvl", "llama4", "idefics3", "smolvlm", "lfm2_vl")
OVERVIEW_LAST += ("h2ovl_chat", "interns1", "internvl_chat", "internvl_chat_qwen2", "nvlm_d")

# The crops of Molmo and Molmo 2 overlap, and H2OVL cuts an image along two grids, so what lies there twice cannot be
# counted, nor what HyperCLOVA X pads; their sizes are stated by hand.
UNCOUNTED = ("molmo", "molmo2", "h2ovl_chat", "hyperclovax_vlm")

# What the tiny checkpoints' settings make of WIDE, by hand: size and number of tiles.
_OF_WIDE = {
    "fuyu": (140, 46, 1),
    "molmo2": (140, 56, 5),
    "molmo": (140, 46, 4),
    "phi3_v": (168, 56, 4),
    # Slices of three squares, and the overview.
    "minicpmv": (168, 56, 4),
    "minicpmo": (168, 56, 4),
    "lfm2_vl": (168, 56, 1),
    "gemma4": (672, 192, 1),
    "aria": (980, 326, 1),
    "internvl": (168, 56, 4),
    "interns1": (168, 56, 4),
    "internvl_chat": (168, 56, 4),
    "nvlm_d": (168, 56, 4),
    # Tiles of a second grid too: two by two.
    "h2ovl_chat": (168, 56, 8),
    "aya_vision": (168, 56, 4),
    "cohere2_vision": (168, 56, 4),
    "llama4": (168, 56, 4),
    "mllama": (168, 56, 3),
    "llava_next": (168, 56, 4),
    "idefics3": (112, 56, 3),
    "phi4_mm": (448, 149, 2),
    "hyperclovax_vlm": (168, 56, 9),
    "deepseek_ocr": (384, 128, 4),
    "deepseek_vl_v2": (126, 42, 4),
    "deepseek_vl_v2_small": (126, 42, 4),
}
# Molmo 2 is not in every version of transformers.
OF_WIDE = {family: told for family, told in _OF_WIDE.items() if family in tiny.TINY}


def asked(family: str, picture: Image.Image, **options: Any) -> Request:
    data = {"image": picture}
    prompt = {"prompt": tiny.prompt(family, 1), "multi_modal_data": data, "mm_processor_kwargs": options}
    return roomy(family).prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))


@cache
def roomy(family: str) -> InputPipeline:
    """A pipeline that has room for a huge picture's tokens."""
    if family != "phi4_mm":
        return pipes.shared(family)
    return pipes.make(family, LARGE)


def told(family: str, size: tuple[int, int], **options: Any) -> MediaReceipt:
    return asked(family, tiny.picture(*size, 1), **options).receipts[0]


def area(family: str, item: MediaItem) -> float:
    """Pixels of a picture of one grey in the tower's input, overview and padding not counted."""
    pixels = item.features.get("image_pixel_values", item.features.get("pixel_values"))
    assert pixels is not None
    if len(item.features.get("pixel_values_local", ())):
        # The tiles apart from the overview.
        pixels = item.features["pixel_values_local"]
    pixels = pixels.float()
    if "tgt_sizes" in item.features:
        # Patches, those of the overview first.
        grids = item.features["tgt_sizes"].prod(-1).tolist()
        pixels = pixels[grids[0] if len(grids) > 1 else 0 :]
    if pixels.dim() > 4:
        pixels = pixels.flatten(0, pixels.dim() - 4)
    is_packed = pixels.dim() < 4
    # The colours are read where there is a picture in any case: in the first corner.
    colours = pixels.reshape(-1, pixels.shape[-1])[0].unique() if is_packed else pixels[0, :, 0, 0]
    if len(pixels) > 1 and family in OVERVIEW_FIRST:
        pixels = pixels[1:]
    if len(pixels) > 1 and family in OVERVIEW_LAST:
        pixels = pixels[:-1]
    values = sum(((pixels - colour).abs() < 0.02).float() for colour in colours.unique())
    assert isinstance(values, torch.Tensor)
    # A packed patch of a grid holds the picture twice where videos are joined in pairs of frames.
    frames = pixels.shape[-1] // 588 if pixels.dim() == 2 else 1
    return float(values.clamp(max=1).sum()) / 3 / frames


@pytest.mark.parametrize("family", tiny.IMAGE_FAMILIES)
def test_a_picture_of_the_native_shape_loses_nothing(family: str) -> None:
    receipt = told(family, SQUARE)
    assert receipt.lost == ()
    width, height = receipt.used["width"], receipt.used["height"]
    assert 28 <= width <= 980
    assert abs(width - height) <= 1


@pytest.mark.parametrize("family", SHAPELY)
def test_a_picture_of_three_to_one_loses_nothing_where_shapes_are_kept(family: str) -> None:
    for size in (WIDE, TALL):
        receipt = told(family, size)
        assert receipt.lost == ()
        ratio = receipt.used["width"] / receipt.used["height"] * size[1] / size[0]
        assert 0.8 < ratio < 1.25


@pytest.mark.parametrize(("family", "expected"), OF_WIDE.items(), ids=OF_WIDE)
def test_tiles_are_told_as_tiles(family: str, expected: tuple[int, int, int]) -> None:
    used = told(family, WIDE).used
    assert (used["width"], used["height"], used.get("tiles", 1)) == expected


@pytest.mark.parametrize("size", [WIDE, TALL, HUGE], ids=["wide", "tall", "huge"])
@pytest.mark.parametrize("family", [name for name in tiny.IMAGE_FAMILIES if name not in UNCOUNTED])
def test_the_told_size_is_what_lies_before_the_tower(family: str, size: tuple[int, int]) -> None:
    request = asked(family, Image.new("RGB", size, (200, 200, 200)))
    used = request.receipts[0].used
    width, height = used["width"], used["height"]
    assert abs(area(family, request.spans[0].item) - width * height) <= width + height


@pytest.mark.parametrize("family", tiny.IMAGE_FAMILIES)
def test_a_huge_picture_is_told_as_shrunk(family: str) -> None:
    receipt = told(family, HUGE)
    factor = max(HUGE[0] / receipt.used["width"], HUGE[1] / receipt.used["height"])
    if family in CROPPING:
        factor = HUGE[1] / receipt.used["height"]
    said = [loss for loss in receipt.lost if loss.startswith(f"it was shrunk {factor:.1f} times")]
    assert len(said) == (factor > 4)
    if family not in ("aria", "deepseek_ocr", "gemma4", "gemma4_dense", "phi4_mm"):
        # The others have room for more than a quarter of it.
        assert said
    assert any("aspect ratio" in loss for loss in receipt.lost) == (family in SQUASHING)
    assert any("cut off" in loss for loss in receipt.lost) == (family in CROPPING)


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("idefics3", {"do_image_splitting": False}, {"width": 56, "height": 56}),
        ("internvl", {"crop_to_patches": False}, {"width": 56, "height": 56}),
        ("internvl", {"max_patches": 2}, {"width": 112, "height": 56, "tiles": 3}),
        ("got_ocr2", {"crop_to_patches": True}, {"width": 192, "height": 64, "tiles": 4}),
        ("lfm2_vl", {"do_image_splitting": False}, {"width": 168, "height": 56}),
        ("aria", {"split_image": True, "max_image_size": 490}, {"width": 980, "height": 326, "tiles": 2}),
        ("llama4", {"resize_to_max_canvas": True}, {"width": 168, "height": 56, "tiles": 4}),
        ("llava", {"do_center_crop": False}, {"width": 168, "height": 56}),
    ],
)
def test_options_change_what_is_told(family: str, options: dict[str, Any], expected: dict[str, int]) -> None:
    assert told(family, WIDE, **options).used == expected


def test_crops_of_gemma_3_are_told_as_tiles() -> None:
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
    for size, expected in ((WIDE, (336, 112)), (TALL, (112, 336))):
        receipt = told("gemma3", size, **options)
        assert (receipt.used["width"], receipt.used["height"], receipt.used["tiles"]) == (*expected, 4)
        assert receipt.lost == ()


def test_a_picture_among_others_is_padded_to_a_square() -> None:
    pictures = [tiny.picture(*WIDE, seed) for seed in range(2)]
    for receipt in pipes.ask(pipes.shared("llava_onevision"), "llava_onevision", pictures).receipts:
        assert receipt.used == {"width": 42, "height": 14}
        assert receipt.lost == ()


@pytest.mark.parametrize("family", [*OF_WIDE, "gemma3", "llava"])
def test_strict_media_refuses_only_what_was_lost(family: str) -> None:
    pipe = pipes.make(family, strict_media=True)
    is_lossy = family in ("gemma3", "llava")
    for size in (SQUARE, WIDE):
        request = {"prompt": tiny.prompt(family, 1), "multi_modal_data": {"image": tiny.picture(*size, 1)}}
        if size == WIDE and is_lossy:
            with pytest.raises(MediaLossError, match=r"aspect ratio|cut off"):
                pipe.prepare(RequestOrder(request, pipes.ONE_TOKEN, request_id="0"))
        else:
            assert pipe.prepare(RequestOrder(request, pipes.ONE_TOKEN, request_id="0")).receipts[0].lost == ()


CAMERA = [
    (160, 90),
    (90, 160),
    (160, 120),
    (120, 160),
    (150, 100),
    (100, 150),
    (120, 120),
    (64, 36),
    (64, 48),
    (30, 45),
]


@pytest.mark.parametrize("family", tiny.IMAGE_FAMILIES)
def test_pictures_of_cameras_are_refused_only_where_their_shape_is_not_kept(family: str) -> None:
    pipe = pipes.make(family, LARGE if family == "phi4_mm" else {}, strict_media=True)
    for size in CAMERA:
        request = {"prompt": tiny.prompt(family, 1), "multi_modal_data": {"image": tiny.picture(*size, 1)}}
        if size[0] != size[1] and family in (*SQUASHING, *CROPPING):
            with pytest.raises(MediaLossError, match=r"aspect ratio|cut off") as caught:
                pipe.prepare(RequestOrder(request, pipes.ONE_TOKEN, request_id="0"))
            assert "Crop, pad or scale it" in caught.value.remedy
        else:
            assert pipe.prepare(RequestOrder(request, pipes.ONE_TOKEN, request_id="0")).receipts[0].lost == ()


@pytest.mark.parametrize(
    ("given", "seen", "step", "is_lost"),
    [
        # Idefics 3 reads 1920 x 1080 as 4 x 3 tiles, and 3 x 1 as 4 x 2.
        ((1920, 1080), (1456, 1092), 364, False),
        ((1500, 500), (1456, 728), 364, False),
        # Without steps a square is a square.
        ((1920, 1080), (896, 896), 0, True),
        # Rounding does not explain it: no rule makes both sides of it four tiles.
        ((1500, 1000), (1456, 1456), 364, True),
        ((1000, 1500), (1456, 1456), 364, True),
        # More than twofold is lost whatever the reason.
        ((300, 10), (308, 28), 28, True),
        ((64, 48), (56, 56), 28, False),
        ((48, 64), (56, 56), 28, False),
    ],
)
def test_rounding_to_tiles_and_patches_is_told_and_not_lost(
    given: tuple[int, int], seen: tuple[int, int], step: int, is_lost: bool
) -> None:
    used, lost = used_image(ProcessedItem(given, {}, {}, object()), EffectiveSize(*seen, step=step))
    assert (used["width"], used["height"]) == seen
    assert any("aspect ratio" in loss for loss in lost) == is_lost


@pytest.mark.parametrize(
    ("family", "options"),
    [("idefics3", {"do_image_splitting": False}), ("internvl", {"max_patches": 1}), ("lfm2_vl", {})],
)
def test_a_family_that_is_told_to_use_one_tile_squashes(family: str, options: dict[str, Any]) -> None:
    # LFM2 fits what is not cut to its own patches.
    is_lost = any("aspect ratio" in loss for loss in told(family, (160, 90), **options).lost)
    assert is_lost == bool(options)


@pytest.mark.parametrize(
    ("given", "seen", "crop"),
    [
        ((200, 100), (56, 56), (50, 0, 150, 100)),
        ((101, 300), (50, 50), (0, 99, 101, 200)),
        ((300, 200), (84, 56), None),
        ((64, 64), (336, 336), None),
    ],
)
def test_the_part_that_is_left_of_a_cropped_picture_is_told(given: Any, seen: Any, crop: Any) -> None:
    item = ProcessedItem(given, {}, {"do_center_crop": True}, object())
    used, lost = used_image(item, EffectiveSize(*seen))
    assert used.get("crop") == crop
    assert any("cut off" in loss for loss in lost) == (crop is not None)
    assert "crop" not in used_image(ProcessedItem(given, {}, {}, object()), EffectiveSize(*seen))[0]


# ---------------------------------------------------------------------- videos

TIMED = {"fps": 2.0, "total_num_frames": 6, "frames_indices": [0, 1, 2, 3, 4, 5]}
SQUARE_FRAMES = ("llava_onevision", "hyperclovax_vlm", "interns1", "internvl", "smolvlm", "molmo2")


def watched(family: str, video: Any, **options: Any) -> MediaReceipt:
    prompt = tiny.wrap(family, tiny.markers(family, num_videos=1) + "What?")
    data = {"prompt": prompt, "multi_modal_data": {"video": video}, "mm_processor_kwargs": options}
    return pipes.shared(family).prepare(RequestOrder(data, pipes.ONE_TOKEN, request_id="0")).receipts[0]


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
def test_frames_are_told_with_their_size(family: str) -> None:
    receipt = watched(family, (tiny.frames(6), TIMED))
    assert receipt.used["frames"] == 6
    assert receipt.used["timestamps_s"] == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
    ratio = receipt.used["width"] / receipt.used["height"]
    if family in SQUARE_FRAMES:
        assert (ratio, receipt.lost) == (1, ("its aspect ratio was changed by a factor of 1.50",))
    elif family == "llava_next_video":
        assert (ratio, receipt.lost) == (1, ("33 % of it was cut off at the edges",))
    else:
        assert (1.25 < ratio < 1.75, receipt.lost) == (True, ())


@pytest.mark.parametrize("family", ["gemma4", "qwen3_vl"])
def test_frames_that_the_processor_leaves_out_are_lost(family: str) -> None:
    receipt = watched(family, tiny.frames(6))
    assert receipt.used["frames"] == 4
    assert receipt.lost == ("the processor left out 2 of 6 frames",)


# ---------------------------------------------------------------------- where nothing is known


def sight(outputs: dict[str, Any], **arguments: Any) -> ProcessedItem:
    return ProcessedItem(WIDE, outputs, arguments, object())


def test_nothing_is_claimed_of_what_outputs_do_not_say() -> None:
    from beheld.inputs.media import effective_size as rules

    unknown = [
        {},
        {"pixel_values": torch.zeros(48, 588)},
        {"pixel_values": torch.zeros(1, 48, 588)},
        {"pixel_values": torch.zeros(4, 3, 56, 56)},
        {"pixel_values": torch.zeros(1, 4, 3, 56, 56)},
        {"pixel_values": [torch.zeros(3, 56, 56)]},
        {"pixel_values": torch.zeros(48, 588), "image_grid_thw": torch.tensor([[1, 4, 12]])},
    ]
    for outputs in unknown:
        assert rules.of_image(sight(outputs)) is None
        assert rules.of_video(sight(outputs)) is None
    assert used_image(sight({}), None) == ({}, ())
    # A processor that does not say by which rule it cuts.
    tiles = {"pixel_values": torch.zeros(4, 3, 56, 56)}
    assert rules.stretched_over_tiles(sight(tiles, min_patches=1, max_patches=4)) is None


def test_the_number_of_a_grid_is_read_as_its_processor_writes_it() -> None:
    from transformers.models.mllama.image_processing_mllama import convert_aspect_ratios_to_ids

    look = MLLAMA.looks["image"]
    for rows in range(1, 5):
        for columns in range(1, 1 + 4 // rows):
            number = convert_aspect_ratios_to_ids([[(rows, columns)]], 4)
            outputs = {"aspect_ratio_ids": number, "pixel_values": torch.zeros(1, 1, 4, 3, 56, 56)}
            given = ProcessedItem((56 * columns, 56 * rows), outputs, {"max_image_tiles": 4}, object())
            seen = look(given)
            assert seen is not None
            assert (seen.width, seen.height, seen.tiles) == (56 * columns, 56 * rows, rows * columns)


def test_a_known_picture_s_receipt_tells_of_its_own_file() -> None:
    picture, pipe = tiny.picture(56, 56, 5), pipes.make("llava")
    pixels = np.asarray(picture)
    for form in ("PNG", "BMP", None):
        given = Image.fromarray(pixels) if form is None else Image.open(io.BytesIO(pipes.encoded(picture, form)))
        (receipt,) = pipes.ask(pipe, "llava", [given]).receipts
        assert receipt.given.get("format") == form
        assert receipt.cached == (form != "PNG")
