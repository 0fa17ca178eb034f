"""Weights that a GPU keeps in their bits, FP8 by blocks and MXFP4: the numbers that they mean, and whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs an NVIDIA GPU that multiplies FP8", allow_module_level=True)

from torch import Tensor

from beheld import LLM, SamplingParams
from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.models import load
from beheld.quant.float8_block import BlockFloat8Experts, BlockFloat8Linear, BlockNumbers, rounded_groups
from beheld.quant.mxfp4_experts import MXFP4Experts, dequantized, repacked
from tests import tiny
from tests.gpu.test_float8 import Gate, chosen, numbers
from tests.quant import stored_forms
from tests.quant.test_float8_block import BLOCKS, ENTRY

# Of results in bfloat16, relative to all of them; sums of FP8 products keep fourteen bits.
CLOSE = 4e-3


def eights(outputs: int, inputs: int, height: int, group: int, seed: int = 0) -> BlockNumbers:
    rows = (numbers(outputs, inputs, seed=seed) * 40).clamp(-448, 448).to(torch.float8_e4m3fn)
    return BlockNumbers(rows, numbers(outputs // height, inputs // group, seed=seed + 1).float().abs() + 0.1)


def close(got: Tensor, want: Tensor, bound: float = CLOSE) -> bool:
    return bool((got.double() - want.double()).norm() <= bound * want.double().norm())


def exact(x: Tensor, group: int) -> Tensor:
    """Activations as they are rounded."""
    rows, scale = rounded_groups(x, x.shape[1] // group)
    return (rows.double().unflatten(1, (-1, group)) * scale.double().t().unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize(("rows", "inputs", "group"), [(1, 128, 128), (7, 1408, 128), (300, 4096, 64), (2, 96, 32)])
def test_rows_are_those_of_a_cpu(rows: int, inputs: int, group: int) -> None:
    x = numbers(rows, inputs + 8)[:, :inputs]
    x[rows // 2, :group] = 0
    got, scale = rounded_groups(x, inputs // group)
    want, want_scale = rounded_groups(x.cpu(), inputs // group)
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


# The last three are not for torch's own product: groups that are no multiple of four, other blocks, a scale a row.
@pytest.mark.parametrize("rows", [1, 5, 40, 64, 77, 300])
@pytest.mark.parametrize(
    ("outputs", "inputs", "height", "group"),
    [(3584, 18944, 128, 128), (4608, 3584, 128, 128), (256, 2304, 128, 128), (96, 192, 24, 64), (576, 512, 1, 128)],
)
def test_linear_layers(rows: int, outputs: int, inputs: int, height: int, group: int) -> None:
    weight, bias = eights(outputs, inputs, height, group), numbers(outputs, seed=9)
    layer = BlockFloat8Linear(weight, bias, torch.bfloat16)
    x = numbers(rows, inputs, seed=3)
    got = layer(x)
    assert close(got, exact(x, group) @ weight.dequantized().double().t() + bias.double())
    assert torch.equal(got, layer(x))


@pytest.mark.parametrize("tokens", [1, 2, 9, 100, 700])
@pytest.mark.parametrize(("height", "beyond"), [(64, False), (1, True)])
@torch.inference_mode()
def test_experts_by_blocks(tokens: int, height: int, beyond: bool) -> None:
    count, choices, hidden, inner = 16, 4, 256, 128
    flat = [eights(count * n, k, height, 128, seed=n) for n, k in ((2 * inner, hidden), (hidden, inner))]
    both = [BlockNumbers(*(each.unflatten(0, (count, -1)) for each in (one.rows, one.scale))) for one in flat]
    experts = BlockFloat8Experts(Gate(), both[0], both[1], torch.bfloat16)
    there = BlockFloat8Experts(Gate(), *(BlockNumbers(e.rows.cpu(), e.scale.cpu()) for e in both), torch.bfloat16)
    x = numbers(tokens, hidden, seed=4)
    ids, weights = chosen(tokens, count, choices)
    if beyond:
        experts._is_expert_parallel = there._is_expert_parallel = True
        ids[::2, 0] = count
    # Between the products rounding to bfloat16 may fall otherwise, and then to FP8 as well.
    assert close(experts(x, ids, weights).cpu(), there(x.cpu(), ids.cpu(), weights.cpu()), 2e-2)


def four_bits(experts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator("cuda").manual_seed(outputs)
    shape = experts, outputs, inputs // 32
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda", generator=made)
    return blocks, torch.randint(118, 124, shape, dtype=torch.uint8, device="cuda", generator=made)


@pytest.mark.parametrize("tokens", [1, 2, 4, 9, 100, 700])
@pytest.mark.parametrize("beyond", [False, True])
@torch.inference_mode()
def test_experts_of_four_bits(tokens: int, beyond: bool) -> None:
    count, choices, hidden, inner = 16, 4, 288, 160
    entries = four_bits(count, 2 * inner, hidden), four_bits(count, hidden, inner)
    shell: Any = Gate()
    for name, outputs in (("gate_up", 2 * inner), ("down", hidden)):
        setattr(shell, f"{name}_proj_bias", torch.nn.Parameter(numbers(count, outputs, seed=outputs)))
    biases = [getattr(shell, f"{name}_proj_bias").data.double() for name in ("gate_up", "down")]
    experts = MXFP4Experts(shell, repacked(*entries[0]), repacked(*entries[1]), (hidden // 32, inner // 32))
    up, down = (dequantized(*each).double() for each in entries)
    x = numbers(tokens, hidden, seed=4)
    ids, weights = chosen(tokens, count, choices)
    if beyond:
        experts._is_expert_parallel = True
        ids[::2, 0] = count
    got = experts(x, ids, weights)
    want = torch.zeros_like(x, dtype=torch.float64)
    for token in range(0, tokens, 1 + tokens // 20):
        for place, expert in enumerate(ids[token].tolist()):
            if expert < count:
                inside = (x[token].double() @ up[expert] + biases[0][expert]).bfloat16()
                own = shell._apply_gate(inside).double() @ down[expert] + biases[1][expert]
                want[token] += weights[token, place] * own
    rows = slice(0, tokens, 1 + tokens // 20)
    assert close(got[rows], want[rows], 1e-2)


@torch.inference_mode()
def test_one_graph_holds_for_any_choice() -> None:
    entries = four_bits(8, 128, 128), four_bits(8, 128, 64)
    experts = MXFP4Experts(Gate(), repacked(*entries[0]), repacked(*entries[1]), (4, 2))
    for tokens in (3, 20):
        x = numbers(tokens, 128)
        ids, weights = chosen(tokens, 8, 4)
        experts(x, ids, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(x, ids, weights)
        for seed in range(1, 4):
            x.copy_(numbers(tokens, 128, seed=seed))
            for mine, other in zip((ids, weights), chosen(tokens, 8, 4, seed=seed), strict=True):
                mine.copy_(other)
            graph.replay()
            assert torch.equal(out, experts(x, ids, weights))


def logprobs(path: Path, eager: bool, **options: Any) -> list[dict[int, float]]:
    prompts = [{"prompt_token_ids": [5 + n % 80 for n in range(count)]} for count in (3, 9, 17, 40, 64, 90, 150, 210)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20)
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 2**28} | options
    with LLM(str(path), enforce_eager=eager, max_model_len=256, **options) as llm:
        # The second time from the cache.
        outputs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)][1]
    return [{token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()} for output in outputs]


def apart(mine: list[dict[int, float]], its: list[dict[int, float]]) -> float:
    """The mean difference of log-probabilities that both name."""
    found = [abs(a[token] - b[token]) for a, b in zip(mine, its, strict=True) for token in a.keys() & b.keys()]
    return sum(found) / len(found)


@pytest.mark.parametrize("eager", [True, False])
def test_gpt_oss_answers_as_its_numbers_mean(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.checkpoint("gpt_oss")
    exact32 = logprobs(path, eager, dtype="float32")
    kept = logprobs(path, eager)
    monkeypatch.setenv("BEHELD_KEEP_BITS", "0")
    # bfloat16 moves the log-probabilities of these random layers by a few hundredths.
    assert apart(kept, exact32) < 1.5 * apart(logprobs(path, eager), exact32) + 0.01


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_fp8_by_blocks_answers_nearly_as_its_numbers_mean(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_forms.write(tiny.checkpoint(family), tmp_path, ENTRY, stored_forms.block_fp8(BLOCKS))
    kept = logprobs(tmp_path, eager=False)
    monkeypatch.setenv("BEHELD_FP8", "0")
    # FP8 activations move the log-probabilities of these random layers by 0.4 to 1.7 at most; see test_float8.py.
    assert apart(kept, logprobs(tmp_path, eager=False)) < 0.9


@pytest.mark.parametrize("family", ["qwen2", "qwen3_vl_moe"])
@pytest.mark.parametrize("eager", [True, False])
def test_fp8_at_load_answers_nearly_as_the_weights_do(family: str, eager: bool) -> None:
    path = tiny.checkpoint(family)
    rounded = logprobs(path, eager, quantization="fp8")
    # As above; the weights are rounded, too.
    assert 0 < apart(rounded, logprobs(path, eager)) < 0.9


@pytest.mark.parametrize("way", ["fp8", "int4", "int8"])
def test_weights_that_are_rounded_from_the_host_take_no_more_than_they_do_then(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that cannot hold them unrounded holds one layer so at a time; the weights are the same."""
    monkeypatch.setenv("BEHELD_INT8_ON_GPU", "1")
    path = tiny.reshaped("qwen2", tmp_path / "wide", wide)
    args = EngineArgs(model=str(path), dtype="bfloat16", quantization=way)
    decided = resolve_and_decide(args)
    given = (decided.hf_config, decided.info, decided.config)
    found, most = [], []
    for streamed in (False, True):
        monkeypatch.setattr(load, "_is_streamed", lambda *given, streamed=streamed: streamed)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = load.load_model(*given).target.model
        most.append(torch.cuda.max_memory_allocated() - before)
        assert all(parameter.device.type == "cuda" for parameter in (*model.parameters(), *model.buffers()))
        found.append({name: value.cpu() for name, value in model.state_dict().items()})
        held = sum(parameter.nbytes for parameter in model.parameters())
        del model
    # The second figure holds a layer, and what rounds it in float32.
    assert most[1] < 1.6 * held < most[0]
    assert all(
        torch.equal(value.view(torch.uint8), found[1][name].view(torch.uint8)) for name, value in found[0].items()
    )


def wide(settings: dict[str, Any]) -> dict[str, Any]:
    count = 16
    return settings | {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": count,
        "layer_types": ["full_attention"] * count,
    }
