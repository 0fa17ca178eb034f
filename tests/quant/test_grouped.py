"""Weights of few bits that stay so in memory: products, checkpoints that are kept, int4 made at load, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from operator import eq
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from beheld import LLM, LoRARequest, SamplingParams
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, ModelError
from beheld.engine.setup import describe
from beheld.models.surgery.joined import FirstOfFused, fuse_linears
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model
from beheld.platform import host, jit
from beheld.platform.host import ByteProducts
from beheld.platform.registry import CPU
from beheld.quant import byte_products
from beheld.quant.byte_products import PackedWeights
from beheld.quant.grouped import GroupedNumbers, affine, rounded
from beheld.quant.grouped_linear import GroupedLinear, fitting_group
from beheld.quant.linear import join, same_form
from beheld.quant.listed_experts import ListedExperts
from tests import census, tiny
from tests.lora import adapters
from tests.quant import stored_forms, test_awq, test_bitsandbytes, test_compressed_integers, test_gptq, test_rank_parts
from tests.quant.test_compressed_tensors import load
from tests.quant.test_int8 import GREEDY, PROMPTS, answers, greedy
from tests.quant.test_int8 import load as surgery

pytestmark = pytest.mark.skipif(CPU.no_grouped_products is not None, reason=str(CPU.no_grouped_products))
# float16 holds a group's scale and low: a weight moves by less than this share of the largest of its group.
BOUND = 2.0**-10


def numbers(outputs: int, inputs: int, group: int, bits: int) -> GroupedNumbers:
    torch.manual_seed(0)
    whole = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    scale = torch.rand(outputs, inputs // group).add_(0.1)
    # Outputs of very different sizes, beyond what float16 holds.
    scale *= torch.logspace(-9, 5, outputs).unsqueeze(1)
    return GroupedNumbers(whole, scale, -scale * torch.randint(0, 1 << bits, scale.shape), bits)


def rounded_rows(x: Tensor, groups: int) -> Tensor:
    """What a product sees of x: each group of a row's inputs in steps of its largest number / 127."""
    by_group = x.float().unflatten(-1, (groups, -1))
    step = by_group.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(by_group / step) * step, by_group).flatten(-2)


class Meant(nn.Module):
    """A linear layer with the numbers that kept weights mean, and rounded activations, in float32."""

    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__()
        self.groups, self.bias = layer.form.groups, layer.bias
        self.weight = layer.numbers.dequantized()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(rounded_rows(x, self.groups), self.weight, self.bias)


def _fields(made: GroupedNumbers) -> tuple[Tensor, Tensor, Tensor, int]:
    return made.numbers_NK, made.scale_NG, made.low_NG, made.bits


# Those that this CPU has. What has VNNI has AVX2 too.
PRODUCTS = [] if host.byte_products() is None else [host.byte_products(), ByteProducts(8, vnni=False, bfloat16=False)]


