"""Embeddings in place of media: every accepted form, and every malformed one refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.core.errors import MediaError
from beheld.inputs.pipeline import RequestOrder
from tests import tiny, tiny_own_minicpm
from tests.inputs import pipes
from tests.oracle import cases, reference
from tests.oracle.test_oracle import make

HIDDEN = 64


def ask(family: str, value: Any, count: int = 1, modality: str = "image") -> Any:
    numbers = {"image": (count, 0), "video": (0, count)}[modality]
    prompt = {"prompt": tiny.prompt(family, *numbers), "multi_modal_data": {modality: value}}
    return pipes.shared(family).prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))


def test_tensors() -> None:
    assert pipes.info("llava").hidden_size == HIDDEN
    whole = torch.randn(2, 5, HIDDEN)
    for value in (whole, list(whole), [whole[0], whole[1].double()], [whole[:1], whole[1:]], whole.numpy()):
        request = ask("llava", value, 2)
        assert len(request.spans) == 2
        for span, expected in zip(request.spans, whole, strict=True):
            assert span.item.num_embeds == span.stop - span.start == 5
            assert set(span.item.features) == {"embeds"}
            assert torch.equal(span.item.features["embeds"], expected)
    ragged = ask("llava", [torch.randn(3, HIDDEN), torch.randn(7, HIDDEN)], 2)
    assert [span.item.num_embeds for span in ragged.spans] == [3, 7]
    one = ask("llava", torch.randn(4, HIDDEN).bfloat16())
    assert one.spans[0].item.features["embeds"].dtype == torch.float32
    assert one.receipts[0].given == {"source": "embeddings", "shape": [4, HIDDEN]}


def test_equal_embeddings_have_equal_digests_and_are_copied() -> None:
    tensor = torch.randn(1, 4, HIDDEN)
    first = ask("llava", tensor)
    again = ask("llava", tensor.clone())
    kept = first.spans[0].item.features["embeds"].clone()
    tensor[0, 0, 0] += 1
    changed = ask("llava", tensor)
    assert first.spans[0].item.digest == again.spans[0].item.digest != changed.spans[0].item.digest
    assert torch.equal(first.spans[0].item.features["embeds"], kept)
    reshaped = ask("llava", [tensor.reshape(4, HIDDEN)[:2], tensor.reshape(4, HIDDEN)[2:]], 2)
    assert len({span.item.digest for span in reshaped.spans}) == 2


def test_grids() -> None:
    value = {"image_embeds": torch.randn(4 + 6, HIDDEN), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6]])}
    request = ask("qwen2_vl", value, 2)
    assert [span.item.num_embeds for span in request.spans] == [4, 6]
    assert [span.item.layout for span in request.spans] == [
        {"image_grid_thw": (1, 4, 4)},
        {"image_grid_thw": (1, 4, 6)},
    ]
    single = {"image_embeds": value["image_embeds"][:4], "image_grid_thw": [1, 4, 4]}
    assert ask("qwen2_vl", single).spans[0].item.layout == {"image_grid_thw": (1, 4, 4)}
    same = torch.ones(16, HIDDEN)
    shapes = [
        ask("qwen2_vl", {"image_embeds": same, "image_grid_thw": [g]}) for g in ([1, 8, 8], [4, 4, 4], [1, 4, 16])
    ]
    assert len({request.spans[0].item.digest for request in shapes}) == 3
    video = {
        "video_embeds": torch.randn(8, HIDDEN),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "second_per_grid_ts": [0.5],
    }
    layout = ask("qwen2_5_vl", video, modality="video").spans[0].item.layout
    assert layout == {"video_grid_thw": (2, 4, 4), "second_per_grid_ts": (0.5,)}


NAN = torch.full((1, 4, HIDDEN), float("nan"))
INF = torch.full((1, 4, HIDDEN), float("inf"))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.randn(1, 4, HIDDEN + 1), "shape"),
        (torch.randn(1, 0, HIDDEN), "at least one token"),
        (torch.randn(HIDDEN), "shape"),
        (torch.randn(1, 1, 4, HIDDEN), "shape"),
        (torch.ones(1, 4, HIDDEN, dtype=torch.int64), "floating-point"),
        (torch.ones(3, 56, 84, dtype=torch.uint8), "PIL"),
        (torch.ones(1, 4, HIDDEN, dtype=torch.bool), "floating-point"),
        (torch.ones(1, 4, HIDDEN, dtype=torch.complex64), "floating-point"),
        (NAN, "not finite"),
        (INF, "not finite"),
        (torch.empty(1, 4, HIDDEN, device="meta"), "dense"),
        (torch.ones(4, HIDDEN).to_sparse(), "dense"),
        ({"image_embeds": torch.randn(1, 4, HIDDEN), "image_size": 3}, "'image_size'"),
        ({"image_embeds": "x"}, "A str does not hold embeddings"),
        ({"image_grid_thw": torch.tensor([[1, 4, 4]])}, "lack the tensor"),
        ([torch.randn(4, HIDDEN), torch.randn(4, HIDDEN - 1)], "shape"),
        (np.full((1, 4, HIDDEN), np.nan, np.float32), "not finite"),
    ],
)
@pytest.mark.case(13)
def test_malformed_embeddings_are_refused(value: Any, words: str) -> None:
    with pytest.raises(MediaError, match=words) as caught:
        ask("llava", value)
    assert caught.value.item is not None
    assert caught.value.item.startswith("image")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.randn(1, 4, HIDDEN), "image_grid_thw"),
        ({"image_embeds": torch.randn(4, HIDDEN)}, "image_grid_thw"),
        ({"image_embeds": torch.randn(5, HIDDEN), "image_grid_thw": [[1, 4, 4]]}, "requires 4"),
        ({"image_embeds": torch.randn(4, HIDDEN), "image_grid_thw": [[1, 4]]}, "three whole numbers"),
        ({"image_embeds": torch.randn(3, HIDDEN), "image_grid_thw": [[1, 4, 3]]}, "no multiple of 2"),
        ({"image_embeds": torch.randn(4, HIDDEN), "image_grid_thw": [[1, 1, 16]]}, "no multiple of 2"),
        ({"image_embeds": torch.randn(4, HIDDEN), "image_grid_thw": [[1, 4, -4]]}, "above 0"),
        ({"image_embeds": torch.randn(4, HIDDEN), "image_grid_thw": torch.tensor([[1.0, 4.0, 4.0]])}, "whole"),
        ({"image_embeds": torch.randn(4, HIDDEN), "image_grid_thw": []}, "shape"),
        ({"image_embeds": torch.randn(4, HIDDEN + 2), "image_grid_thw": [[1, 4, 4]]}, "shape"),
    ],
)
@pytest.mark.case(13)
def test_malformed_grids_are_refused(value: Any, words: str) -> None:
    with pytest.raises(MediaError, match=words):
        ask("qwen2_vl", value)


def test_parameters_are_taken_by_value() -> None:
    parameter = torch.nn.Parameter(torch.randn(1, 4, HIDDEN))
    features = ask("llava", parameter).spans[0].item.features["embeds"]
    assert not features.requires_grad
    stretched = torch.randn(1, 1, HIDDEN).expand(1, 4, HIDDEN)
    assert ask("llava", stretched).spans[0].item.features["embeds"].is_contiguous()


def test_embeddings_can_be_switched_off() -> None:
    pipe = pipes.make("llava", enable_mm_embeds=False)
    prompt = {"prompt": tiny.prompt("llava", 1), "multi_modal_data": {"image": torch.randn(1, 4, HIDDEN)}}
    with pytest.raises(MediaError, match="enable_mm_embeds"):
        pipe.prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))
    # Whatever they are, they are not looked at; and what turns them on is named.
    for value in (torch.empty(1, 1, 1), [torch.empty(1, 1)]):
        given = {**prompt, "multi_modal_data": {"image": value}}
        with pytest.raises(MediaError, match="--enable-mm-embeds"):
            pipe.prepare(RequestOrder(given, pipes.ONE_TOKEN, request_id="1"))


PICTURES_LAID_OUT = (
    *("aya_vision", "cohere2_vision", "fuyu", "hunyuan_vl", "idefics3", "lfm2_vl", "llama4", "mistral3", "molmo2"),
    *("molmo", "nvlm_d", "pixtral_hf", "smolvlm"),
)
# Their embeddings come with the sizes of the images.
SIZED = ("minicpmo", *tiny_own_minicpm.VISION)
VIDEOS_LAID_OUT = (
    *("ernie4_5_vl_moe", "gemma4", "gemma4_dense", "glm46v", "glm4v", "glm4v_moe", "glm4v_moe_fp8", "glm_ocr"),
    *("interns1", "internvl", "molmo2", "qwen3_5", "qwen3_5_moe", "smolvlm"),
)
# Where no embeddings stand for an item: what is said of it.
REFUSED = {
    **{(family, "image"): "how image is laid out" for family in PICTURES_LAID_OUT},
    **{(family, "video"): "how video is laid out" for family in VIDEOS_LAID_OUT},
    **{(family, "video"): "more of video" for family in ("qwen3_vl", "qwen3_vl_moe")},
    ("qwen3_omni_moe", "image"): "more of image",
    **{(family, kind): "itself" for family in tiny.THINKERS for kind in ("video", "audio")},
    **{(family, "image"): "its layers cross-attend to media" for family in ("florence2", "mllama")},
    # Found first: their embeddings are not those of the grid.
    ("hunyuan_vl", "image"): "requires 6 embeddings",
    ("ernie4_5_vl_moe", "video"): "requires 24 embeddings",
}


def a_given(modality: str) -> Any:
    if modality == "video":
        return tiny.frames(4), {"fps": 4.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3]}
    return tiny.picture(84, 56, 1) if modality == "image" else (tiny.sound(0.8, 1), 16000)


@pytest.mark.parametrize("family", tiny.MEDIA_FAMILIES)
def test_embeddings_leave_the_prompt_as_the_item_makes_it(family: str) -> None:
    """For every kind of item: the same token ids as with the item itself, or a refusal that says why."""
    model, pipe = pipes.info(family), pipes.shared(family)
    for modality in model.modalities:
        counts = [int(modality == other) for other in ("image", "video", "audio")]
        text = tiny.wrap(family, tiny.markers(family, *counts) + "x")
        made = prepared(pipe, text, modality, a_given(modality))
        (span,) = made.spans
        width = model.hidden_size * (1 + (model.deeper if modality == "image" else 0))
        value: Any = torch.randn(max(1, span.item.num_embeds), width)
        if (grid := f"{modality}_grid_thw") in span.item.layout:
            value = {f"{modality}_embeds": value, grid: [list(span.item.layout[grid])]}
        if family in SIZED and modality == "image":
            value = {"image_embeds": value, "image_sizes": [[84, 56]]}
        if family in SIZED and modality == "video":
            height, width = tiny.frames(4).shape[1:3]
            value = {"video_embeds": value, "video_image_sizes": [[[width, height]] * 4]}
        words = REFUSED.get((family, modality))
        if words is not None:
            with pytest.raises(MediaError, match=words):
                prepared(pipe, text, modality, value)
            continue
        request = prepared(pipe, text, modality, value)
        assert request.token_ids == made.token_ids
        assert [(own.start, own.stop) for own in request.spans] == [(span.start, span.stop)]
        assert request.spans[0].item.num_embeds == span.item.num_embeds
        assert request.spans[0].item.embed_mask == span.item.embed_mask


def prepared(pipe: Any, text: str, modality: str, value: Any) -> Any:
    return pipe.prepare(
        RequestOrder({"prompt": text, "multi_modal_data": {modality: value}}, pipes.ONE_TOKEN, request_id="0")
    )


def test_embeddings_have_the_number_of_their_picture() -> None:
    pipe = pipes.shared("mantis")
    value = torch.randn(2, 15, HIDDEN)
    text = tiny.wrap("mantis", tiny.markers("mantis", 2) + "x")
    told = pipe.tokenizer.decode(prepared(pipe, text, "image", value).token_ids)
    assert told.count("(image 1: <Image>") == told.count("(image 2: <Image>") == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.randn(1, 8, 128), "need the size of each image"),
        ({"image_embeds": torch.randn(1, 8, 128)}, "need the size of each image"),
        (
            {"image_embeds": torch.randn(1, 9, 128), "image_sizes": [[84, 56]]},
            "84 x 56 pixels requires 12 embeddings",
        ),
        ({"image_embeds": torch.randn(1, 12, 128), "image_sizes": [[84, 0]]}, "two whole numbers above 0"),
        ({"image_embeds": torch.randn(1, 12, 128), "image_sizes": [[84, 56], [84, 56]]}, "2 rows for 1 images"),
    ],
)
def test_sizes_of_embedded_images_are_checked(value: Any, words: str) -> None:
    text = tiny.wrap("minicpmv", tiny.markers("minicpmv", 1) + "x")
    with pytest.raises(MediaError, match=words):
        prepared(pipes.shared("minicpmv"), text, "image", value)


def test_sizes_are_refused_where_no_prompt_needs_them() -> None:
    value = {"image_embeds": torch.randn(1, 4, HIDDEN), "image_sizes": [[84, 56]]}
    with pytest.raises(MediaError, match="image_sizes"):
        ask("llava", value)


@pytest.mark.parametrize("family", ["minicpmv", "minicpmv_2_5"])
def test_embeddings_with_sizes_are_answered_as_their_images(family: str) -> None:
    """As a tensor for images of one size, as a list for others; each prompt numbers its images."""
    asked = (cases.TWICE, cases.BETWEEN)
    with make(family, cases.ROOMY) as llm:
        for question in asked:
            inputs = reference.inputs(family, question)
            named = {name: inputs[name] for name in ("pixel_values", "tgt_sizes", "num_slices")}
            with torch.inference_mode():
                embeds = list(reference.model(family).get_image_features(**named).pooler_output)
            embeds = [entry.flatten(0, -2) for entry in embeds]
            value: Any = torch.stack(embeds) if question is cases.TWICE else embeds
            sizes = torch.tensor([picture.size for picture in question.pictures()])
            given = {"image": {"image_embeds": value, "image_sizes": sizes}}
            (output,) = llm.generate(
                [{"prompt": question.prompt(family), "multi_modal_data": given}],
                SamplingParams(temperature=0, max_tokens=question.max_tokens, ignore_eos=True),
                use_tqdm=False,
            )
            expected = reference.answer(family, question)
            assert tuple(output.prompt_token_ids or ()) == expected.prompt_ids
            assert tuple(output.outputs[0].token_ids) == expected.token_ids


def answered(llm: LLM, family: str, question: cases.Ask, given: dict[str, Any]) -> None:
    """The answer to embeddings is the reference's to the media themselves."""
    (output,) = llm.generate(
        [{"prompt": question.prompt(family), "multi_modal_data": given}],
        SamplingParams(temperature=0, max_tokens=question.max_tokens, ignore_eos=True),
        use_tqdm=False,
    )
    expected = reference.answer(family, question)
    assert tuple(output.prompt_token_ids or ()) == expected.prompt_ids
    assert tuple(output.outputs[0].token_ids) == expected.token_ids


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_embeddings_with_features_of_deeper_layers_are_answered_as_their_images(family: str) -> None:
    """As vLLM takes them: behind an image's embeddings, those of each tower layer whose features enter later layers."""
    with make(family, cases.ROOMY) as llm:
        for question in (cases.TWICE, cases.BETWEEN):
            inputs = reference.inputs(family, question)
            grid = inputs["image_grid_thw"]
            with torch.inference_mode():
                made = reference.model(family).get_image_features(inputs["pixel_values"], grid, return_dict=True)
            plain = torch.cat(list(made.pooler_output))
            deeper = [torch.cat(list(each)) if isinstance(each, list | tuple) else each
                      for each in made.deepstack_features]  # fmt: skip
            assert len(deeper) > 0
            answered(llm, family, question, {"image": {"image_embeds": torch.cat([plain, *deeper], dim=1),
                                                       "image_grid_thw": grid}})  # fmt: skip
    for narrow in (plain, torch.cat([plain, deeper[0], *deeper], dim=1)):
        with pytest.raises(MediaError, match=f"the {len(deeper)} tower layers"):
            ask(family, {"image_embeds": narrow, "image_grid_thw": grid}, len(grid))


