"""Products of 4-bit weights on a GPU against the dequantized weights, and a model with them against its graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.quant import int4_gpu
from beheld.quant.grouped import affine
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


LARGE = 3584, 1792, 128, torch.bfloat16
SMALL = [
    (48, 256, 32, torch.bfloat16),
    (160, 5120, 64, torch.float16),
    (80, 160, 32, torch.float16),
    (34048, 256, 128, torch.bfloat16),
    (48, 256, 64, torch.float32),
]


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group", "dtype"),
    [(rows, *LARGE) for rows in (1, 5, 16, 30, 64, 100, 600)] + [(rows, *each) for each in SMALL for rows in (1, 20)],
)
@pytest.mark.parametrize("centered", [True, False])
def test_products(rows: int, outputs: int, inputs: int, group: int, dtype: torch.dtype, centered: bool) -> None:
    torch.manual_seed(rows)
    whole = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    scale = torch.rand(outputs, inputs // group, device="cuda").add_(0.1).half()
    zeros = 8 if centered else torch.randint(0, 16, scale.shape, device="cuda")
    order = torch.randperm(inputs, device="cuda") if centered else None
    numbers = affine(whole, zeros, scale, 4, order)
    layer = int4_gpu.Int4GPULinear(numbers, torch.randn(outputs, device="cuda").to(dtype), dtype)
    assert (layer.low_GN is None) == centered
    x = torch.randn(rows, inputs, device="cuda").to(dtype)
    assert layer.bias is not None
    want = x.double() @ layer.numbers.dequantized().double().t() + layer.bias.double()
    found = layer(x)
    error = (found.double() - want).norm() / want.norm()
    # Rounding of the result; with many rows the weights' too, where the type has as few bits as theirs.
    assert error < {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}[dtype]
    assert torch.equal(layer(x), found)
    if rows == 1:
        residual = torch.randn(outputs, device="cuda").to(dtype)
        assert torch.equal(layer.added(x[0], residual), found[0] + residual)


def test_a_model_answers_alike_with_graphs_and_without() -> None:
    found = []
    options: dict[str, Any] = {"quantization": "int4", "max_model_len": 256, "kv_cache_memory_bytes": 2**28}
    for eager in (True, False):
        with LLM(str(tiny.checkpoint("qwen2")), dtype="bfloat16", enforce_eager=eager, **options) as llm:
            prompts = [{"prompt_token_ids": [5 + n % 80 for n in range(count)]} for count in (3, 40)]
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
