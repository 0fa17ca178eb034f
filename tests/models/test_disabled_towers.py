"""Kinds of media that are switched off cost nothing: their towers are not loaded, and text is answered as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from beheld import LLM, EngineArgs
from beheld.core.errors import LimitError
from beheld.engine.setup import describe
from beheld.families import page, registry
from beheld.models import disabled_towers
from beheld.models.surgery.parts import text_model
from tests import tiny
from tests.inputs import pipes
from tests.oracle import cases
from tests.oracle.test_oracle import check, make, request

TAKES = {row.name: row.modalities for row in page.tested() if row.modalities and row.name in tiny.TINY}
# What goes is at least this much of what is not the text model; less where text needs some of that too.
LEAST = {"gemma3n": 0.5}
# Their text models hold the towers, or are half of what reads text: at least this much of the whole goes.
NESTED = {"chameleon": 0.3, "florence2": 0.1, "molmo": 0.1, "phi3_v": 0.1, "phi4_mm": 0.3}
NESTED |= {"qwen_vl": 0.1, "qwen_vl_chat": 0.1, "glm4v_9b": 0.1}


def model_of(llm: LLM) -> Any:
    return llm._live().core.executor.runner._adapter.model  # type: ignore[attr-defined]


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def made(family: str, limits: dict[str, int]) -> Any:
    """The family's model without memory."""
    package = pipes.info(family).family
    config_class = registry.own_class(package, "config") or transformers.AutoConfig
    config = config_class.from_pretrained(tiny.checkpoint(family))
    config = getattr(config, "thinker_config", config)
    known = next(row for row in page.tested() if row.name == family)
    plain = registry.own_class(package, "model") or getattr(transformers, known.architecture)
    model_class = disabled_towers.without(plain, registry.model(package).towers, limits)
    with torch.device("meta"):
        return model_class._from_config(config)


@pytest.mark.parametrize("family", [family for family in TAKES if family != "mantis"])
def test_every_family_leaves_out_what_only_media_need(family: str) -> None:
    whole, without = made(family, {}), made(family, dict.fromkeys(TAKES[family], 0))
    saved = count(whole) - count(without)
    if family in NESTED:
        assert saved > NESTED[family] * count(whole)
        return
    media = count(whole) - count(text_model(whole)) - count(whole.get_output_embeddings())
    assert saved > LEAST.get(family, 0.9) * media
    assert count(text_model(without)) == count(text_model(whole))


@pytest.mark.parametrize("family", [family for family, takes in TAKES.items() if set(takes) == {"image", "video"}])
def test_a_tower_stays_while_anything_needs_it(family: str) -> None:
    assert made(family, {"image": 0, "video": 1}).left_out == ()
    assert made(family, {"image": 1, "video": 0}).left_out == ()


@pytest.mark.parametrize(
    "family",
    [
        *("llava", "blip2", "llama4", "mllama", "molmo", "phi3_v", "qwen2_audio", "phi4_mm", "glm4v_moe_fp8"),
        *("qwen_vl", "deepseek_ocr"),
    ],
)
def test_text_is_answered_without_towers(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with make(family, cases.ROOMY | {"limit_mm_per_prompt": dict.fromkeys(TAKES[family], 0)}) as llm:
        assert any(isinstance(module, disabled_towers.DisabledTower) for module in model_of(llm).modules())
        assert "weights of the checkpoint are unused" not in caplog.text
        check(llm, family, cases.fit(family, cases.SHORT, cases.LONG))
        ask, kind = (cases.HEARD, "audio") if family == "qwen2_audio" else (cases.ONE, "image")
        with pytest.raises(LimitError, match=f"The modality {kind} is switched off"):
            llm.generate(request(family, ask), use_tqdm=False)


@pytest.mark.parametrize("family", ["qwen2_5_omni", "gemma3n"])
def test_pictures_are_seen_without_ears_and_sounds_heard_without_eyes(family: str) -> None:
    others = dict.fromkeys(set(TAKES[family]) - {"audio"}, 0)
    with make(family, cases.ROOMY | {"limit_mm_per_prompt": {"audio": 0}}) as llm:
        (ears,) = model_of(llm).left_out
        assert ears.endswith("audio_tower")
        check(llm, family, cases.fit(family, cases.ONE, cases.SHORT))
    with make(family, cases.ROOMY | {"limit_mm_per_prompt": others}) as llm:
        (eyes,) = model_of(llm).left_out
        assert not eyes.endswith("audio_tower")
        check(llm, family, cases.fit(family, cases.HEARD, cases.SHORT))


def test_random_weights_and_sizes_leave_towers_out_too() -> None:
    path = str(tiny.checkpoint("llava"))
    off = {"limit_mm_per_prompt": {"image": 0}}
    with LLM(path, dtype="float32", load_format="dummy", disable_log_stats=True, **off) as llm:  # type: ignore[arg-type]
        left_out = model_of(llm).left_out
    assert left_out == ("model.multi_modal_projector", "model.vision_tower")
    whole, without = (describe(EngineArgs(path, **more))[2]["weights_bytes"] for more in ({}, off))  # type: ignore[arg-type]
    assert without < 0.9 * whole


def test_tower_weights_are_not_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny.checkpoint("llava")
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = {name: weight for file in source.glob("*.safetensors") for name, weight in load_file(file).items()}
    text = {name: weight for name, weight in weights.items() if "language_model" in name or "lm_head" in name}
    assert len(text) < len(weights)
    save_file(text, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(tmp_path), dtype="float32", limit_mm_per_prompt={"image": 0}, disable_log_stats=True) as llm:
        check(llm, "llava", [cases.SHORT])
