"""int8 weights made at load: products, whole models against dequantized weights, rows in batches, refusals."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld import LLM, SamplingParams
from beheld.cli.main import main
from beheld.core.config import QUANTIZED_AT_LOAD, EngineArgs
from beheld.core.errors import ConfigError, ModelError
from beheld.engine.setup import describe, resolve_and_decide
from beheld.models.load import load_model
from beheld.models.surgery.joined import FirstOfFused, fuse_linears
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from beheld.platform import host, jit
from beheld.platform.registry import CPU
from beheld.quant import availability, registry
from beheld.quant.int8 import Int8Experts, Int8Linear
from beheld.quant.method import StorageTarget
from beheld.tools.verify.trace import Question
from beheld.tools.verify.watched_engine import WatchedEngine
from tests import tiny

pytestmark = pytest.mark.skipif(not CPU.int8_products, reason="this CPU has no int8 products")


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's products, also where weights could be grouped (test_grouped.py)."""
    monkeypatch.setattr(jit, "available", lambda: False)


# A bias on q, k and v; a tied head; experts; experts beside a shared one, and a router.
FAMILIES = ("qwen2", "gemma2", "qwen3_vl_moe", "glm4v_moe")
PROMPTS = [[5 + (7 * n + 3 * m) % 80 for n in range(m)] for m in (40, 3, 17, 1)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)


def rounded(x: Tensor) -> Tensor:
    """What a product sees of x: each row in steps of its largest number / 127."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(x / step) * step, x)


class Meant(nn.Module):
    """A linear layer with the numbers that int8 weights mean, and rounded activations, in float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = rounded(linear.weight.data), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(rounded(x), self.weight, self.bias)


class MeantExperts(nn.Module):
    """Experts with the numbers that int8 weights mean, one token and one of its experts after the other."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.act = experts.act_fn
        weights = [getattr(experts, name).data for name in ("gate_up_proj", "down_proj")]
        weights = [w.transpose(1, 2) if experts.is_transposed else w for w in weights]
        self.up, self.down = (rounded(w) for w in weights)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for token, (choices, weights) in enumerate(zip(top_k_index.tolist(), top_k_weights, strict=True)):
            for expert, weight in zip(choices, weights, strict=True):
                if expert < len(self.up):
                    gate, up = (self.up[expert] @ rounded(hidden_states[token])).chunk(2)
                    out[token] += weight * (self.down[expert] @ rounded(self.act(gate) * up))
        return out


def load(family: str, **options: Any) -> Any:
    args = EngineArgs(model=str(tiny.checkpoint(family)), device="cpu", dtype="float32", **options)
    decided = resolve_and_decide(args)
    return load_model(decided.hf_config, decided.info, decided.config)


def meant(family: str) -> Any:
    """The model as its int8 weights mean it: what the engine's int8 model replaced, replaced by the above."""
    model, quantized = load(family).target.model, load(family, quantization="int8").target.model
    for name, module in list(quantized.named_modules()):
        if isinstance(module, Int8Linear | Int8Experts) and ".down." not in name and ".gate_up." not in name:
            parent, _, own = name.rpartition(".")
            old = model.get_submodule(name)
            new = Meant(old) if isinstance(module, Int8Linear) else MeantExperts(old)
            setattr(model.get_submodule(parent), own, new)
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


