"""Products of 4-bit weights on a GPU beside the dequantized weights, and a model with them beside its graphs."""

from __future__ import annotations

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.quant import int4_gpu
from beheld.quant.grouped import rounded
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("rows", [1, 5, 16, 40, 64, 200, 600])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(48, 256, 32), (3584, 1792, 128), (160, 5120, 64)])
def test_products(rows: int, outputs: int, inputs: int, group: int) -> None:
    torch.manual_seed(rows)
    numbers = rounded(torch.randn(outputs, inputs, device="cuda"), 4, group)
    layer = int4_gpu.Int4GPULinear(numbers, torch.randn(outputs, device="cuda").bfloat16(), torch.bfloat16)
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    assert layer.bias is not None
    want = x.float() @ layer.numbers.dequantized().t() + layer.bias.float()
    error = (layer(x).float() - want).norm() / want.norm()
    # Rounding of the result; with many rows the weights' too.
    assert error < 4e-3
    assert torch.equal(layer(x), layer(x))


def test_a_model_answers_alike_with_graphs_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_INT4_ON_GPU", "1")
    found = []
    for eager in (True, False):
        with LLM(
            str(tiny.checkpoint("qwen2")), dtype="bfloat16", quantization="int4", enforce_eager=eager, max_model_len=256
        ) as llm:
            prompts = [{"prompt_token_ids": [5 + n % 80 for n in range(count)]} for count in (3, 40)]
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
