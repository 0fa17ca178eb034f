"""Positions of several axes where config.json leaves their sections to the class, or says them in an older place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.checkpoint import info as info_of
from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.cases import Ask
from tests.oracle.test_oracle import request

SECTIONS = ("mrope_section", "xdrope_section")
# Pictures of several rows, so that no two axes are alike.
ASK = Ask("Before {i} and behind it.", ((112, 84, 3),), max_tokens=6)


def parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The configuration and those within it."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from parts(value)


def without_sections(config: dict[str, Any]) -> dict[str, Any]:
    """The same without the entry, in a shape that fits the class's own sections: one head of 128 (GLM-OCR: 64)."""
    width = 64 if config["model_type"] == "glm_ocr" else 128
    config = json.loads(json.dumps(config))
    for part in parts(config):
        for name in SECTIONS:
            part.pop(name, None)
        if part.get("vocab_size") == tiny.VOCAB:
            part |= {"hidden_size": width, "num_attention_heads": 1, "num_key_value_heads": 1}
            part |= {"head_dim": width} if "head_dim" in part else {}
        # What a tower gives: Qwen2-VL's names its own width differently.
        for name in ("out_hidden_size", "output_dim", *(("hidden_size",) if "embed_dim" in part else ())):
            if name in part:
                part[name] = width
    return config


def named(family: str) -> bool:
    """Whether the family's tiny configuration names sections."""
    config = json.loads((tiny.checkpoint(family) / "config.json").read_text(encoding="utf-8"))
    return any(name in part for part in parts(config) for name in SECTIONS)


MULTI_AXIS = tuple(family for family in tiny.MEDIA_FAMILIES if named(family))
# The configuration classes of HunYuan and PaddleOCR have no sections; the FP8 checkpoint is GLM-4.5V's again.
WITHOUT_SECTIONS = {
    "hunyuan_vl": "positions 3 axes, but its model has 1",
    "paddleocr_vl": "positions 1 axes, but its model has 3",
}
LEFT_TO_THE_CLASS = tuple(family for family in MULTI_AXIS if family not in (*WITHOUT_SECTIONS, "glm4v_moe_fp8"))


def engine(folder: Path) -> LLM:
    return LLM(model=str(folder), dtype="float32", seed=0, disable_log_stats=True, **cases.ROOMY)


def same(llm: LLM, family: str, folder: Path, ask: Ask) -> None:
    """transformers' tokens and log-probabilities, from the checkpoint in `folder`."""
    expected = reference.answered(
        reference.load_model(family, folder), reference.inputs(family, ask), max_tokens=ask.max_tokens
    )
    params = SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True, logprobs=1)
    (output,) = llm.generate([request(family, ask)], params, use_tqdm=False)
    got = output.outputs[0]
    assert tuple(got.token_ids) == expected.token_ids
    said = [step[token].logprob for step, token in zip(got.logprobs, got.token_ids, strict=True)]
    assert said == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("family", LEFT_TO_THE_CLASS)
def test_sections_that_are_left_to_the_class(family: str, tmp_path: Path) -> None:
    folder = tiny.reshaped(family, tmp_path / family, without_sections)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert not any(name in part for part in parts(written) for name in SECTIONS)
    with engine(folder) as llm:
        same(llm, family, folder, ASK)


@pytest.mark.parametrize("family", [family for family in MULTI_AXIS if family in tiny.VIDEO_FAMILIES])
def test_answers_go_on_behind_the_prompt_not_behind_the_end_of_a_long_video(family: str) -> None:
    """In some models a long video's last frames stand behind the text that follows it."""
    ask = Ask("{v}What?", videos=(cases.Clip(40, 49, fps=0.5),), max_tokens=9)
    room = cases.ROOMY | {"max_model_len": 4096, "max_num_batched_tokens": 4096}
    with LLM(model=str(tiny.checkpoint(family)), dtype="float32", seed=0, disable_log_stats=True, **room) as llm:
        same(llm, family, tiny.plain(family), ask)


@pytest.mark.parametrize("name", ["roomy", "cut"])
@pytest.mark.parametrize("family", tiny.THINKERS)
def test_frames_whose_times_are_no_whole_positions(family: str, name: str) -> None:
    """Qwen3-Omni reckons with fractions of a position, of the frames and of all that follows them."""
    ask = Ask("{v}{i}Where to?", ((84, 56, 1),), (cases.Clip(6, 5, fps=0.7),), max_tokens=9)
    room = cases.options(family, name)
    with LLM(model=str(tiny.checkpoint(family)), dtype="float32", seed=0, disable_log_stats=True, **room) as llm:
        same(llm, family, tiny.plain(family), ask)
        same(llm, family, tiny.plain(family), cases.SHORT)


def test_every_family_of_several_axes_is_here() -> None:
    def axes(family: str) -> int:
        return read_info(tiny.checkpoint(family), EngineArgs()).position_axes

    assert {family for family in tiny.TINY if axes(family) > 1} == set(MULTI_AXIS)


@pytest.mark.parametrize("family", WITHOUT_SECTIONS)
def test_a_class_without_sections_of_its_own_is_refused(family: str, tmp_path: Path) -> None:
    folder = tiny.reshaped(family, tmp_path / family, without_sections)
    with pytest.raises(ModelError, match=WITHOUT_SECTIONS[family]):
        engine(folder)


def test_axes_that_the_model_does_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read of a configuration, the loaded model is asked too."""
    monkeypatch.setattr(info_of, "_axes", lambda text: 1)
    with pytest.raises(ModelError, match="positions 1 axes, but its model has 3"):
        engine(tiny.checkpoint("qwen3_vl"))


def flat(folder: Path, family: str) -> dict[str, Any]:
    """Lay the family's tiny checkpoint in `folder` with the text's settings at the top; that configuration."""
    folder.mkdir()
    source = tiny.checkpoint(family)
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = config.pop("text_config")
    del text["model_type"]
    (folder / "config.json").write_text(json.dumps(text | config), encoding="utf-8")
    return text | config


def test_a_flat_glm_is_read_as_it_was_first_published(tmp_path: Path) -> None:
    flat(tmp_path / "glm4v", "glm4v")
    native, found = (
        read_config(folder, EngineArgs()).to_dict() for folder in (tiny.checkpoint("glm4v"), tmp_path / "glm4v")
    )
    for config in (native, found):
        config.pop("_name_or_path", None)
        for name in ("architectures", "dtype"):
            config["text_config"].pop(name, None)
    assert found == native
    with engine(tmp_path / "glm4v") as llm:
        same(llm, "glm4v", tiny.checkpoint("glm4v"), ASK)


@pytest.mark.parametrize("family", ["glm46v", "llava"])
def test_sizes_that_a_class_would_not_read_are_refused(family: str, tmp_path: Path) -> None:
    flat(tmp_path / family, family)
    with pytest.raises(ModelError, match=r"config.json says hidden_size 64 at its top"):
        read_info(tmp_path / family, EngineArgs())