def answers(family: str, prompts: list[list[int]], **options: Any) -> list[tuple[tuple[int, ...], list[float]]]:
    path = str(tiny.checkpoint(family))
    options = {"dtype": "float32", "seed": 0, "max_model_len": 256, "quantization": "int8"} | options
    with LLM(path, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    return [
        (tuple(o.token_ids), [step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)])
        for o in found
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_numbers_that_are_meant(family: str) -> None:
    model = meant(family)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(Meant) > len(text_model(model).layers)
    assert (MeantExperts in kinds) == family.endswith("_moe")
    for ids, (tokens, _) in zip(PROMPTS, answers(family, PROMPTS), strict=True):
        assert list(tokens) == greedy(model, ids, GREEDY.max_tokens or 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_answer_does_not_depend_on_its_batch(dtype: str) -> None:
    together = answers("qwen2", PROMPTS, dtype=dtype)
    assert [answers("qwen2", [ids], dtype=dtype)[0][0] for ids in PROMPTS] == [tokens for tokens, _ in together]


def test_experts_of_another_form_stay_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="beheld"):
        text = text_model(load("llama4", quantization="int8").target.model)
    assert not any(isinstance(module, Int8Experts) for module in text.modules())
    assert any(parameter.dim() == 3 for parameter in text.parameters())
    assert "keep their type" in caplog.text


def test_room_for_adapters_changes_nothing() -> None:
    plain, roomy = answers("qwen2", PROMPTS), answers("qwen2", PROMPTS, enable_lora=True)
    assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in roomy]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 160, True), (2816, 96, False), (17, 19, True)])
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_among_others(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    was = linear.weight.detach().clone()
    layer = Int8Linear.of(linear)
    x = torch.randn(40, inputs, dtype=dtype)
    # A mate with large numbers, which one step for the whole batch would have to cover.
    x[1] *= 1000
    x[2] = 0
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in (0, 1, 2, 3, 8, 16, 17, 33, 40):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows
    assert torch.equal(layer(x[3]), alone[3])
    assert torch.equal(layer(x.view(2, 20, inputs)).view(40, outputs), alone)
    want = Meant(linear.float())(x.float())
    for got, row in zip(alone.float(), want, strict=True):
        # A number between two steps may be rounded to either.
        bound = 4e-3 if dtype == torch.float32 else 8e-3
        assert (got - row).norm() <= bound * row.norm()
    exact = linear(x.float())
    # The layer's own weights are not changed.
    assert torch.equal(linear.weight, was.float())
    assert 1e-4 * exact.norm() < (alone.float() - exact).norm() < 3e-2 * exact.norm()


@torch.inference_mode()
def test_layers_are_joined_and_come_apart() -> None:
    model = load("qwen2", quantization="int8").target.model
    text = text_model(model)
    attention, x = text.layers[0].self_attn, torch.randn(3, 64)
    names = ("q_proj", "k_proj", "v_proj")
    before = {name: getattr(attention, name) for name in names}
    want = [before[name](x) for name in names]
    changes = Changes()
    assert fuse_linears(text, changes) == 2 * len(text.layers)
    assert isinstance(attention.q_proj, FirstOfFused)
    for name, expected in zip(names, want, strict=True):
        assert torch.equal(getattr(attention, name)(x), expected)
    assert torch.equal(attention.q_proj.alone(x, 1), want[1])
    changes.take_back()
    for name in names:
        assert torch.equal(getattr(attention, name).rows_NK, before[name].rows_NK)


@pytest.mark.parametrize("family", FAMILIES)
def test_towers_embeddings_and_routers_stay_and_all_can_be_taken_back(family: str) -> None:
    surgery = load(family, quantization="int8")
    model = surgery.target.model
    plain = load(family).target.model
    was = dict(plain.named_parameters())
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    inside = {id(module) for module in text_model(model).modules()} | {id(model.get_output_embeddings())}
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear | Int8Experts):
            assert id(module) in inside, name
            assert not name.endswith((".gate", ".router")), name
    surgery.take_back()
    found = dict(model.named_parameters())
    assert found.keys() == was.keys()
    for name, value in was.items():
        assert (found[name] - value).norm() <= 0.02 * value.norm(), name
    ties = [each.get_output_embeddings().weight is each.get_input_embeddings().weight for each in (model, plain)]
    assert ties[0] == ties[1]
    assert ties[1] or family != "gemma2"


