"""DeepSeek-VL2 and DeepSeek-OCR: views by hand, conversations, tokenizers, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import BeheldError, ModelError
from beheld.core.request import Request
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny
from tests.inputs import pipes
from tests.tiny_own_deepseek import BEGIN, END

VL2, OCR = "deepseek_vl_v2", "deepseek_ocr"


def ask(family: str, *sizes: tuple[int, int], **options: Any) -> Request:
    pictures = [tiny.picture(*size, seed) for seed, size in enumerate(sizes)]
    request: dict[str, Any] = {"prompt": tiny.prompt(family, len(sizes)), "mm_processor_kwargs": options}
    if pictures:
        request["multi_modal_data"] = {"image": pictures}
    return pipes.shared(family).prepare(RequestOrder(request, pipes.ONE_TOKEN, request_id="0"))


def grids(request: Request) -> list[tuple[int, int]]:
    """Columns and rows of each image."""
    found = [span.item.features["grids"][0].tolist() for span in request.spans]
    return [(columns, rows) for columns, rows in found]


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((42, 42), (1, 1)),
        ((20, 20), (1, 1)),
        ((200, 60), (3, 1)),
        ((60, 200), (1, 3)),
        ((84, 56), (2, 2)),
        ((80, 42), (2, 1)),
        ((300, 200), (2, 2)),
    ],
)
def test_the_canvas_that_keeps_most_of_an_image(size: tuple[int, int], grid: tuple[int, int]) -> None:
    request = ask(VL2, size)
    assert grids(request) == [grid]
    columns, rows = grid
    assert request.spans[0].item.num_embeds == 2 * 3 + 1 + 2 * rows * (2 * columns + 1)


def test_more_than_two_images_are_one_tile_each() -> None:
    wide = (200, 60)
    assert grids(ask(VL2, wide, wide)) == [(3, 1)] * 2
    assert grids(ask(VL2, wide, wide, wide)) == [(1, 1)] * 3
    # Neither is taken for the other when it is kept.
    assert grids(ask(VL2, wide)) == [(3, 1)]


def test_candidate_resolutions_of_a_call() -> None:
    assert grids(ask(VL2, (200, 60), candidate_resolutions=[[42, 42], [168, 42]])) == [(4, 1)]
    with pytest.raises(BeheldError, match="43 x 42 is not one of tiles of 42"):
        ask(VL2, (200, 60), candidate_resolutions=[[43, 42]])


@pytest.mark.parametrize(
    ("size", "options", "grid", "overview", "tile"),
    [
        ((128, 128), {}, (0, 0), 3, 2),
        ((129, 100), {}, (2, 2), 3, 2),
        ((300, 300), {}, (2, 2), 3, 2),
        ((500, 100), {}, (4, 1), 3, 2),
        ((100, 500), {}, (1, 4), 3, 2),
        ((500, 100), {"max_crops": 9}, (5, 1), 3, 2),
        ((500, 100), {"max_crops": 2}, (2, 1), 3, 2),
        ((500, 100), {"crop_mode": False}, (0, 0), 3, 2),
        ((500, 100), {"crop_mode": False, "base_size": 256, "image_size": 256}, (0, 0), 4, 4),
        ((500, 100), {"base_size": 256, "image_size": 64}, (4, 1), 4, 1),
    ],
)
def test_tiles_of_a_document(
    size: tuple[int, int], options: dict[str, Any], grid: tuple[int, int], overview: int, tile: int
) -> None:
    request = ask(OCR, size, **options)
    assert grids(request) == [grid]
    columns, rows = grid
    tiles = rows * tile * (columns * tile + 1) if columns else 0
    assert request.spans[0].item.num_embeds == overview * (overview + 1) + 1 + tiles


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_crops": 1}, "max_crops 1 is not from 2 to 9"),
        ({"max_crops": 10}, "max_crops 10 is not from 2 to 9"),
        ({"base_size": 8}, "base_size 8 and image_size 128 must be 16 or more"),
    ],
)
def test_sizes_that_no_document_has(options: dict[str, int], said: str) -> None:
    with pytest.raises(BeheldError, match=said):
        ask(OCR, (300, 300), **options)


def test_small_views_without_tiles_lose_the_shape() -> None:
    (receipt,) = ask(OCR, (60, 30), crop_mode=False).receipts
    assert any("aspect ratio" in loss for loss in receipt.lost)
    (receipt,) = ask(OCR, (60, 30)).receipts
    assert receipt.lost == ()
    assert (receipt.used["width"], receipt.used["height"]) == (192, 96)


def test_a_conversation_with_a_document_is_plain_text() -> None:
    picture = tiny.picture(84, 56, 1)
    talk = [
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "Free OCR."}]},
    ]
    chat = pipes.shared(OCR).prepare(RequestOrder(Chat(talk), pipes.ONE_TOKEN, request_id="0"))
    order = {"prompt": "<image>\nFree OCR.", "multi_modal_data": {"image": picture}}
    assert chat.token_ids == pipes.shared(OCR).prepare(RequestOrder(order, pipes.ONE_TOKEN, request_id="1")).token_ids


def test_views_hold_the_image_between_gray() -> None:
    image = Image.new("RGB", (126, 42), (255, 0, 0))
    order = {"prompt": tiny.prompt(VL2, 1), "multi_modal_data": {"image": image}}
    (span,) = pipes.shared(VL2).prepare(RequestOrder(order, pipes.ONE_TOKEN, request_id="0")).spans
    overview, tiles = (span.item.features[name].float() for name in ("pixel_values", "pixel_values_local"))
    red = torch.tensor([1.0, -1.0, -1.0])[:, None, None]
    assert torch.equal(tiles, red.expand(3, 3, 42, 42))
    assert torch.equal(overview[0, :, 14:28], red.expand(3, 14, 42))
    gray = torch.full((3, 14, 42), 127 / 255 * 2 - 1)
    for rows in (slice(0, 14), slice(28, 42)):
        assert torch.allclose(overview[0, :, rows], gray, atol=1e-6)


def test_an_image_of_which_nothing_would_be_left() -> None:
    with pytest.raises(BeheldError, match="2000 x 2 pixels is too narrow"):
        ask(VL2, (2000, 2))


def test_a_conversation_is_the_prompt_of_the_published_code() -> None:
    picture = tiny.picture(84, 56, 1)
    talk = [
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What? "}]},
        {"role": "assistant", "content": "A square."},
        {"role": "user", "content": "Where?"},
    ]
    chat = pipes.shared(VL2).prepare(RequestOrder(Chat(talk), pipes.ONE_TOKEN, request_id="0"))
    text = f"<|User|>: <image>\nWhat?\n\n<|Assistant|>:A square.{END}<|User|>: Where?\n\n<|Assistant|>:"
    order = {"prompt": text, "multi_modal_data": {"image": picture}}
    assert chat.token_ids == pipes.shared(VL2).prepare(RequestOrder(order, pipes.ONE_TOKEN, request_id="1")).token_ids


@pytest.mark.parametrize("added", [True, False])
def test_a_text_begins_once_whatever_the_tokenizer_does(added: bool, tmp_path: Path) -> None:
    from beheld.families._shared.deepseek.processing import read_tokenizer

    for file in tiny.checkpoint(VL2).glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"add_bos_token": added}
    path.write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = read_tokenizer(tmp_path)
    ids = tokenizer("What is in  this\npicture?")["input_ids"]
    # The byte-level pieces, not those of the Llama class that the files name.
    assert tokenizer.decode(ids) == f"{BEGIN}What is in  this\npicture?"
    assert ids.count(tokenizer.bos_token_id) == 1


def _nested(name: str, value: Any) -> dict[str, Any]:
    entry, _, key = name.rpartition(".")
    return {entry: {key: value}} if entry else {key: value}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("language_config.use_mla", True, "latent attention"),
        ("projector_config.projector_type", "mlp_gelu", "projector_config.projector_type 'mlp_gelu'"),
        ("vision_config.width", 1152, "other towers than sam_vit_b and clip-l-14-224"),
    ],
)
def test_other_documents_models_are_refused_by_name(name: str, value: Any, said: str, tmp_path: Path) -> None:
    _refused(OCR, name, value, said, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("language_config.model_type", "llama", "a text of the model type 'llama'"),
        ("language_config.qk_nope_head_dim", 128, "latent attention and use_mla false"),
        ("language_config.scoring_func", "sigmoid", "language_config.scoring_func 'sigmoid'"),
        ("language_config.norm_topk_prob", True, "language_config.norm_topk_prob True"),
        ("language_config.topk_method", "group_limited_greedy", "topk_method 'group_limited_greedy'"),
        ("language_config.n_routed_experts", None, "no language_config.n_routed_experts"),
        ("language_config.rope_scaling", {"type": "yarn"}, "language_config.rope_scaling"),
        ("projector_config.projector_type", "identity", "projector_config.projector_type 'identity'"),
        ("projector_config.n_embed", 96, "a projector to 96, and a text of 64"),
        ("vision_config.width", {"sam_vit_b": {}}, "another tower than SigLIP's"),
        ("tile_tag", "1D", "tile_tag '1D'"),
        ("global_view_pos", "tail", "global_view_pos 'tail'"),
        ("architectures", ["DeepseekOCR2ForCausalLM"], "DeepseekOCR2ForCausalLM, which shares the model type"),
    ],
)
def test_other_versions_are_refused_by_name(name: str, value: Any, said: str, tmp_path: Path) -> None:
    _refused(VL2, name, value, said, tmp_path)


def _refused(family: str, name: str, value: Any, said: str, tmp_path: Path) -> None:
    content = json.loads((tiny.checkpoint(family) / "config.json").read_text(encoding="utf-8"))
    for entry, change in _nested(name, value).items():
        content[entry] = content[entry] | change if isinstance(change, dict) and entry in content else change
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError, match=said):
        read_info(tmp_path, EngineArgs())


def test_experts_of_deepseek_v3_need_latent_attention_and_one_group(tmp_path: Path) -> None:
    """As deepseek-ai/deepseek-vl2, whose text is DeepSeek-V3's layers."""
    shutil.copytree(tiny.checkpoint("deepseek_vl_v2_small"), tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    chosen = {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    for changes, said in (
        ({"n_group": 2}, "language_config.n_group 2"),
        ({"scoring_func": "softmax"}, "language_config.scoring_func 'softmax'"),
        ({"moe_layer_freq": 2}, "language_config.moe_layer_freq 2"),
    ):
        entry = {"language_config": content["language_config"] | chosen | changes}
        (tmp_path / "config.json").write_text(json.dumps(content | entry), encoding="utf-8")
        with pytest.raises(ModelError, match=said):
            read_info(tmp_path, EngineArgs())
    entry = {"language_config": content["language_config"] | chosen | {"n_group": 1, "topk_group": 1}}
    (tmp_path / "config.json").write_text(json.dumps(content | entry), encoding="utf-8")
    groups = read_info(tmp_path, EngineArgs()).kv_groups
    assert [group.kind for group in groups] == ["latent"]
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    assert read_info(tmp_path, EngineArgs()).kv_groups == groups


@pytest.mark.parametrize("file", ["processor_config.json", "tokenizer.json"])
def test_a_missing_file_is_named(file: str, tmp_path: Path) -> None:
    from beheld.families.deepseek_vl_v2.inputs import INPUTS

    assert INPUTS.load is not None
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny.checkpoint(VL2), folder)
    (folder / file).unlink()
    with pytest.raises(ModelError, match=file):
        INPUTS.load(folder)
