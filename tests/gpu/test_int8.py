"""int8 weights on a GPU: each kernel has the bits that whole numbers give, alone and in any batch; a model."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs an NVIDIA GPU of compute capability 8.0 or later", allow_module_level=True)

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from beheld import LLM, SamplingParams
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.operation import Changes
from beheld.platform.registry import platform_of
from beheld.quant import int8_kernel, int8_row_kernel
from beheld.quant.int8 import rounded_weight
from beheld.quant.int8_gpu import Int8GPULinear, rounded_rows
from beheld.quant.int8_kernel import FewTiles, ManyTiles
from beheld.quant.int8_row_kernel import RowTiles
from tests import tiny
from tests.quant import stored_forms
from tests.quant.test_compressed_tensors import load
from tests.quant.test_int8_gpu import with_activations

FACTS = platform_of("cuda").kernel_facts(torch.device("cuda"))


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_INT8_ON_GPU", "1")


def numbers(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(sizes, generator=made, device="cuda").to(dtype)


def layer(
    outputs: int, inputs: int, *, bias: bool = False, seed: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Int8GPULinear:
    rows, scale = rounded_weight(numbers(outputs, inputs, seed=seed) / inputs**0.5)
    return Int8GPULinear(rows, scale, numbers(outputs, seed=seed + 1, dtype=dtype) if bias else None, dtype)


def meant(x: Tensor, linear: Int8GPULinear) -> Tensor:
    """The product of the rounded numbers: exact sums, scaled in float32."""
    rows, step = rounded_rows(x)
    y = (rows.double() @ linear.rows_NK.double().t()).float() * step.unsqueeze(1) * linear.scale_N
    return (y if linear.bias is None else y + linear.bias.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (7, 1408), (3, 10944), (300, 4096), (1, 16384)])
def test_rows_are_those_of_a_cpu(rows: int, inputs: int, dtype: torch.dtype) -> None:
    x = numbers(rows, inputs + 8, dtype=dtype)[:, :inputs]
    x[rows // 2] *= rows > 1
    got, step = rounded_rows(x)
    want, want_step = rounded_rows(x.cpu())
    assert torch.equal(step.cpu(), want_step)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("rows", [3, 100])
def test_what_is_no_number_stays_none(rows: int) -> None:
    x = numbers(rows, 64)
    x[1, 4] = float("nan")
    y = layer(32, 64)(x)
    assert y[1].isnan().all()
    assert y[::2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 65, 300, 2048])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (4608, 3584), (2816, 4096), (3584, 18944), (48, 208)])
def test_a_linear_layer_has_the_bits_of_whole_numbers(
    rows: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    linear = layer(outputs, inputs, bias=bias, dtype=dtype)
    x = numbers(1, rows, inputs, seed=3, dtype=dtype)
    got = linear(x)
    assert got.shape == (1, rows, outputs)
    assert torch.equal(got[0], meant(x[0], linear))


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    linear, x = layer(4608, 3584, bias=True), numbers(1030, 3584)
    whole = linear(x)
    for rows in (1, 2, 16, 40, 64, 65, 128, 500):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
    assert torch.equal(linear(x[-1]), whole[-1])
    residual = numbers(4608, seed=9)
    assert torch.equal(linear.added(x[5], residual), residual + whole[5])


def test_weights_of_a_product_may_be_minus_128() -> None:
    """And the largest sums: of so many inputs that one more thousand would not fit."""
    rows = torch.full((64, 131072), -128, dtype=torch.int8, device="cuda")
    linear = Int8GPULinear(rows, torch.ones(64, device="cuda"), None, torch.bfloat16)
    for count in (1, 3, 70):
        x = torch.full((count, 131072), -2.0, dtype=torch.bfloat16, device="cuda")
        assert torch.equal(linear(x), meant(x, linear)), count
        assert bool((linear(x) > 3e7).all())


@pytest.mark.parametrize("tiles", [RowTiles(16, 128, 4), RowTiles(8, 256, 4), RowTiles(8, 512, 8), RowTiles(4, 512, 4)])
@pytest.mark.parametrize("early", [False, True])
def test_tilings_of_one_row(tiles: RowTiles, early: bool) -> None:
    linear, x = layer(1024, 3600, bias=True), numbers(1, 3600)
    rounded, step = rounded_rows(x)
    y = torch.empty(1024, dtype=torch.bfloat16, device="cuda")
    early = early and FACTS.early_launch
    int8_row_kernel.row(
        rounded[0], step, linear.rows_NK, linear.scale_N, linear.bias, None, y, early=early, tiles=tiles
    )
    assert torch.equal(y, meant(x, linear)[0])


MANY: list[FewTiles | ManyTiles] = [ManyTiles(128, 128, 128, 8, 3), ManyTiles(128, 256, 128, 8, 3)]
if FACTS.copies_tiles:
    MANY += [
        ManyTiles(64, 256, 128, 4, 4, copied=True),
        ManyTiles(128, 128, 128, 4, 4, copied=True),
        ManyTiles(128, 256, 128, 8, 3, copied=True, programs=1),
        ManyTiles(256, 128, 128, 8, 3, copied=True, programs=1),
    ]
FEW: list[FewTiles | ManyTiles] = [
    FewTiles(64, 16, 128, 4, 5, 4),
    FewTiles(64, 64, 256, 4, 3, 3),
    FewTiles(128, 64, 128, 4, 4),
]


@pytest.mark.parametrize("tiles", MANY + FEW)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(300, 1040, 3600), (130, 2048, 512)])
def test_tilings(rows: int, outputs: int, inputs: int, tiles: FewTiles | ManyTiles) -> None:
    linear, x = layer(outputs, inputs, bias=True), numbers(rows, inputs)
    y = torch.empty(rows, outputs, dtype=torch.bfloat16, device="cuda")
    given = *rounded_rows(x), linear.rows_NK, linear.scale_N, linear.bias, y, FACTS.multiprocessors
    if isinstance(tiles, FewTiles):
        int8_kernel.few_rows(*given, tiles)
    else:
        int8_kernel.many_rows(*given, tiles)
    assert torch.equal(y, meant(x, linear))


def test_joined_layers() -> None:
    layers = [layer(n, 256, bias=True, seed=n) for n in (128, 32, 32)]
    parent = nn.Module()
    parent.q_proj, parent.k_proj, parent.v_proj = layers
    x = numbers(5, 256)
    want = [each(x) for each in layers]
    fuse_linears(parent, Changes())
    for name, y in zip(("q_proj", "k_proj", "v_proj"), want, strict=True):
        assert torch.equal(getattr(parent, name)(x), y), name


def test_in_graphs_and_compiled() -> None:
    linear, other = layer(256, 256, bias=True), layer(256, 256, seed=5)

    def step(x: Tensor) -> Tensor:
        return other(linear(x) * 1.5)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for rows in (5, 12):
            x = numbers(rows, 256)
            assert torch.equal(compiled(x), step(x))
        for rows in (1, 6, 100):
            x = numbers(rows, 256)
            step(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step(x)
            for seed in range(1, 4):
                x.copy_(numbers(rows, 256, seed=seed))
                graph.replay()
                assert torch.equal(out, step(x))


def answered(path: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Of each prompt, the tokens and the log-probabilities of the first one's rivals."""
    options = {"dtype": "bfloat16", "max_model_len": 256, "kv_cache_memory_bytes": 2**28, "seed": 0} | options
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=20)
    with LLM(str(path), **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def apart(mine: list[Any], its: list[Any]) -> float:
    """The mean difference of the log-probabilities that both name of the first tokens."""
    found = []
    for one, other in zip(mine, its, strict=True):
        known = {token: entry.logprob for token, entry in other.logprobs[0].items()}
        found += [abs(entry.logprob - known[token]) for token, entry in one.logprobs[0].items() if token in known]
    return sum(found) / len(found)


PROMPTS = [[5 + (7 * n + 3 * m) % 80 for n in range(m)] for m in (3, 40, 17, 100)]


@pytest.mark.parametrize("eager", [True, False])
def test_a_model_rounded_at_load(eager: bool) -> None:
    path = tiny.checkpoint("qwen2")
    rounded = answered(path, PROMPTS, quantization="int8", enforce_eager=eager)
    assert all(len(each.token_ids) == 6 for each in rounded)
    assert 0 < apart(rounded, answered(path, PROMPTS, enforce_eager=eager)) < 0.2


@pytest.mark.parametrize("family", ["qwen2", "glm4v_moe"])
def test_a_checkpoint_keeps_its_numbers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored_forms.write(tiny.checkpoint(family), tmp_path, *with_activations("W8A8"), "lm_head")
    model = load(tmp_path, "bfloat16", device="cuda")
    meant = dict(load(tmp_path / "plain", "float32", device="cpu").named_parameters())
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Int8GPULinear)}
    assert len(layers) >= 14
    assert all(torch.equal(each.dequantized().cpu(), meant[f"{name}.weight"]) for name, each in layers.items())
    del model, layers
    kept = answered(tmp_path, PROMPTS)
    monkeypatch.setenv("BEHELD_INT8_ON_GPU", "0")
    # Rounded activations move the log-probabilities of these random layers by 0.07 and 0.18 on a CPU, bfloat16 alone by
    # 0.04 and 0.08; those of another model by several.
    assert 0 < apart(kept, answered(tmp_path, PROMPTS)) < 0.4
