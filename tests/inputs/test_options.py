"""Processor options: engine, request and item; checked by name; with the effect they have at loading time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from beheld.core.errors import BeheldError, ConfigError, MediaError, ParamsError
from beheld.inputs.media import processor_options as options_of
from beheld.inputs.media.processor_options import GROUPS, merged
from tests import tiny, tiny_own_minicpm
from tests.inputs import pipes

SMALL = {"shortest_edge": 784, "longest_edge": 3136}
LARGE = tiny.picture(224, 145, 1)


def test_layers() -> None:
    left = {"a": 1, "images_kwargs": {"x": 1, "y": 1}}
    assert merged(left, None, {"b": 2, "images_kwargs": {"y": 2}}) == {
        "a": 1,
        "b": 2,
        "images_kwargs": {"x": 1, "y": 2},
    }
    assert left == {"a": 1, "images_kwargs": {"x": 1, "y": 1}}


@pytest.mark.parametrize(
    "options",
    [
        {"max_pixels": 28 * 28 * 6},
        {"min_pixels": 28 * 28 * 60, "max_pixels": 28 * 28 * 90},
        {"min_pixels": 3136, "max_pixels": 28 * 28 * 9},
    ],
)
def test_pixel_bounds_are_those_of_loading(options: dict[str, int]) -> None:
    family = "qwen2_vl"
    loaded = AutoProcessor.from_pretrained(tiny.checkpoint(family), **options)
    prompt = tiny.prompt(family, 1, text="Hi?")
    expected = loaded(text=[prompt], images=[LARGE], return_tensors="pt")
    plain = pipes.ask(pipes.shared(family), family, [LARGE])
    for request in (
        pipes.ask(pipes.shared(family), family, [LARGE], mm_processor_kwargs=options),
        pipes.ask(pipes.make(family, mm_processor_kwargs=options), family, [LARGE]),
        pipes.ask(pipes.shared(family), family, [LARGE], mm_processor_kwargs={"images_kwargs": options}),
    ):
        assert list(request.token_ids) == expected["input_ids"][0].tolist()
        assert torch.equal(request.spans[0].item.features["pixel_values"], expected["pixel_values"])
        assert request.token_ids != plain.token_ids
    video = tiny.frames(4)
    expected = loaded(text=[tiny.prompt(family, 0, 1, "Hi?")], videos=[video], return_tensors="pt")
    request = pipes.ask(pipes.shared(family), family, videos=video, mm_processor_kwargs=options)
    assert torch.equal(request.spans[0].item.features["pixel_values_videos"], expected["pixel_values_videos"])


def test_the_request_overrides_the_engine() -> None:
    family = "qwen2_vl"
    pipe = pipes.make(family, mm_processor_kwargs={"max_pixels": 28 * 28 * 4})
    small = pipes.ask(pipe, family, [LARGE]).spans[0].item.num_embeds
    large = pipes.ask(pipe, family, [LARGE], mm_processor_kwargs={"max_pixels": 28 * 28 * 20}).spans[0].item.num_embeds
    assert small <= 4 < large <= 20


def test_size_as_transformers_has_it() -> None:
    family = "qwen2_vl"
    size = {"shortest_edge": 3136, "longest_edge": 28 * 28 * 5}
    request = pipes.ask(pipes.shared(family), family, [LARGE], mm_processor_kwargs={"size": size})
    assert request.spans[0].item.num_embeds <= 5


# Families whose processors only have the options of the repositories' own code: one of them, and one that is misspelt.
OF_OWN_CODE = {
    "deepseek_ocr": ("crop_mode", "crop_mod"),
    "deepseek_vl_v2": ("candidate_resolutions", "candidate_resolution"),
    "deepseek_vl_v2_small": ("candidate_resolutions", "candidate_resolution"),
    **dict.fromkeys(("minicpmo", *tiny_own_minicpm.VISION), ("max_slice_nums", "max_slice_num")),
    "molmo": ("max_crops", "max_crop"),
    "phi3_v": ("num_crops", "num_crop"),
    "hyperclovax_vlm": ("pad_to_square", "pad_to_sqare"),
    **dict.fromkeys(
        ("h2ovl_chat", "internvl_chat", "internvl_chat_qwen2", "nvlm_d"), ("max_dynamic_patch", "max_dynamic_patches")
    ),
}


# Families whose published code sets everything.
WITHOUT_OPTIONS = ("qwen_vl", "qwen_vl_chat", "glm4v_9b")


@pytest.mark.parametrize("family", tiny.IMAGE_FAMILIES)
def test_unknown_options_are_named(family: str) -> None:
    pipe = pipes.shared(family)
    known, wrong = OF_OWN_CODE.get(family, ("do_resize", "do_resise"))
    remedy = "It has none: leave it out" if family in WITHOUT_OPTIONS else f"'{known}'"
    with pytest.raises(ParamsError, match=remedy) as caught:
        pipes.ask(pipe, family, [LARGE], mm_processor_kwargs={wrong: False})
    assert caught.value.param == "mm_processor_kwargs"
    for bad in ({"nonsense": 1}, {"return_tensors": "np"}, {"device": "cuda"}, {"images_kwargs": {"nonsense": 1}}):
        with pytest.raises(ParamsError, match="no option"):
            pipes.ask(pipe, family, [LARGE], mm_processor_kwargs=bad)
    with pytest.raises(ParamsError, match="mapping"):
        pipes.ask(pipe, family, [LARGE], mm_processor_kwargs={"images_kwargs": 3})


def test_an_option_of_another_modality_is_no_error() -> None:
    family = "qwen2_5_vl"
    plain = pipes.ask(pipes.shared(family), family, [LARGE])
    request = pipes.ask(pipes.shared(family), family, [LARGE], mm_processor_kwargs={"fps": 2.0})
    assert request.token_ids == plain.token_ids


@pytest.mark.parametrize(
    "options",
    [{"max_pixels": 0}, {"max_pixels": "9"}, {"size": "large"}, {"size": {"height": -3}}, {"do_resize": object()}],
)
def test_wrong_values_are_errors_of_ours(options: dict[str, Any]) -> None:
    family = "qwen2_vl"
    with pytest.raises((MediaError, ParamsError)) as caught:
        pipes.ask(pipes.shared(family), family, [LARGE], mm_processor_kwargs=options)
    assert isinstance(caught.value, BeheldError)
    assert caught.value.item == "image 1"


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(
    ("family", "modality", "name", "value"),
    [
        ("qwen2_vl", "image", "size", {"longest_edge": "x"}),
        ("llava", "image", "size", "big"),
        ("idefics3", "image", "do_resize", "maybe"),
        ("qwen2_vl", "video", "fps", "x"),
        ("qwen2_5_omni", "video", "num_frames", 2.5),
    ],
)
def test_a_wrong_value_is_told_of_at_the_start(family: str, modality: str, name: str, value: Any, group: bool) -> None:
    """It failed every request instead, and a line said no more than the option's name."""
    told = {GROUPS[modality]: {name: value}} if group else {name: value}
    with pytest.raises(ConfigError, match=f"as {name}: Field '{name}' with value") as caught:
        pipes.make(family, mm_processor_kwargs={"do_convert_rgb": True, **told})
    assert caught.value.param == "mm_processor_kwargs"
    assert repr(value) in str(caught.value)