def test_embeddings_of_videos_and_audio_are_answered_as_they_are() -> None:
    """In vLLM's forms: sizes of the frames; windows of an audio item, or its whole."""
    family = "minicpmo"
    model = reference.model(family)
    with make(family, cases.ROOMY) as llm:
        for question in (cases.VIDEO, cases.ODD_VIDEO):
            inputs = reference.inputs(family, question)
            with torch.inference_mode():
                made = model.get_image_features(*(inputs[name] for name in ("pixel_values", "tgt_sizes", "num_slices")))
            frames = question.videos[0].array
            sizes = [[[frames.shape[2], frames.shape[1]]] * len(frames)]
            embeds = made.pooler_output[0].flatten(0, -2)
            answered(llm, family, question, {"video": {"video_embeds": embeds[None], "video_image_sizes": sizes}})
            alone = {"video_embeds": [embeds], "video_image_sizes": torch.tensor(sizes[0])}
            answered(llm, family, question, {"video": alone})
        for question in (cases.HEARD, cases.SOUNDS):
            inputs = reference.inputs(family, question)
            names = ("audio_features", "audio_feature_lens", "audio_num_windows")
            with torch.inference_mode():
                whole = model.get_audio_features(*(inputs[name] for name in names)).pooler_output
            counts = [int(span.item.num_embeds) for span in heard(family, question)]
            parts = list(whole.split(counts))
            for value in (parts, [[part[:3], part[3:]] for part in parts]):
                answered(llm, family, question, {"audio": {"audio_embeds": value}})


