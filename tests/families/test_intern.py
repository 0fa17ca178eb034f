"""The families around InternViT: what they refuse by name, and their tiles."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.checkpoint.info import read_config
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError, PlaceholderError, ProcessError, UserError
from beheld.families._shared.intern.processing import best_grid, grids
from beheld.families._shared.internlm2.processing import read
from beheld.families.interns1.processing import first_formula
from beheld.inputs.pipeline import RequestOrder
from tests import tiny
from tests.inputs import pipes

FAMILIES = ("internvl_chat", "internvl_chat_qwen2", "h2ovl_chat", "nvlm_d")


def changed(family: str, folder: Path, **changes: Any) -> Path:
    """A copy of a tiny checkpoint with other entries in config.json."""
    shutil.copytree(tiny.checkpoint(family), folder)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(content | changes), encoding="utf-8")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llm_config": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}}, "Gemma2ForCausalLM"),
        ({"ps_version": "v1"}, "ps_version 'v1'"),
        ({"select_layer": -4}, "select_layer -4"),
        ({"force_image_size": 112}, "tiles of 112 pixels"),
    ],
)
def test_unknown_versions_are_refused_by_name(family: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = changed(family, tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=words):
        read_config(folder, EngineArgs(model=str(folder)))


@pytest.mark.parametrize(
    ("family", "token", "mark"),
    [
        *((each, "<IMG_CONTEXT>", "<image>") for each in FAMILIES[:3]),
        ("nvlm_d", "<|vision_pad|>", "<image>"),
        # That of videos, too.
        ("molmo2", "<im_patch>", "<|image|>"),
    ],
)
def test_the_token_of_an_images_embeddings_is_no_text(family: str, token: str, mark: str) -> None:
    """Items are written with another one, so nothing replaces it: the model would answer of no image."""
    pipe = pipes.shared(family)
    (number,) = pipe.tokenizer.encode(token, add_special_tokens=False)
    for prompt in ({"prompt_token_ids": [5, number, 7]}, f"a {token}"):
        with pytest.raises(PlaceholderError, match=f"Write '{re.escape(mark)}.*' once for each image"):
            pipe.prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))


def test_intern_s1_names_a_language_model_that_it_does_not_know(tmp_path: Path) -> None:
    folder = changed("interns1", tmp_path / "model", text_config={"model_type": "qwen3_moe"})
    with pytest.raises(ModelError, match="'qwen3_moe'"):
        read_config(folder, EngineArgs(model=str(folder)))


def test_missing_files_of_internlm2s_tokenizer_are_named(tmp_path: Path) -> None:
    folder = changed("internvl_chat", tmp_path / "model")
    (folder / "tokenizer.model").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        read(folder)
    for name in ("tokenizer_config.json", "added_tokens.json"):
        (folder / name).write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="<IMG_CONTEXT>"):
        read_config(folder, EngineArgs(model=str(folder)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_tiles_is_bounded(family: str) -> None:
    """The time to list the grids grows with its third power."""
    for options in ({"max_dynamic_patch": 101}, {"max_dynamic_patch": 10**9}, {"max_dynamic_patch": 0}):
        prompt = {
            "prompt": "<image>",
            "multi_modal_data": {"image": tiny.picture(60, 60, 1)},
            "mm_processor_kwargs": options,
        }
        with pytest.raises((ProcessError, UserError), match="must be from 1 to 100"):
            pipes.shared(family).prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))


def test_grids_follow_the_shape() -> None:
    assert grids(1, 2) in (((1, 1), (1, 2), (2, 1)), ((1, 1), (2, 1), (1, 2)))
    assert best_grid((1000, 500), grids(1, 6), 448) == (2, 1)
    assert best_grid((500, 1500), grids(1, 6), 448) == (1, 3)


@pytest.mark.parametrize(
    "text",
    [
        "What is in this image? 2026-11-25",
        "PC-BIOS-2.0 and https://example.org/a",
        "Consciousness (see No. 1)",
        "HELLO",
    ],
)
def test_ordinary_text_is_no_formula(text: str) -> None:
    assert first_formula(text) is None


@pytest.mark.parametrize("text", ["C1=CC=C(C=C1)C=O", "MKTAYIAKQRQISFVKSHFSRQLEERLGL", "<SMILES>C</SMILES>"])
def test_formulas_are_found(text: str) -> None:
    assert first_formula(f"Describe {text} please") is not None


@pytest.mark.parametrize("unit", ["[", "[c", "c[", "(]", "xCCCCCCCCCCCCx ", "ccccccccc::", "[a]a["])
def test_long_texts_are_searched_in_linear_time(unit: str) -> None:
    begin = time.perf_counter()
    first_formula(unit * (500_000 // len(unit)))
    # Measured: up to 0.3 s; quadratic search takes minutes.
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize("family", [*FAMILIES, "interns1"])
def test_a_disabled_tower_is_not_loaded(family: str) -> None:
    limits = {"image": 0, "video": 0} if family == "interns1" else {"image": 0}
    options: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 32, "limit_mm_per_prompt": limits}
    with LLM(str(tiny.checkpoint(family)), **options) as llm:
        (output,) = llm.generate(["Hi!"], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
