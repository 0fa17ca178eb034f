"""FP8 layers on a GPU: the numbers of a CPU's, in graphs, compiled, and in a whole model of half the memory."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs an NVIDIA GPU that multiplies FP8", allow_module_level=True)

from typing import Any

from torch import Tensor, nn

from beheld import LLM, SamplingParams
from beheld.models.one_row import OneRowFloat8Linear
from beheld.models.surgery.joined import fuse_linears
from beheld.models.surgery.operation import Changes
from beheld.platform.cpu import Cpu
from beheld.quant.float8 import Float8Experts, Float8Linear, rounded_rows
from tests import tiny
from tests.oracle import cases, reference
from tests.oracle.test_oracle import request
from tests.quant.test_compressed_tensors import load

FAMILY = "glm4v_moe_fp8"
# Of results in bfloat16, relative to all of them: eight bits, and sums of FP8 products that keep fourteen.
CLOSE = 4e-3


def numbers(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(sizes, generator=made, device="cuda").to(dtype)


def layer(outputs: int, inputs: int, *, bias: bool = False, seed: int = 1) -> Float8Linear:
    rows, scale = rounded_rows(numbers(outputs, inputs, seed=seed) / inputs**0.5)
    return Float8Linear(rows, scale, numbers(outputs, seed=seed + 1) if bias else None, torch.bfloat16)


def exact(x: Tensor, rows_NK: Tensor, scale_N: Tensor) -> Tensor:
    """The product of the rounded numbers in float64."""
    rows, scale = rounded_rows(x)
    return (rows.double() @ rows_NK.double().t()) * scale.double().unsqueeze(1) * scale_N.double()


@pytest.mark.parametrize(("outputs", "inputs"), [(2560, 2048), (64, 3584), (3584, 18944)])
def test_one_row_by_its_own_kernel(outputs: int, inputs: int) -> None:
    given = layer(outputs, inputs, bias=True)
    own = OneRowFloat8Linear.of(given)
    x = numbers(1, inputs, seed=9)
    want = given(x).float()
    size = float(want.abs().max())
    assert float((own(x).float() - want).abs().max()) < CLOSE * size
    residual = numbers(outputs, seed=10)
    assert float((own.added(x[0], residual).float() - residual - want[0]).abs().max()) < 2 * CLOSE * size
    assert torch.equal(own(numbers(3, inputs)), given(numbers(3, inputs)))


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got.double() - want.double()).norm() <= CLOSE * want.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (7, 1408), (3, 10944), (300, 4096), (2, 16384)])
def test_rows_are_those_of_a_cpu(rows: int, inputs: int, dtype: torch.dtype) -> None:
    x = numbers(rows, inputs + 8, dtype=dtype)[:, :inputs]
    x[rows // 2] = 0
    got, scale = rounded_rows(x)
    want, want_scale = rounded_rows(x.cpu())
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


def test_what_is_no_number_stays_none() -> None:
    x = numbers(3, 64)
    x[1, 4] = float("nan")
    y = layer(32, 64)(x)
    assert y[1].isnan().all()
    assert y[::2].isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 17, 300, 2048])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (4096, 12288), (2816, 4096)])
def test_a_linear_layer(rows: int, outputs: int, inputs: int, bias: bool) -> None:
    linear = layer(outputs, inputs, bias=bias)
    x = numbers(1, rows, inputs, seed=3)
    want = exact(x[0], linear.rows_NK, linear.scale_N)
    want = want if linear.bias is None else want + linear.bias.double()
    got = linear(x)
    assert got.shape == (1, rows, outputs)
    assert got.dtype == torch.bfloat16
    assert close(got[0], want)


def test_joined_layers() -> None:
    layers = [layer(n, 256, bias=True, seed=n) for n in (128, 32, 32)]
    parent = nn.Module()
    parent.q_proj, parent.k_proj, parent.v_proj = layers
    x = numbers(5, 256)
    want = [each(x) for each in layers]
    fuse_linears(parent, Changes())
    assert all(close(getattr(parent, name)(x), y) for name, y in zip(("q_proj", "k_proj", "v_proj"), want, strict=True))
    assert close(parent.k_proj(x[:2].clone()), want[1][:2])


class Gate(nn.Module):
    """What transformers' experts do between the two products."""

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


def experts_of(count: int, hidden: int, inner: int) -> Float8Experts:
    gate_up, down = (layer(count * n, k, seed=n) for n, k in ((2 * inner, hidden), (hidden, inner)))
    return Float8Experts(
        Gate(),
        (gate_up.rows_NK.data.view(count, 2 * inner, hidden), gate_up.scale_N.data.view(count, 2 * inner)),
        (down.rows_NK.data.view(count, hidden, inner), down.scale_N.data.view(count, hidden)),
    ).cuda()


