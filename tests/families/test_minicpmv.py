"""MiniCPM-V: versions, grids of slices, the text of an image."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.families.minicpmv.config import MiniCPMVConfig
from beheld.families.minicpmv.processing import SliceImageProcessor, best_grid, fitted
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny
from tests.inputs import pipes


@pytest.mark.parametrize("version", [1.0, 2.8, "4.6", 7, "new", None])
def test_an_unknown_version_is_refused_by_name(version: object) -> None:
    with pytest.raises(ModelError, match=rf"version {version} .*2\.0, 2\.5, 2\.6, 4\.0 and 4\.5 are"):
        MiniCPMVConfig(version=version, vision_config={"hidden_size": 32})


def test_the_first_version_without_slices_is_refused() -> None:
    with pytest.raises(ModelError, match="version None"):
        MiniCPMVConfig(scale_depth=1.4)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"scale_depth": 1.4, "slice_mode": True}, "GraniteModel"),
        ({"version": "2.5"}, "LlamaModel"),
        ({"version": 2.6}, "Qwen2Model"),
        ({"version": 4}, "LlamaModel"),
        ({"version": "4.5"}, "Qwen3Model"),
    ],
)
def test_versions_are_told_by_their_field(entries: dict[str, Any], text: str) -> None:
    assert MiniCPMVConfig(**entries, vision_config={"hidden_size": 32}).facts.text == text


def test_sizes_of_the_first_tower_are_known() -> None:
    tower = MiniCPMVConfig(scale_depth=1.4, slice_mode=True).vision_config
    assert (tower.hidden_size, tower.num_hidden_layers, tower.hidden_act) == (1152, 27, "gelu")


@pytest.mark.parametrize(
    ("size", "grid"), [((448, 448), None), ((900, 450), (2, 1)), ((450, 1800), (1, 4)), ((1344, 1344), (3, 3))]
)
def test_grids_follow_the_shape(size: tuple[int, int], grid: tuple[int, int] | None) -> None:
    assert best_grid(size, 448, 9) == grid


def test_small_images_are_enlarged_only_if_asked() -> None:
    assert fitted((100, 50), 448, 14, enlarged=False) == (98, 56)
    assert fitted((100, 50), 448, 14, enlarged=True) == (630, 322)


# Size, largest number of slices, patches (rows, columns) of the overview and of a slice, and number of both, recorded
# from image_processing_minicpmv.py of MiniCPM-V 2.6 (github.com/404805854/minicpmv2.6-onnx, commit 48804ee), with the
# settings of the published preprocessor_config.json.
RECORDED = [
    ((448, 448), 9, [(32, 32)], 1),
    ((100, 50), 9, [(23, 45)], 1),
    ((900, 450), 9, [(23, 45), (32, 32)], 3),
    ((450, 1800), 9, [(64, 16), (32, 32)], 5),
    ((450, 1800), 3, [(64, 16), (37, 28)], 4),
    ((1344, 1344), 9, [(32, 32), (32, 32)], 10),
    ((1344, 1344), 3, [(32, 32), (23, 45)], 3),
    ((30, 700), 9, [(155, 7)], 1),
    ((1999, 333), 9, [(13, 78), (29, 35)], 6),
    ((1999, 333), 3, [(13, 78), (23, 45)], 4),
    ((640, 480), 9, [(28, 37), (39, 26)], 3),
]


@pytest.mark.parametrize(("size", "most", "grids", "count"), RECORDED)
def test_slices_are_those_of_the_published_processor(
    size: tuple[int, int], most: int, grids: list[tuple[int, int]], count: int
) -> None:
    made = SliceImageProcessor({})([Image.new("RGB", size)], max_slice_nums=most)
    assert made["num_slices"].tolist() == [count]
    assert [tuple(grid) for grid in made["tgt_sizes"].tolist()] == [grids[0], *grids[1:] * (count - 1)]


def test_whole_images_by_slice_mode_are_refused() -> None:
    with pytest.raises(ModelError, match="slice_mode"):
        SliceImageProcessor({"slice_mode": False})


def chat(family: str, *parts: Any) -> str:
    """What a conversation of one message becomes, slices and all, as text."""
    content = [part if isinstance(part, str) else {"type": "image", "image": part} for part in parts]
    pipe = pipes.shared(family)
    order = RequestOrder(Chat([{"role": "user", "content": content}]), pipes.ONE_TOKEN, request_id="0")
    return str(pipe.tokenizer.decode(list(pipe.prepare(order).token_ids)))


def test_a_conversation_with_the_first_version_is_that_of_the_published_code() -> None:
    """Its tokenizer has no template: the published class writes the turns, and the processor a line after an image."""
    slices = "<slice>" + "\n".join(["<image>" + "<unk>" * 4 + "</image>"] * 2) + "</slice>"
    told = chat("minicpmv_2_0", tiny.picture(56, 112, 1), "What?")
    begun = "<s><用户><image><unk><unk><unk><unk></image>"
    assert told.replace(" ", "") == f"{begun}{slices}\nWhat?<AI>"
    assert chat("minicpmv_2_0", "What?").replace(" ", "") == "<s><用户>What?<AI>"


def test_a_text_begins_once() -> None:
    """Llama 3's template writes what its tokenizer puts before every text, with an image in it, too."""
    for parts in (("What?",), (tiny.picture(56, 56, 1), "What?")):
        assert chat("minicpmv_2_5", *parts).count("<|begin_of_text|>") == 1


def test_answers_of_2_5_end_at_a_turn(tmp_path: Path) -> None:
    shutil.copytree(tiny.checkpoint("minicpmv_2_5"), tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": 128001}), encoding="utf-8")
    assert read_info(tmp_path, EngineArgs()).eos_ids == {128001, 128009}
