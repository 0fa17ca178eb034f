"""Kimi-K2 is read as the DeepSeek-V3 that it is; a plan counts latents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.checkpoint.info import read_info
from beheld.cli.main import main
from beheld.core.config import EngineArgs
from tests import tiny
from tests.oracle import cases, reference

# The sizes of moonshotai/Kimi-K2-Instruct's attention.
KIMI = {
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 64,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def changed(folder: Path, **entries: Any) -> Path:
    copied = folder / "copied"
    shutil.copytree(tiny.checkpoint("deepseek_v3"), copied)
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    (copied / "config.json").write_text(json.dumps(config | entries), encoding="utf-8")
    return copied


def test_kimi_k2_answers_as_the_same_weights_do(tmp_path: Path) -> None:
    entries = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    folder, wanted = changed(tmp_path, **entries), reference.answer("deepseek_v3", cases.LONG)
    with LLM(model=str(folder), dtype="float32", max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=len(wanted.token_ids), ignore_eos=True)
        (output,) = llm.generate(cases.LONG.prompt("deepseek_v3"), params, use_tqdm=False)
    assert tuple(output.prompt_token_ids) == wanted.prompt_ids
    assert tuple(output.outputs[0].token_ids) == wanted.token_ids


def test_a_position_takes_576_numbers_of_each_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed(tmp_path, model_type="kimi_k2", **KIMI)
    (folder / "model.safetensors").unlink()
    (group,) = read_info(folder, EngineArgs()).kv_groups
    assert (group.kind, group.num_kv_heads, group.head_dim, group.value_dim) == ("latent", 1, 576, 512)
    assert main(["plan", str(folder)]) == 0
    out = capsys.readouterr().out
    # In bfloat16, or in float32 where that is computed.
    assert any(f"{61 * 576 * size / 2**10:.1f} KiB a token" in out for size in (2, 4))