def one_by_one(experts: Float8Experts, x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """All of it on a CPU, each expert by itself."""
    there = Float8Experts(
        Gate(),
        (experts.gate_up_rows.cpu(), experts.gate_up_scale.cpu()),
        (experts.down_rows.cpu(), experts.down_scale.cpu()),
    )
    there._is_expert_parallel = experts._is_expert_parallel
    return there(x.cpu(), choices.cpu(), weights.cpu())


def chosen(tokens: int, count: int, choices: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(tokens, count, generator=made, device="cuda")
    best = scores.topk(choices)
    return best.indices, best.values


@pytest.mark.parametrize(
    ("tokens", "count", "choices", "hidden", "inner"),
    [(1, 128, 8, 256, 96), (9, 4, 2, 64, 48), (100, 16, 4, 512, 176), (500, 4, 2, 256, 96), (1500, 3, 2, 128, 64)],
)
@pytest.mark.parametrize("beyond", [False, True])
def test_experts(tokens: int, count: int, choices: int, hidden: int, inner: int, beyond: bool) -> None:
    experts = experts_of(count, hidden, inner)
    x = numbers(tokens, hidden, seed=4)
    ids, weights = chosen(tokens, count, choices)
    if beyond:
        experts._is_expert_parallel = True
        ids[::2, 0] = count
    with torch.inference_mode():
        got = experts(x, ids, weights)
        want = one_by_one(experts, x, ids, weights)
    # Between the products rounding to bfloat16 may fall otherwise, and then to FP8 as well.
    assert (got.cpu().float() - want.float()).norm() <= 2e-2 * want.float().norm()


def test_a_graph_holds_for_any_choice() -> None:
    experts, linear = experts_of(16, 256, 96), layer(256, 256)
    x = numbers(6, 256)
    ids, weights = chosen(6, 16, 4)
    with torch.inference_mode():
        experts(linear(x), ids, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(linear(x), ids, weights)
        for seed in range(1, 4):
            x.copy_(numbers(6, 256, seed=seed))
            for mine, other in zip((ids, weights), chosen(6, 16, 4, seed=seed), strict=True):
                mine.copy_(other)
            graph.replay()
            assert torch.equal(out, experts(linear(x), ids, weights))


def test_compiled() -> None:
    experts, linear = experts_of(8, 128, 64), layer(128, 128, bias=True)

    def step(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts(linear(x) * 1.5, ids, weights)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for tokens in (5, 12):
            given = numbers(tokens, 128), *chosen(tokens, 8, 2)
            got, want = compiled(*given), step(*given)
            assert (got - want).norm() <= 2e-2 * want.norm()


def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny.checkpoint(FAMILY), "bfloat16", device="cuda").eval()
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(Float8Linear), kinds.count(Float8Experts)) == (21, 2)
    monkeypatch.setattr(Cpu, "fp8_products", True)
    there = load(tiny.checkpoint(FAMILY), "bfloat16", device="cpu").eval()
    ask = next(ask for ask in cases.all_asks(FAMILY) if ask.images)
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in reference.inputs(FAMILY, ask).items()}
    with torch.inference_mode():
        got = model(**{k: v.cuda() for k, v in inputs.items()}).logits.cpu().float()
        want = there(**inputs).logits.float()
    # Tiny layers of random weights: bfloat16 against float32 alone moves these logits by 0.11 to 0.17 of their size,
    # since a number rounded to another FP8 number moves by a sixteenth. Of unrelated logits it would be 1.4.
    assert (got - want).norm() <= 0.3 * want.norm()


@pytest.mark.parametrize("eager", [True, False])
def test_the_engine(eager: bool) -> None:
    """Graphs, compiled layers and joined matrices; the prompt's logprobs are those of the model alone, to rounding."""
    options: dict[str, Any] = cases.ROOMY | {"max_num_seqs": 4, "enforce_eager": eager, "gpu_memory_utilization": 0.3}
    llm = LLM(model=str(tiny.checkpoint(FAMILY)), dtype="bfloat16", seed=0, disable_log_stats=True, **options)
    asks = [ask for ask in cases.all_asks(FAMILY) if not ask.as_embeds][:6]
    try:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=20)
        outputs = llm.generate([request(FAMILY, ask) for ask in asks], params, use_tqdm=False)
    finally:
        llm.close()
    far = []
    for ask, output in zip(asks, outputs, strict=True):
        with torch.inference_mode():
            want = reference.model(FAMILY)(**reference.inputs(FAMILY, ask)).logits[0, -1].log_softmax(-1)
        first = output.outputs[0].logprobs[0]
        assert len(output.outputs[0].token_ids) == 8
        far += [abs(entry.logprob - float(want[token])) for token, entry in first.items()]
    # FP8 activations move the logprobs of this model by 0.4 to 1.7 at most, those of another by several.
    assert sum(far) / len(far) < 0.9
