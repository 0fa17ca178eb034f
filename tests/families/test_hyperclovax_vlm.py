"""HyperCLOVA X SEED Vision: variants, grids, canvases, its blocks and what messages say of an image."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from beheld import LLM, SamplingParams
from beheld.core.errors import ModelError, PromptError
from beheld.core.params import SamplingParams as Params
from beheld.families.hyperclovax_vlm.config import HyperclovaxConfig, best_grid, margins
from beheld.families.hyperclovax_vlm.modeling import _stage
from beheld.families.hyperclovax_vlm.processing import load
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny
from tests.inputs import pipes
from tests.tiny_own_hyperclova import IMAGE_MARK, VIDEO_MARK

FAMILY = "hyperclovax_vlm"
TILE = 42


def content() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tiny.checkpoint(FAMILY) / "config.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mm_projector_type", "qwen_merger"),
        ("anyres", False),
        ("unpad", False),
        ("first_last_frames_slow", True),
        ("num_queries_vis_abstractor_video_fast", 8),
    ],
)
def test_other_variants_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name):
        HyperclovaxConfig.from_dict(content() | {name: value})


@pytest.mark.parametrize(("part", "kind"), [("text_config", "hyperclovax"), ("vision_config", "qwen2_5_vl_visual")])
def test_other_parts_are_refused_by_name(part: str, kind: str) -> None:
    given = content()
    given[part]["model_type"] = kind
    with pytest.raises(ModelError, match=f"{part} .* {kind!r}"):
        HyperclovaxConfig.from_dict(given)


def test_grids_follow_from_the_largest_number_of_tiles() -> None:
    listed = HyperclovaxConfig.from_dict(content())
    made = HyperclovaxConfig.from_dict(content() | {"possible_resolutions": []})
    assert made.resolutions == listed.resolutions
    without = HyperclovaxConfig.from_dict(content() | {"possible_resolutions": [], "use_1x1_grid": False})
    assert without.resolutions == [size for size in made.resolutions if size != [TILE, TILE]]


@pytest.mark.parametrize(
    ("size", "grid", "padding"),
    [((84, 84), (2, 2), (0, 0)), ((84, 56), (2, 2), (1, 0)), ((33, 97), (3, 1), (0, 0)), ((378, 30), (1, 9), (0, 0))],
)
def test_padding_is_left_out(size: tuple[int, int], grid: tuple[int, int], padding: tuple[int, int]) -> None:
    rows, columns = best_grid(size, HyperclovaxConfig.from_dict(content()).resolutions, TILE)
    assert (rows, columns) == grid
    assert margins(size, 2 * rows, 2 * columns) == padding


@pytest.mark.parametrize(
    ("count", "tiles"), [(1, [1]), (2, [2]), (8, [8]), (9, [9]), (10, [9, 1]), (13, [9, 4]), (18, [9, 9])]
)
def test_nine_frames_share_a_canvas(count: int, tiles: list[int]) -> None:
    outputs, texts = load(tiny.checkpoint(FAMILY))._process_videos([tiny.frames(count)])
    assert outputs["video_canvas_tiles"].tolist() == tiles
    # Four embeddings of the first frame of each canvas, one of each other.
    assert texts == [VIDEO_MARK * (count + 3 * len(tiles))]


@pytest.mark.parametrize("count", [1, 9, 10])
def test_each_frame_fills_its_tile_in_order(count: int) -> None:
    frames = np.repeat(np.arange(count, dtype=np.uint8)[:, None, None, None] * 20, 3, axis=3)
    frames = np.broadcast_to(frames, (count, 30, 50, 3))
    outputs, _ = load(tiny.checkpoint(FAMILY))._process_videos([frames])
    pixels = outputs["pixel_values_videos"]
    expected = torch.arange(count) * 20 / 255 * 2 - 1
    torch.testing.assert_close(pixels, expected[:, None, None, None].expand_as(pixels), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "times"), [({"num_frames": 4}, (0, 1.5, 3, 4.5)), ({"fps": 1.0}, (0, 1, 2, 3, 4, 5))]
)
def test_a_call_may_choose_frames(options: dict[str, Any], times: tuple[float, ...]) -> None:
    video = (tiny.frames(12), {"fps": 2.0})
    request = pipes.ask(
        pipes.shared(FAMILY), FAMILY, videos=[video], mm_processor_kwargs={"do_sample_frames": True, **options}
    )
    assert request.receipts[0].used["timestamps_s"] == times
    (span,) = request.spans
    assert span.item.num_embeds == len(times) + 3


def test_one_frame_alone_and_after_nine_has_the_same_embeddings() -> None:
    from tests.oracle import reference

    model, frame = reference.model(FAMILY), tiny.frames(1, 5)
    make = load(tiny.checkpoint(FAMILY))._process_videos

    def features(outputs: dict[str, Any]) -> list[torch.Tensor]:
        with torch.inference_mode():
            found = model.get_video_features(**{k: v for k, v in outputs.items() if k != "video_num_frames"})
        return list(found.pooler_output)

    (alone,) = features(make([frame])[0])
    (after,) = features(make([np.concatenate([tiny.frames(9, 6), frame])])[0])
    first, second = features(make([tiny.frames(9, 6), frame])[0])
    assert alone.shape == (4, 128)
    torch.testing.assert_close(after, torch.cat((first, alone)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second, alone, atol=1e-4, rtol=1e-4)


def test_the_blocks_are_those_of_regnet() -> None:
    timm = pytest.importorskip("timm")
    kind = timm.models.regnet.RegStage
    norm = timm.layers.LayerNorm2d
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = kind(3, 32, 32, stride=1, dilation=1, act_layer=torch.nn.SiLU, norm_layer=norm)
        for weight in theirs.parameters():
            torch.nn.init.normal_(weight, std=0.4)
        image = torch.randn(2, 32, 5, 5)
    ours = _stage(32)
    ours.load_state_dict(theirs.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(ours(image), theirs(image), atol=1e-5, rtol=1e-5)


def copied(folder: Path, **changes: Any) -> Path:
    for file in tiny.checkpoint(FAMILY).glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("crop_size", {"height": 56, "width": 56}),
        ("size", {"shortest_edge": 56}),
        ("possible_resolutions", [[42, 84]]),
        ("unpad", False),
        ("num_queries_vis_abstractor_video_fast", 4),
    ],
)
def test_a_processor_of_another_model_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name):
        load(copied(tmp_path, **{name: value}))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (copied(tmp_path) / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"preprocessor_config\.json is missing"):
        load(tmp_path)


# ---------------------------------------------------------------------- what messages say of an image

WORDS = {"ocr": "Naver, CLOVA", "lens_keywords": "iPhone", "lens_local_keywords": "[0.07, 0.21, 0.92, 0.90] iPhone"}


def messages(words: dict[str, Any], image: Image.Image | None = None) -> list[dict[str, Any]]:
    """As the published example writes them; the image itself only if it is given."""
    own = {} if image is None else {"image": image}
    part = {"type": "image", **own, **words}
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]


def test_a_conversation_gives_the_prompt_of_the_tokenizers_template() -> None:
    from transformers import AutoTokenizer

    folder, image = tiny.checkpoint(FAMILY), tiny.picture(84, 56, 1)
    tokenizer = AutoTokenizer.from_pretrained(folder, config=HyperclovaxConfig.from_dict(content()))
    for words in (WORDS, dict.fromkeys(WORDS, "")):
        written = tokenizer.apply_chat_template(messages(words), tokenize=False, add_generation_prompt=True)
        assert all(text in written for text in words.values())
        with LLM(model=str(folder), max_model_len=1024, limit_mm_per_prompt={"image": 1}) as llm:
            params = SamplingParams(temperature=0, max_tokens=4)
            request = {"prompt": written, "multi_modal_data": {"image": image}}
            (asked,) = llm.generate([request], params, use_tqdm=False)
            (talked,) = llm.chat(messages(words, image), params, use_tqdm=False)
        assert asked.prompt_token_ids == talked.prompt_token_ids
        assert asked.outputs[0].token_ids == talked.outputs[0].token_ids


def prepared(words: dict[str, Any]) -> Any:
    asked = Chat(messages(words, tiny.picture(84, 56, 1)))
    return pipes.shared(FAMILY).prepare(RequestOrder(asked, Params(max_tokens=1), request_id="0"))


@pytest.mark.parametrize("mark", [IMAGE_MARK, VIDEO_MARK, "<|im_end|>"])
def test_words_about_an_image_hold_no_control_token(mark: str) -> None:
    tokenizer = pipes.shared(FAMILY).tokenizer
    token = tokenizer.convert_tokens_to_ids(mark)
    plain, forged = (list(prepared(WORDS | {"ocr": text}).token_ids) for text in ("", f"a{mark}b"))
    assert plain.count(token) == forged.count(token)
    assert mark in tokenizer.decode(forged).replace(IMAGE_MARK * 14, "")


def test_words_about_an_image_are_text() -> None:
    with pytest.raises(PromptError, match="'ocr' of Part 1 of message 1 is not text"):
        prepared(copy.deepcopy(WORDS) | {"ocr": ["Naver"]})