def test_one_layer_is_held_twice() -> None:
    model = load("qwen2").target.model
    weights = [weakref.ref(p) for p in text_model(model).layers.parameters() if p.dim() > 1]
    alive: list[int] = []

    def replace(parent: nn.Module, name: str, new: nn.Module, restore: Any) -> None:
        alive.append(sum(ref() is not None for ref in weights))
        setattr(parent, name, new)

    method = registry.method_for(None, "int8", StorageTarget("cpu", torch.float32))
    method.settle(model, type(model), text_model, replace)
    assert alive[: len(weights)] == list(range(len(weights), 0, -1))
    assert not any(ref() is not None for ref in weights)


def test_sizes_reckon_with_the_bits() -> None:
    args = EngineArgs(model=str(tiny.checkpoint("qwen2")), device="cpu", dtype="float32")
    whole = describe(args)[2]["weights_bytes"]
    args.quantization = "int8"
    told = describe(args)[2]["weights_bytes"]
    model = load("qwen2", quantization="int8").target.model
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    assert told == pytest.approx(kept + sum(getattr(m, "packed_bytes", 0) for m in model.modules()), rel=0.02)
    assert told < 0.8 * whole


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(tiny.checkpoint("qwen2"))
    assert tuple(registry.AT_LOAD) == tuple(availability.AT_LOAD_METHODS) == QUANTIZED_AT_LOAD
    with pytest.raises(ConfigError, match="'int9' is not available") as caught:
        LLM(model, quantization="int9")
    assert "'int8'" in str(caught.value)
    with pytest.raises(ConfigError, match="is quantized by 'compressed-tensors'"):
        LLM(str(tiny.checkpoint("glm4v_moe_fp8")), quantization="int8")
    linear = nn.Linear(32, 32)
    linear.weight.data[3, 4] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        Int8Linear.of(linear)
    monkeypatch.setattr(host, "cpu_flags", lambda: "avx512_bf16 avx2")
    with pytest.raises(ConfigError, match="AVX512-VNNI, AVX-VNNI or AMX") as caught:
        LLM(model, quantization="int8", device="cpu")
    assert caught.value.param == "quantization"


@torch.inference_mode()
def test_a_part_of_the_experts_is_numbered_from_zero() -> None:
    torch.manual_seed(0)
    model = load("qwen3_vl_moe").target.model
    old = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    want, experts = MeantExperts(old), Int8Experts.of(old)
    hidden = want.down.shape[1]
    x = torch.randn(6, hidden)
    choices, weights = torch.tensor([[2, 3], [3, experts.num_experts]] * 3), torch.rand(6, 2)
    torch.testing.assert_close(experts(x, choices, weights), want(x, choices, weights), rtol=2e-2, atol=2e-3)
    own = experts.part(slice(2, 4))
    assert own.num_experts == 2
    inside = choices[::2]
    torch.testing.assert_close(own(x[::2], inside - 2, weights[::2]), experts(x[::2], inside, weights[::2]))
    # A token's answer does not depend on what others chose.
    assert torch.equal(experts(x, choices, weights)[1:2], experts(x[1:2], choices[1:2], weights[1:2]))


def test_verify_tells_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny.checkpoint("qwen2_5_vl"))
    assert main(["verify", model, "--quantization", "int8", "--json", "--max-tokens", "5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["method"] == "int8"
    assert len(told["equal"]) == len(told["kl"]) == 5
    assert told["share_equal"] == sum(told["equal"]) / 5
    assert all(0 < kl < 0.1 for kl in told["kl"])
    assert main(["verify", model, "--quantization", "int8", "--text-only", "--max-tokens", "2"]) == 0
    assert "of 2 greedy tokens" in capsys.readouterr().out


def test_logits_after_an_answer_are_those_of_the_answer() -> None:
    args = EngineArgs(model=str(tiny.checkpoint("qwen2_5_vl")), device="cpu", dtype="float32", media_workers=0)
    question = Question("What is it?", templated="plain", max_tokens=4)
    engine = WatchedEngine(args)
    try:
        trace = engine.trace(question)
        logits, same_prompt = engine.logits_after(question, trace.prompt_ids, trace.token_ids)
        assert same_prompt
        for found, wanted in zip(logits, trace.logits, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    finally:
        engine.close()
