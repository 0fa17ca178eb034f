"""What `beheld plan` says of how fast GPUs may be, against what was measured (docs/explanation/several-gpus.md)."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Llama4TextConfig, Qwen3MoeConfig

from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.models import token_cost
from beheld.tools.plan import plan
from benchmarks import shapes
from tests import tiny

GIB = 1 << 30
MEMORY = {"H100": 80 * GIB, "H200": 141 * GIB}


@functools.cache
def folder(size: str) -> Path:
    return shapes.checkpoint(size, Path(tempfile.mkdtemp(dir=tiny.checkpoint("qwen2").parent)))


def planned(size: str, gpu: str, ranks: int, gpus: int | None = None, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "gpu_memory_utilization": 0.97} | more
    args = EngineArgs(model=str(folder(size)), **options)
    model: dict[str, Any] = plan(args, [], ranks, MEMORY[gpu], 1, gpus or ranks)["model"]
    return model


# Shape, GPU, how many, milliseconds for each next token, prefill in tokens/s.
MEASURED = [
    ("7B", "H100", 1, 5.09, 47_700),
    ("7B", "H100", 2, 3.32, 79_400),
    ("32B", "H100", 1, 21.9, 10_100),
    ("32B", "H100", 2, 12.7, 18_100),
    ("32B", "H200", 1, 16.4, 10_100),
    ("32B", "H200", 2, 9.95, 18_000),
]


@pytest.mark.parametrize(("size", "gpu", "ranks", "milliseconds", "tokens"), MEASURED)
def test_what_was_measured_is_what_a_plan_expects(
    size: str, gpu: str, ranks: int, milliseconds: float, tokens: float
) -> None:
    made = planned(size, gpu, ranks)
    assert made["expected_next_token_ms"] == pytest.approx(milliseconds, rel=0.03)
    assert made["expected_prefill_tokens_per_s"] == pytest.approx(tokens, rel=0.025)


def test_a_shape_that_calibrates_nothing_is_within_a_tenth() -> None:
    assert planned("3B", "H100", 1)["expected_next_token_ms"] == pytest.approx(2.62, rel=0.1)


@pytest.mark.parametrize(("ranks", "milliseconds", "tokens"), [(1, 1.53, 214_000), (2, 1.34, 260_000)])
def test_experts_take_longer_than_their_bytes(ranks: int, milliseconds: float, tokens: float) -> None:
    """So a plan says "at best"."""
    made = planned("30B-A3B-12", "H100", ranks)
    assert made["experts"]
    assert made["expected_next_token_ms"] < milliseconds
    assert made["expected_prefill_tokens_per_s"] > tokens


def test_engines_side_by_side_share_nothing() -> None:
    one, many = planned("7B", "H100", 8), planned("7B", "H100", 8, gpus=512)
    assert many["engines"] == 64
    assert many["expected_prefill_tokens_per_s"] == pytest.approx(64 * one["expected_prefill_tokens_per_s"])
    assert many["expected_next_token_ms"] == one["expected_next_token_ms"]


@pytest.mark.parametrize(
    ("gpus", "words"), [("2xH200", "expected of H200s"), ("2x141GiB", "expected of H200s"), ("2x96GiB", None)]
)
def test_the_command_tells_where_figures_calibrate_it(
    gpus: str, words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder("7B")), "--tp", "2", "--gpus", gpus]) == 0
    said = capsys.readouterr().out
    assert "room for" in said
    assert ("next token" in said) == (words is not None)
    assert words is None or f"2.78 ms of one request, {words}" in said


@pytest.mark.parametrize("config", [GptOssConfig, Llama4TextConfig, Qwen3MoeConfig])
def test_experts_of_any_form_are_read_as_far_as_they_are_chosen(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, or computed in one product, too; a configuration that does not say how many tells no cost."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
    sizes |= {"intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    made = config(num_local_experts=16, num_experts=16, num_experts_per_tok=2, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    layer = {name: weight.numel() for name, weight in model.model.layers[0].named_parameters()}
    experts = sum(count for name, count in layer.items() if ".experts." in name)
    assert experts >= 16 * 3 * 64 * 128
    cost = token_cost.token_cost(model)
    assert cost is not None
    assert cost.experts
    assert cost.products == sum(layer.values()) - experts * 14 // 16
    monkeypatch.setattr(token_cost, "_CHOSEN", ())
    assert token_cost.token_cost(model) is None


@pytest.mark.parametrize("gpus", [f"1x{'9' * 400}GiB", f"{'9' * 400}xH100", "8xA100", "xH100"])
def test_gpus_of_no_known_form_are_refused_in_words(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No float holds some of them."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(folder("7B")), "--gpus", gpus])
    assert ended.value.code == 2
    assert "not of the form 2x80GiB or 2xH100" in capsys.readouterr().err


def test_stages_and_weights_of_few_bits_have_no_speeds() -> None:
    args = EngineArgs(model=str(folder("7B")), load_format="dummy", dtype="bfloat16")
    assert "expected_of" not in plan(args, [], 1, MEMORY["H100"], 2, 2)["model"]
    assert "expected_of" not in planned("7B", "H100", 1, quantization="fp8")
