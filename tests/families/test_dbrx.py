"""DBRX's rotary base is the one that its published configuration states, within its attention's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DbrxConfig, DbrxForCausalLM

from beheld import LLM, SamplingParams
from beheld.checkpoint.convert import converted
from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.models.surgery.parts import text_part
from beheld.models.write_quantized import choose
from beheld.quant.at_load import RoundedAtLoad
from beheld.quant.float8_at_load import Float8Rounding
from tests import census

BASE = 500000.0
PROMPT = list(range(5, 45))


def answer(folder: Path) -> list[int]:
    with LLM(str(folder), dtype="float32", max_model_len=64, max_num_seqs=2) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return list(output.outputs[0].token_ids)


def theirs(folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    out = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, pad_token_id=0)
    return out[0, len(PROMPT) :].tolist()


def written(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    for name in ("rope_parameters", "rope_theta"):
        content.pop(name, None)
    file.write_text(json.dumps(content | entries), encoding="utf-8")


def test_the_base_is_the_published_one(tmp_path: Path) -> None:
    census.make("dbrx", tmp_path)
    written(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": BASE})
    stated = theirs(tmp_path)
    assert answer(tmp_path) == stated
    written(tmp_path)
    # transformers does not find it, and turns by 10,000.
    assert theirs(tmp_path) != stated
    assert answer(tmp_path) == stated


@pytest.mark.parametrize(("entries", "base"), [({}, BASE), ({"rope_theta": 20000.0}, 20000.0)])
def test_a_base_at_the_top_goes_before_it(entries: dict[str, Any], base: float, tmp_path: Path) -> None:
    census.make("dbrx", tmp_path)
    written(tmp_path, **entries)
    config: Any = read_config(tmp_path, EngineArgs())
    assert config.rope_parameters["rope_theta"] == base


@pytest.mark.parametrize("settings", [[1], "x", 3])
def test_settings_of_another_kind_are_refused_by_name(settings: Any) -> None:
    with pytest.raises(ModelError, match="of the type 'dbrx', but cannot be read as one"):
        converted({"model_type": "dbrx", "attn_config": settings})


def published_like() -> DbrxForCausalLM:
    """A small model with as many experts as are published: its router's layer is as large as others."""
    settings = census.PECULIAR["dbrx"]
    config = DbrxConfig(
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        vocab_size=512,
        attn_config=settings["attn_config"],
        ffn_config=settings["ffn_config"] | {"moe_num_experts": 16, "moe_top_k": 4},
    )
    return DbrxForCausalLM(config).eval()


def test_rounded_weights_leave_the_router_and_the_log_names_what_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = published_like()
    rounded: list[str] = []
    names = {module: name for name, module in model.named_modules()}
    method = RoundedAtLoad(Float8Rounding(), torch.float32)

    def replace(parent: Any, name: str, made: Any, _: Any) -> None:
        rounded.append(f"{names[parent]}.{name}")
        setattr(parent, name, made)

    with caplog.at_level("WARNING", logger="beheld.quant.at_load"):
        method.settle(model, type(model), text_part, replace)
    assert len(rounded) == 2 * 2
    assert not any("router" in name for name in rounded)
    assert "6 weights of the text model's experts" in caplog.text


def test_a_written_checkpoint_leaves_the_router(tmp_path: Path) -> None:
    published_like().save_pretrained(tmp_path)
    config = read_config(tmp_path, EngineArgs())
    made = choose(read_info(tmp_path, EngineArgs(), config), config, "int8")
    assert len(made.rounded) == 2 * 2
    assert not any("router" in name for name in made.rounded)