def test_a_wrong_value_of_a_request_is_named() -> None:
    with pytest.raises(ParamsError, match="accept 'maybe' as do_resize"):
        pipes.ask(pipes.shared("llava"), "llava", [LARGE], mm_processor_kwargs={"do_resize": "maybe"})


def test_options_are_checked_by_transformers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones again are known; others are not taken for them."""
    family = "qwen2_vl"
    pipe = pipes.make(family)
    merge, merges = options_of.arguments, []
    monkeypatch.setattr(options_of, "arguments", lambda *given: merges.append(given[2]) or merge(*given))
    sizes = [{"max_pixels": 28 * 28 * n} for n in (4, 9, 4, 9)]
    counts = [
        pipes.ask(pipe, family, [tiny.picture(224, 145, seed)], mm_processor_kwargs=size).spans[0].item.num_embeds
        for seed, size in enumerate(sizes)
    ]
    assert counts[0] == counts[2] != counts[1] == counts[3]
    assert len(merges) == 2


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(("name", "value"), [("patch_size", 7), ("temporal_patch_size", 0), ("merge_size", 1)])
def test_what_the_weights_decided_cannot_be_chosen(name: str, value: int, group: bool) -> None:
    """With other sizes the towers failed on what they were given, or took it for something else."""
    options = {"images_kwargs": {name: value}} if group else {name: value}
    with pytest.raises(ParamsError, match=f"{name} is .* in this model"):
        pipes.ask(pipes.shared("qwen2_vl"), "qwen2_vl", LARGE, mm_processor_kwargs=options)
    own = getattr(pipes.shared("qwen2_vl")._processor.loaded().image_processor, name)
    assert pipes.ask(pipes.shared("qwen2_vl"), "qwen2_vl", LARGE, mm_processor_kwargs={name: own}).spans


@pytest.mark.parametrize(
    ("there", "value", "here"),
    [
        ("video_fps", 1, {"fps": 1}),
        ("video_min_frames", 2, {"min_frames": 2}),
        ("video_max_frames", 8, {"max_frames": 8}),
        ("video_target_frames", 4, {"num_frames": 4}),
        ("image_max_pixels", 3136, {"images_kwargs": {"size": SMALL}}),
        ("video_max_pixels", 3136, {"videos_kwargs": {"size": SMALL}}),
        ("max_pixels", 3136, {"size": SMALL}),
        ("min_pixels", 784, {"size": SMALL}),
    ],
)
def test_names_that_ernies_repository_has_for_options_are_told_by_those_here(
    there: str, value: int, here: dict[str, Any]
) -> None:
    pipe, clip = pipes.shared("ernie4_5_vl_moe"), (tiny.frames(8), {"fps": 2.0})
    for given in ({there: value}, {"videos_kwargs": {there: value}}):
        with pytest.raises(ParamsError, match=f"'{there}' of the repository's code has another name here") as caught:
            pipes.ask(pipe, "ernie4_5_vl_moe", videos=clip, mm_processor_kwargs=given)
        assert next(iter(here)) in caught.value.remedy
    # What the remedy says helps.
    assert pipes.ask(pipe, "ernie4_5_vl_moe", videos=clip, mm_processor_kwargs=here).receipts


def test_an_order_of_frames_of_ernies_repository_is_refused_with_what_to_do() -> None:
    pipe, options = pipes.shared("ernie4_5_vl_moe"), {"video_frames_sample": "middle"}
    with pytest.raises(ParamsError, match="another name here") as caught:
        pipes.ask(pipe, "ernie4_5_vl_moe", videos=tiny.frames(8), mm_processor_kwargs=options)
    assert "frames_indices" in caught.value.remedy


@pytest.mark.parametrize(
    ("family", "options"),
    [("phi4_mm", {"size": None}), ("fuyu", {"size": {"bogus": 3}}), ("llama4", {"do_rescale": False})],
    ids=str,
)
def test_options_that_confuse_a_processor_are_named(family: str, options: dict[str, Any]) -> None:
    """They ended in an AttributeError, a KeyError and a TypeError of the processor's."""
    with pytest.raises(MediaError, match="with these options") as caught:
        pipes.ask(pipes.shared(family), family, tiny.picture(60, 40, 1), mm_processor_kwargs=options)
    assert next(iter(options)) in caught.value.remedy