@pytest.mark.parametrize("products", dict.fromkeys(PRODUCTS), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "group", "bits"), [(37, 96, 32, 4), (64, 256, 128, 8), (3, 48, 16, 4)])
@torch.inference_mode()
def test_products(products: ByteProducts, dtype: torch.dtype, outputs: int, inputs: int, group: int, bits: int) -> None:
    made = numbers(outputs, inputs, group, bits)
    weights = PackedWeights(made.numbers_NK, made.scale_NG, made.low_NG, bits, products)
    whole, scale, low = weights.unpacked()
    assert torch.equal(whole, made.numbers_NK)
    kept = GroupedNumbers(whole, scale, low, bits)
    largest = made.dequantized().unflatten(1, (-1, group)).abs().amax(-1)
    moved = (kept.dequantized() - made.dequantized()).unflatten(1, (-1, group)).abs().amax(-1)
    assert (moved <= BOUND * torch.maximum(largest, (1 << bits) * made.scale_NG)).all()
    bias = torch.randn(outputs)
    weights.set_bias(bias)
    x = torch.randn(83, inputs).to(dtype)
    x[1] *= 1000
    x[2] = 0
    found = weights.product(x)
    want = rounded_rows(x, inputs // group) @ kept.dequantized().t() + bias
    bound = {torch.float32: 1e-5, torch.bfloat16: 5e-3}[dtype]
    size = rounded_rows(x, inputs // group).norm(dim=1, keepdim=True) * kept.dequantized().norm(dim=1) + bias.abs()
    # A number between two steps may be rounded to either.
    assert ((found.float() - want).abs() <= bound * size + 1e-2 * size / inputs).all()
    assert torch.equal(found[2].float(), bias.to(dtype).float())
    for rows in (0, 1, 2, 3, 5, 8, 15, 64, 65):
        assert torch.equal(weights.product(x[:rows]), found[:rows]), rows
    x[4, 5] = float("nan")
    broken = weights.product(x)
    assert broken[4].isnan().all()
    assert torch.equal(broken[5:], found[5:])


@pytest.mark.parametrize("products", dict.fromkeys(PRODUCTS), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "group", "bits"), [(37, 96, 32, 4), (64, 256, 128, 8), (3, 48, 16, 4)])
def test_weights_are_rounded_alike_in_one_pass(
    products: ByteProducts, dtype: torch.dtype, outputs: int, inputs: int, group: int, bits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(1)
    weight = torch.randn(outputs, inputs).mul_(torch.logspace(-4, 3, outputs).unsqueeze(1)).to(dtype)
    weight[1] = 0
    weight[2, :group] = 0.25
    want = rounded(weight, bits, group)
    apart = PackedWeights(want.numbers_NK, want.scale_NG, want.low_NG, bits, products)
    # The second piece begins within the weights.
    monkeypatch.setattr(byte_products, "_PIECE", 16 * inputs)
    monkeypatch.setattr(byte_products, "_SCALES", 1)
    for given in (weight, weight.t().contiguous().t()):
        found = PackedWeights.rounded(given, bits, group, products)
        for name in ("packed", "factor_N", "scales_BG2L", "_bias_N"):
            assert torch.equal(getattr(found, name), getattr(apart, name)), name
        assert (found.outputs, found.inputs, found.groups) == (outputs, inputs, inputs // group)
    for broken in (float("nan"), float("-inf"), 2e18):
        weight = weight.float()
        weight[outputs - 1, 5] = broken
        with pytest.raises(ModelError, match="NaN or infinity"):
            PackedWeights.rounded(weight, bits, group, products)


def test_threads_share_the_work() -> None:
    made = numbers(600, 512, 64, 4)
    weights = PackedWeights(made.numbers_NK, made.scale_NG, made.low_NG, 4)
    x = torch.randn(130, 512)
    alone = weights.product(x)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(weights.product(x), alone)
        own = torch.randn(1200, 512)
        want = PackedWeights(*_fields(rounded(own, 8, 64)))
        assert torch.equal(PackedWeights.rounded(own, 8, 64).packed, want.packed)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_layers_are_joined_and_cut() -> None:
    torch.manual_seed(1)
    layers = [GroupedLinear(rounded(torch.randn(n, 128), 4, 32), torch.randn(n), torch.float32) for n in (24, 40)]
    x = torch.randn(5, 128)
    whole = join(layers)
    apart = torch.cat([layer(x) for layer in layers], -1)
    assert torch.equal(whole(x), apart)
    assert torch.equal(whole.part(slice(10, 50))(x), apart[:, 10:50])  # type: ignore[operator]
    assert torch.equal(layers[0].restored().weight, layers[0].numbers.dequantized())
    order = torch.randperm(128)
    other = affine(layers[1].numbers.numbers_NK, 8, torch.ones(40, 4), 4, order)
    turned = GroupedLinear(other, None, torch.float32)
    assert not same_form([layers[0], turned])
    assert not same_form([layers[0], GroupedLinear(rounded(torch.randn(8, 128), 8, 32), None, torch.float32)])
    wanted = rounded_rows(x[:, order], 4) @ other.dequantized()[:, order].t()
    torch.testing.assert_close(turned(x), wanted, rtol=1e-3, atol=1e-2)


def awq(path: Path) -> None:
    stored_forms.write(tiny.checkpoint("glm4v_moe"), path, test_awq.ENTRY, stored_forms.awq(16))


def gptq(path: Path, bits: int, act_order: bool, family: str = "qwen2") -> None:
    entry = test_gptq.ENTRY | {"bits": bits, "group_size": 16, "desc_act": act_order}
    form = stored_forms.gptq(bits, 16, 1, act_order)
    stored_forms.write(tiny.checkpoint(family), path, entry, form)


def compressed(path: Path, name: str, family: str = "qwen2") -> None:
    entry, form = test_compressed_integers.FORMS[name]
    stored_forms.write(tiny.checkpoint(family), path, entry, form, "lm_head")


def eights(path: Path) -> None:
    stored_forms.write(
        tiny.checkpoint("qwen2"), path, test_bitsandbytes.EIGHT, stored_forms.eight_bit_rows(), "lm_head"
    )


KEPT: dict[str, Callable[[Path], None]] = {
    "AWQ with experts": awq,
    "GPTQ, 4 bits, act-order": lambda path: gptq(path, 4, act_order=True),
    # Each expert has an order of its own, so experts are dequantized.
    "GPTQ, 4 bits, act-order of each expert": lambda path: gptq(path, 4, act_order=True, family="glm4v_moe"),
    "W4A16 act-order of each expert": lambda path: compressed(path, "W4A16 act-order", "glm4v_moe"),
    "GPTQ, 3 bits": lambda path: gptq(path, 3, act_order=False),
    "bitsandbytes, 8 bits": eights,
    "GPTQ, 8 bits": lambda path: gptq(path, 8, act_order=False),
    **{
        name: lambda path, name=name: compressed(path, name)  # type: ignore[misc]
        for name in ("W8A8", "W4A16 act-order with zeros", "W4A16 by channel", "W8A16 with zeros")
    },
}


@pytest.mark.parametrize("name", KEPT)
def test_a_checkpoint_keeps_its_bits(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    KEPT[name](tmp_path)
    told = describe(EngineArgs(model=str(tmp_path), dtype="bfloat16"))[2]["weights_bytes"]
    model = load(tmp_path, "bfloat16")
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    kept += sum(getattr(module, "packed_bytes", 0) for module in model.modules())
    assert told == pytest.approx(kept, rel=0.02)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, GroupedLinear)}
    assert len(layers) >= 7 * len(text_model(model).layers)
    monkeypatch.setenv("BEHELD_KEEP_BITS", "0")
    plain = load(tmp_path, "bfloat16")
    meant = dict(load(tmp_path, "float32").named_parameters())
    assert not any(isinstance(module, GroupedLinear) for module in plain.modules())
    for path, layer in layers.items():
        if ".gate_up." in path or ".down." in path:
            owner, part, expert = path.rsplit(".", 2)
            wanted = meant[f"{owner}.{part}_proj"][int(expert)]
        else:
            wanted = meant[f"{path}.weight"]
        found = layer.numbers.dequantized()
        assert (found - wanted).abs().max() <= BOUND * wanted.abs().max() * 2, path
    assert any(isinstance(module, ListedExperts) for module in model.modules()) == ("with experts" in name)


@pytest.mark.parametrize("act_order", [False, True])
def test_ranks_keep_layers_of_act_order_whole(tmp_path: Path, act_order: bool) -> None:
    """Inputs that lie on one rank belong to groups that lie on all."""
    gptq(tmp_path, 4, act_order)
    model = test_rank_parts.load(tmp_path, 0, dtype="bfloat16")
    parts = [layer.self_attn.o_proj.in_features for layer in text_model(model).layers]
    parts += [layer.mlp.down_proj.in_features for layer in text_model(model).layers]
    shares = 1 if act_order else 2
    assert parts == [64 // shares] * (len(parts) // 2) + [96 // shares] * (len(parts) // 2)
    assert any("down_proj" in name for name in model.shard_plan.cuts) != act_order
    assert any("groups that ranks cannot share" in words for words in model.shard_plan.whole) == act_order


def test_a_named_type_asks_for_exact_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without products of bfloat16 the type is float32 unless another one is named, and bits are kept."""
    flags = host.cpu_flags().replace("bf16", "none")
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    compressed(tmp_path, "W8A8")
    for dtype, kept in (("auto", True), ("float32", False), ("torch.float32", False), ("bfloat16", True)):
        model = load(tmp_path, dtype)
        assert any(isinstance(module, GroupedLinear) for module in model.modules()) == kept, dtype
        assert model.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)


def test_a_kept_checkpoint_answers_alike_in_every_batch(tmp_path: Path) -> None:
    gptq(tmp_path, 4, act_order=True)
    with LLM(str(tmp_path), dtype="bfloat16", max_model_len=256) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        together = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
        alone = [llm.generate([each], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for each in prompts]
    assert together == alone


def test_an_adapter_over_kept_bits_changes_answers_as_over_their_numbers(tmp_path: Path) -> None:
    stored_forms.write(tiny.checkpoint("qwen2"), tmp_path / "awq", test_awq.ENTRY, stored_forms.awq(16), "lm_head")
    folder = adapters.write(adapters.Adapter("qwen2", 1), tmp_path / "adapter")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for path, dtype in ((tmp_path / "awq" / "plain", "float32"), (tmp_path / "awq", "auto")):
        llm = LLM(str(path), device="cpu", dtype=dtype, max_model_len=128, enable_lora=True)
        asked = [{"prompt_token_ids": list(range(5, 60))}] * 2
        given = [None, LoRARequest("one", 1, folder)]
        outputs = llm.generate(asked, params, use_tqdm=False, lora_request=given)  # type: ignore[arg-type]
        found.append([list(each.outputs[0].token_ids) for each in outputs])
    (plain, plain_changed), (kept, kept_changed) = found
    assert plain != plain_changed
    # Activations are rounded to 8 bits; a near tie may fall otherwise, and what follows it.
    assert sum(map(eq, plain_changed, kept_changed)) >= 6 > sum(map(eq, kept, kept_changed))


@pytest.mark.parametrize(("family", "bits"), [("qwen2", 4), ("qwen3_vl_moe", 4), ("qwen2", 8)])
def test_answers_at_load_are_those_of_the_numbers_that_are_meant(family: str, bits: int) -> None:
    quantization = f"int{bits}"
    model = surgery(family, quantization=quantization).target.model
    names = [path for path, module in model.named_modules() if isinstance(module, GroupedLinear)]
    assert isinstance(model.get_output_embeddings(), GroupedLinear)
    assert {model.get_submodule(path).form.bits for path in names} == {bits, 8}
    assert model.get_output_embeddings().form.bits == 8
    for path in names:
        owner, _, own = path.rpartition(".")
        setattr(model.get_submodule(owner), own, Meant(model.get_submodule(path)))
    for ids, (tokens, _) in zip(PROMPTS, answers(family, PROMPTS, quantization=quantization), strict=True):
        assert list(tokens) == greedy(model.eval(), ids, GREEDY.max_tokens or 0)


def test_blocks_that_transformers_rescales_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RWKV divides weights of later blocks and what they are added to; stored weights cannot be divided."""
    plain = census.make("rwkv", tmp_path)
    for path, module in load(tmp_path, "float32", quantization="int8").named_modules():
        if isinstance(module, GroupedLinear):
            plain.get_submodule(path).weight.data.copy_(module.numbers.dequantized())
    # Without the rounding of activations to 8 bits.
    monkeypatch.setattr(GroupedLinear, "forward", lambda self, x: x @ self.numbers.dequantized().t())
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    with LLM(str(tmp_path), dtype="float32", max_model_len=256, quantization="int8") as llm:
        outs = llm.generate([{"prompt_token_ids": ids} for ids in census.prompts()], params, use_tqdm=False)
    off = []
    for ids, out in zip(census.prompts(), outs, strict=True):
        wanted = census.expected(plain, ids)[1][0].log_softmax(-1)
        steps = out.outputs[0].logprobs
        assert steps is not None
        off += [abs(one.logprob - float(wanted[token])) for token, one in steps[0].items()]
    assert max(off) < 1e-3


def test_layers_that_threads_round_have_the_same_numbers(tmp_path: Path) -> None:
    path, threads = tmp_path / "copy", torch.get_num_threads()
    shutil.copytree(tiny.checkpoint("qwen2"), path)
    made = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            layers = dict(load(path, quantization="int4").named_modules())
            made.append({key: each._weights for key, each in layers.items() if isinstance(each, GroupedLinear)})
        assert len(made[0]) > 10
        assert made[0].keys() == made[1].keys()
        for one, other in zip(made[0].values(), made[1].values(), strict=True):
            assert torch.equal(one.packed, other.packed)
            assert torch.equal(one.scales_BG2L, other.scales_BG2L)
        weights = load_file(path / "model.safetensors")
        weights[next(key for key in weights if key.endswith("1.mlp.up_proj.weight"))][0, 0] = float("nan")
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match="NaN"):
            load(path, quantization="int4")
    finally:
        torch.set_num_threads(threads)


def test_int4_is_joined_taken_back_and_weighed() -> None:
    made = surgery("qwen2", quantization="int4")
    model, was = made.target.model, dict(surgery("qwen2").target.model.named_parameters())
    args = EngineArgs(model=str(tiny.checkpoint("qwen2")), device="cpu", dtype="float32", quantization="int4")
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    kept += sum(getattr(module, "packed_bytes", 0) for module in model.modules())
    assert describe(args)[2]["weights_bytes"] == pytest.approx(kept, rel=0.02)
    text, changes, x = text_model(model), Changes(), torch.randn(3, 64)
    attention = text.layers[0].self_attn
    before = attention.k_proj(x)
    assert fuse_linears(text, changes) == 2 * len(text.layers)
    assert isinstance(attention.q_proj, FirstOfFused)
    attention.q_proj(x)
    assert torch.equal(attention.k_proj(x), before)
    changes.take_back()
    made.take_back()
    for name, value in model.named_parameters():
        assert (value - was[name]).norm() <= 0.15 * was[name].norm(), name


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fitting_group(size, 64) for size in (128, 96, 80, 40)] == [64, 48, 16, None]
    with pytest.raises(ModelError, match="NaN"):
        rounded(torch.full((4, 32), float("nan")), 4, 32)
    monkeypatch.setattr(jit, "available", lambda: False)
    with pytest.raises(ConfigError, match="llvmlite is not installed") as caught:
        LLM(str(tiny.checkpoint("qwen2")), quantization="int4", device="cpu")
    assert "pip install llvmlite" in str(caught.value)
