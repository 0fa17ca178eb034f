"""Linear layers of one row on a GPU: right for every size, and in chains of kernels that start early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.models.load import load_model
from beheld.models.one_row import OneRowLinear, linear
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.linears import replace_linears
from beheld.models.surgery.one_row_layer import OneRowLayer, one_row_layers, probed
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from tests import tiny


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 7), (2560, 2048), (2048, 11008), (3000, 1000), (151936, 256)])
def test_equals_float64(outputs: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(outputs, device="cuda", dtype=torch.bfloat16) if bias else None
    want = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    got = linear(x, weight, b)
    assert got.shape == (1, 1, outputs)
    assert (got.double() - want).norm() <= 3e-3 * want.norm()


def test_a_weight_that_is_a_strided_view() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 300, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(300, 200, device="cuda", dtype=torch.bfloat16).t()
    want = torch.nn.functional.linear(x.double(), weight.double())
    assert (linear(x, weight, None).double() - want).norm() <= 3e-3 * want.norm()


def check_in_a_graph(chain: Callable[[], torch.Tensor], want: torch.Tensor) -> None:
    """Replayed again and again, where kernels follow each other as fast as they can, it gives the same."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)


def test_a_long_chain_in_a_graph() -> None:
    """Each layer reads what the one before wrote: a kernel that read too early would show."""
    torch.manual_seed(0)
    weights = [torch.randn(1536, 1536, device="cuda", dtype=torch.bfloat16) / 1536**0.5 for _ in range(64)]
    x = torch.randn(1, 1536, device="cuda", dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        y = x
        for index, weight in enumerate(weights):
            y = linear(y, weight, None)
            if index % 3 == 0:
                y = y * 1.5
        return y

    want = chain()
    torch.cuda.synchronize()
    check_in_a_graph(chain, want)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3_text", "molmo2", "phi4_mm"])
def test_layers_by_our_kernels_are_the_originals(family: str) -> None:
    """In a chain whose kernels all begin as early as they can, each finds what all before it have written."""
    if family not in tiny.TINY:
        pytest.skip(f"this version of transformers does not define {family}")
    config = EngineArgs(model=str(tiny.checkpoint(family)), dtype="bfloat16", device="cuda")
    resolved = resolve_and_decide(config)
    surgery = load_model(resolved.hf_config, resolved.info, resolved.config)
    text = text_model(surgery.target.model)
    fuse_linears(text, Changes())
    replace_linears(text, OneRowLinear, torch.bfloat16, Changes())
    # Each is compared with the original as it is found.
    found = one_row_layers(text, OneRowLayer)
    assert len(found) == len(text.layers)
    layers = [found[layer] for layer in text.layers]
    for layer in layers:
        layer.attend = lambda number, q, k, v, window, scale, softcap: probed(q, k, v, scale)
    x = torch.randn(1, 1, text.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(1, 1, layers[0].turned, device="cuda")
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def chain() -> torch.Tensor:
        y = x
        for layer in layers * 8:
            y = layer(y, (cos, sin))
        return y

    with torch.inference_mode():
        want = x
        for layer in layers * 8:
            want = layer(want, (cos, sin))
            torch.cuda.synchronize()
        check_in_a_graph(chain, want)
