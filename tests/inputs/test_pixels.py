"""Ids and features equal those of the checkpoint's own processor, called once on the whole prompt with all media."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beheld.core.media import MediaItem
from beheld.core.request import Request
from beheld.inputs.pipeline import RequestOrder
from tests import tiny
from tests.inputs import pipes
from tests.oracle import reference

TILED = ("llava_next", "llava_onevision")


def theirs(family: str, prompt: str, images: list[Any], videos: list[Any], **options: Any) -> dict[str, Any]:
    media: dict[str, Any] = {}
    if images:
        media["images"] = [images]
    if videos:
        media["videos"] = videos
    return dict(reference.processor(family)(text=[prompt], return_tensors="pt", **media, **options))


def compare(family: str, request: Request, expected: dict[str, Any]) -> None:
    assert list(request.token_ids) == expected["input_ids"][0].tolist()
    images = [span.item for span in request.spans if span.item.modality == "image"]
    videos = [span.item for span in request.spans if span.item.modality == "video"]
    if images:
        compare_images(family, images, expected)
    if videos:
        pixels = [item.features["pixel_values_videos"] for item in videos]
        whole = expected["pixel_values_videos"]
        assert torch.equal(torch.cat(pixels), whole)
        for name in ("video_grid_thw", "second_per_grid_ts"):
            if name in expected:
                rows = torch.as_tensor(expected[name]).reshape(len(videos), -1)
                assert torch.equal(torch.tensor([item.layout[name] for item in videos]), rows)


def compare_images(family: str, items: list[MediaItem], expected: dict[str, Any]) -> None:
    for item in items:
        assert all(tensor.is_contiguous() for tensor in item.features.values())
    if family in TILED:
        for item, padded in zip(items, expected["pixel_values"], strict=True):
            own = item.features["pixel_values"][0]
            assert torch.equal(own, padded[: len(own)])
            assert not padded[len(own) :].any()
        sizes = [list(item.layout["image_sizes"]) for item in items]
        assert sizes == expected["image_sizes"].tolist()
        return
    assert torch.equal(torch.cat([item.features["pixel_values"] for item in items]), expected["pixel_values"])
    if "image_grid_thw" in expected:
        assert [list(item.layout["image_grid_thw"]) for item in items] == expected["image_grid_thw"].tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 4])
@pytest.mark.parametrize("family", pipes.IMAGE_FAMILIES)
def test_pictures(family: str, count: int) -> None:
    for seed in range(2):
        pictures = tiny.pictures(count, seed=seed + count)
        request = pipes.ask(pipes.shared(family), family, pictures or None)
        compare(family, request, theirs(family, tiny.prompt(family, count, text="Hi?"), pictures, []))
        assert len(request.spans) == len(request.receipts) == count


@pytest.mark.parametrize("family", pipes.VIDEO_FAMILIES)
def test_videos(family: str) -> None:
    for count in (1, 2):
        videos = [tiny.frames(6, seed) for seed in range(count)]
        request = pipes.ask(pipes.shared(family), family, videos=videos)
        compare(family, request, theirs(family, tiny.prompt(family, 0, count, "Hi?"), [], videos))


@pytest.mark.parametrize("family", pipes.VIDEO_FAMILIES)
def test_pictures_and_videos_in_one_prompt(family: str) -> None:
    pictures, video = tiny.pictures(2), tiny.frames(4)
    mark = tiny.markers(family, 1), tiny.markers(family, 0, 1)
    prompt = tiny.wrap(family, f"First {mark[0]} then {mark[1]} and {mark[0]} what?")
    data = {"video": video, "image": pictures}
    request = pipes.shared(family).prepare(
        RequestOrder({"prompt": prompt, "multi_modal_data": data}, pipes.ONE_TOKEN, request_id="0")
    )
    compare(family, request, theirs(family, prompt, pictures, [video]))
    assert [span.item.modality for span in request.spans] == ["image", "video", "image"]
    assert [receipt.modality for receipt in request.receipts] == ["image", "video", "image"]
    assert [receipt.item for receipt in request.receipts] == ["image 1", "video 1", "image 2"]


@pytest.mark.parametrize("family", pipes.VIDEO_FAMILIES)
def test_a_video_as_pictures_and_as_a_pair(family: str) -> None:
    from PIL import Image

    array = tiny.frames(4)
    bare = pipes.ask(pipes.shared(family), family, videos=array)
    listed = pipes.ask(pipes.shared(family), family, videos=[[Image.fromarray(frame) for frame in array]])
    assert listed.spans[0].item.digest == bare.spans[0].item.digest
    timed = pipes.ask(pipes.shared(family), family, videos=[(array, {"fps": 2.0, "total_num_frames": 8})])
    metadata = [{"fps": 2.0, "total_num_frames": 8}]
    prompt = tiny.prompt(family, 0, 1, "Hi?")
    compare(family, timed, theirs(family, prompt, [], [array], video_metadata=metadata))
    assert timed.spans[0].item.digest != bare.spans[0].item.digest


@pytest.mark.parametrize("family", pipes.IMAGE_FAMILIES)
def test_spans_stand_where_the_placeholders_are(family: str) -> None:
    pipe = pipes.shared(family)
    token = pipes.info(family).placeholder_ids["image"]
    request = pipes.ask(pipe, family, tiny.pictures(3))
    covered = [place for span in request.spans for place in range(span.start, span.stop)]
    assert covered == [place for place, value in enumerate(request.token_ids) if value == token]
    for span in request.spans:
        assert span.item.num_embeds == span.stop - span.start == len(span.item.replacement_ids)


@pytest.mark.parametrize("family", pipes.IMAGE_FAMILIES)
def test_a_prompt_of_ids(family: str) -> None:
    pipe = pipes.shared(family)
    pictures = tiny.pictures(2)
    ids = pipe.tokenizer(tiny.prompt(family, 2, text="Hi?"))["input_ids"]
    data = {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}
    request = pipe.prepare(RequestOrder(data, pipes.ONE_TOKEN, request_id="0"))
    compare(family, request, theirs(family, tiny.prompt(family, 2, text="Hi?"), pictures, []))
    assert request.prompt is None


def test_company_changes_a_onevision_picture_and_no_other() -> None:
    picture = tiny.picture(112, 56, 1)
    for family in pipes.IMAGE_FAMILIES:
        pipe = pipes.shared(family)
        alone = pipes.ask(pipe, family, [picture]).spans[0].item
        among = pipes.ask(pipe, family, [picture, tiny.picture(56, 56, 2)]).spans[0].item
        assert (alone.digest == among.digest) == (family != "llava_onevision"), family


def test_skip_tokenizer_init_takes_ids() -> None:
    family = "qwen2_vl"
    pipe = pipes.make(family, skip_tokenizer_init=True)
    assert pipe.tokenizer is None
    pictures = tiny.pictures(1)
    ids = pipes.shared(family).tokenizer(tiny.prompt(family, 1, text="Hi?"))["input_ids"]
    data = {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}
    request = pipe.prepare(RequestOrder(data, pipes.ONE_TOKEN, request_id="0"))
    compare(family, request, theirs(family, tiny.prompt(family, 1, text="Hi?"), pictures, []))
    with pytest.raises(ValueError, match="without a tokenizer"):
        pipe.prepare(RequestOrder("text", pipes.ONE_TOKEN, request_id="1"))