def heard(family: str, question: cases.Ask) -> Any:
    given = {"audio": [(wave, tiny.SOUND_RATE) for wave in question.waves()]}
    prompt = {"prompt": question.prompt(family), "multi_modal_data": given}
    return pipes.shared(family).prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0")).spans


@pytest.mark.parametrize(
    ("modality", "value", "words"),
    [
        ("video", torch.randn(1, 8, 128), "need the size of each frame"),
        (
            "video",
            {"video_embeds": torch.randn(1, 9, 128), "video_image_sizes": [[[56, 56]] * 2]},
            "of 2 frames requires",
        ),
        (
            "video",
            {"video_embeds": torch.randn(1, 8, 128), "video_image_sizes": [[[56, 56], [56]]]},
            "two whole numbers",
        ),
        ("video", {"video_embeds": torch.randn(1, 8, 128), "video_image_sizes": []}, "must have the shape"),
        ("video", {"video_embeds": torch.randn(1, 8, 128), "video_image_sizes": "x"}, "must have the shape"),
        ("audio", {"audio_embeds": [[torch.randn(4, 128), torch.randn(4, 64)]]}, "windows of an audio item"),
        ("audio", {"audio_embeds": [[]]}, "windows of an audio item"),
        ("audio", {"audio_embeds": [torch.randn(4, 64)]}, "must have the shape"),
    ],
)
def test_wrong_embeddings_of_videos_and_audio_are_refused(modality: str, value: Any, words: str) -> None:
    counts = [int(modality == other) for other in ("image", "video", "audio")]
    text = tiny.wrap("minicpmo", tiny.markers("minicpmo", *counts) + "x")
    with pytest.raises(MediaError, match=words):
        prepared(pipes.shared("minicpmo"), text, modality, value)
