"""A plan tells the bytes of recurrent states, for the sizes of real models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import MambaConfig

from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.tools.plan import STEP_BYTES
from tests import tiny

# The sizes of Qwen/Qwen3.5-4B's mixers: 24 of 32 layers have them.
MIXERS = {
    "hidden_size": 2560,
    "layer_types": [*(["linear_attention"] * 3), "full_attention"] * 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_hidden_layers": 32,
}


def test_a_sequence_keeps_a_matrix_a_head_and_three_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "qwen3_5"
    shutil.copytree(tiny.checkpoint("qwen3_5"), folder)
    (folder / "model.safetensors").unlink()
    content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    content["text_config"] |= MIXERS
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    assert main(["plan", str(folder)]) == 0
    out = capsys.readouterr().out
    # Matrices are kept in float32; inputs in bfloat16, or in float32 where that is computed.
    matrices, inputs = 32 * 128 * 128 * 4, 3 * (2 * 16 * 128 + 32 * 128)
    told = [f"recurrent state   {24 * (matrices + inputs * size) / 2**20:8.1f} MiB a sequence" for size in (2, 4)]
    assert told[0] != told[1]
    assert any(each in out for each in told), out


def test_room_is_told_in_sequences_where_tokens_take_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mamba"
    shutil.copytree(tiny.checkpoint("qwen2"), folder)
    (folder / "model.safetensors").unlink()
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    MambaConfig(vocab_size=vocabulary, num_hidden_layers=48, architectures=["MambaForCausalLM"]).save_pretrained(folder)
    assert main(["plan", str(folder), "--gpus", "1x24GiB", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    left = int(24 * 2**30 * EngineArgs(model="").gpu_memory_utilization) - model["weights_bytes"] - STEP_BYTES
    assert model["kv_sequences"] == left // model["state_bytes_per_sequence"]
    assert "kv_tokens" not in model
    assert main(["plan", str(folder), "--gpus", "1x24GiB"]) == 0
    assert f"room for          {model['kv_sequences']:8d} sequences on 24 GiB" in capsys.readouterr().out
    assert main(["plan", str(folder), "--gpus", "1x3GiB"]) == 0
    assert "the model does not fit" in capsys.readouterr().out
