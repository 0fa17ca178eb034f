"""Surgery keeps results: whole models before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.models.surgery import joined
from beheld.models.surgery import linears as fuse
from beheld.models.surgery.operation import Changes, Surgery, Target
from beheld.models.surgery.operations import operations_of
from beheld.platform import host
from beheld.platform.registry import CPU
from tests import census, tiny
from tests.fakes import fake_config


def load(family: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if family in tiny.IMAGE_FAMILIES else AutoModelForCausalLM
    return kind.from_pretrained(tiny.checkpoint(family), dtype=torch.float32).eval()


def fused(model: Any) -> int:
    return joined.fuse_linears(model, Changes())


def small_batches(model: Any) -> int:
    return fuse.replace_linears(model, fuse.SmallBatchLinear, torch.float32, Changes())


def packed(model: Any) -> int:
    assert fuse.can_pack()
    return fuse.replace_linears(model, fuse.PackedLinear, torch.float32, Changes())


@torch.inference_mode()
def test_conv1ds_are_packed_as_linear_layers_are(tmp_path: Path) -> None:
    """GPT-2's layers, whose weights lie the other way round."""
    from transformers.pytorch_utils import Conv1D

    model = census.make("gpt2", tmp_path)
    ids = torch.randint(5, 400, (2, 9), generator=torch.Generator().manual_seed(1))
    before = model(input_ids=ids).logits
    names = [name for name, module in model.named_modules() if type(module) is Conv1D]
    changes = Changes()
    assert fuse.take_conv1ds(model, changes) == len(names) == 4 * len(model.transformer.h)
    assert fuse.replace_linears(model, fuse.PackedLinear, torch.float32, changes) == len(names) + 1
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=2e-5, rtol=1e-4)
    changes.take_back()
    assert [name for name, module in model.named_modules() if type(module) is Conv1D] == names
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen2_5_vl"])
@pytest.mark.parametrize("surgery", [fused, small_batches, packed])
@torch.inference_mode()
def test_logits_are_those_of_the_model_as_it_came(family: str, surgery: Any) -> None:
    model = load(family)
    ids = torch.randint(5, 400, (2, 9), generator=torch.Generator().manual_seed(1))
    before = model(input_ids=ids).logits
    parameters = sum(p.numel() for p in model.parameters())
    decoder = model.get_decoder()
    assert surgery(decoder) >= 2 * len(decoder.layers)
    kept = sum(p.numel() for p in model.parameters())
    assert kept + sum(getattr(m, "packed_bytes", 0) for m in model.modules()) // 4 == parameters
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=2e-5, rtol=1e-4)
    single = ids[:1, :1]
    torch.testing.assert_close(
        model(input_ids=single).logits, load(family)(input_ids=single).logits, atol=2e-5, rtol=1e-4
    )


@torch.inference_mode()
def test_a_packed_layer_meets_few_sizes_and_computes_all() -> None:
    linear = torch.nn.Linear(24, 40)
    layer = fuse.PackedLinear(linear)
    met: set[int] = set()
    product = layer._product

    def noted(x: torch.Tensor) -> torch.Tensor:
        met.add(x.numel() // 24)
        return product(x)

    layer._product = noted  # type: ignore[method-assign]
    for rows in (*range(300), 1023, 1024, 1025, 2047):
        x = torch.randn(rows, 24)
        found = layer(x)
        assert found.shape == (rows, 40)
        torch.testing.assert_close(found, linear(x))
    assert len(met) < 70
    for rows in (*range(1, 5000), 1 << 20):
        assert rows <= fuse.padded_rows(rows) <= rows + rows // (8 if rows < 512 else 16)
        assert fuse.padded_rows(fuse.padded_rows(rows)) == fuse.padded_rows(rows)
    x = torch.randn(2, 19, 24)
    torch.testing.assert_close(layer(x), linear(x))


@torch.inference_mode()
@pytest.mark.skipif(not fuse.can_pack(), reason="this PyTorch has no oneDNN")
def test_many_rows_of_a_narrowing_layer_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder of sound spent a tenth of its time on copies of 12,000 rows with zeros behind them."""
    linear = torch.nn.Linear(96, 24)
    layer, copied, sizes = fuse.PackedLinear(linear), [], set()
    padded, product = fuse._padded, fuse.PackedLinear._product
    monkeypatch.setattr(fuse, "_padded", lambda x, rows, to: copied.append(rows) or padded(x, rows, to))
    monkeypatch.setattr(
        fuse.PackedLinear, "_product", lambda self, x: sizes.add(x.shape[0]) or product(self, x)
    )  # fmt: skip
    for rows in range(513, 1400, 7):
        x = torch.randn(rows, 96)
        torch.testing.assert_close(layer(x), linear(x), rtol=1e-5, atol=1e-5)
    assert max(copied) < 64
    assert all(fuse.padded_rows(size) == size for size in sizes)
    x = torch.randn(3, 700, 96)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 160, True), (160, 64, False), (17, 9, True)])
def test_a_padded_layer_meets_few_sizes_and_computes_all(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = torch.nn.Linear(inputs, outputs, bias=bias).to(dtype)
    layer = fuse.PaddedLinear(linear)
    met: set[int] = set()
    product = torch.nn.functional.linear

    def noted(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        met.add(x.numel() // inputs)
        return product(x, *parameters)

    for rows in (*range(140), 511, 784, 1025):
        x = torch.randn(rows, inputs, dtype=dtype)
        expected = linear(x)
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "linear", noted)
            # The same bits on the machines known; which kernel computes how many rows is the library's to choose.
            torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-3)
    assert len(met) < 50
    x = torch.randn(2, 19, inputs, dtype=dtype)
    torch.testing.assert_close(layer(x), linear(x), rtol=2e-2, atol=2e-3)


HAS_BFLOAT16 = fuse.can_pack() and CPU.bfloat16_products


@torch.inference_mode()
@pytest.mark.skipif(not HAS_BFLOAT16, reason="this CPU has no bfloat16 products")
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(2816, 1024, False), (1408, 512, True), (17, 9, True)])
def test_a_row_in_bfloat16_has_the_same_bits_alone_and_among_others(inputs: int, outputs: int, bias: bool) -> None:
    """oneDNN's product of one row of 2816 numbers differs from its products of more rows in the last bits."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, outputs, bias=bias).bfloat16()
    layer = fuse.PackedLinear(linear)
    x = torch.randn(40, inputs, dtype=torch.bfloat16)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in (0, 1, 2, 3, 4, 7, 8, 16, 17, 33, 40):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows
    assert torch.equal(layer(x[3]), alone[3])
    assert torch.equal(layer(x[:1].view(1, 1, inputs)), alone[:1].view(1, 1, outputs))
    torch.testing.assert_close(alone, linear(x), rtol=2e-2, atol=2e-3)
    assert torch.equal(layer.restored().weight, linear.weight)


@pytest.mark.parametrize(
    "flags",
    [
        "avx2",
        pytest.param(
            "avx512_bf16", marks=pytest.mark.skipif(not HAS_BFLOAT16, reason="this CPU has no bfloat16 products")
        ),
    ],
)
@pytest.mark.parametrize("max_loras", [0, 1])
def test_on_a_cpu_every_layer_meets_few_sizes(flags: str, max_loras: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    args = EngineArgs(model=str(tiny.checkpoint("qwen2_5_vl")), device="cpu", dtype="bfloat16")
    args.enable_lora = max_loras > 0
    resolved = resolve_and_decide(args)
    model = load("qwen2_5_vl").bfloat16()
    surgery = Surgery(Target(model, resolved.config))
    surgery.perform(operations_of(resolved.info))
    assert (surgery.target.slots is not None) == (max_loras > 0)
    kinds = {type(module) for module in model.modules()}
    assert torch.nn.Linear not in kinds
    wanted, other = fuse.PackedLinear, fuse.PaddedLinear
    if flags == "avx2":
        wanted, other = other, wanted
    assert wanted in kinds
    assert other not in kinds


@pytest.mark.parametrize("bias", [False, True])
def test_padding_an_mlp_changes_nothing(bias: bool) -> None:
    class Gated(torch.nn.Module):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(8, inner, bias), torch.nn.Linear(8, inner, bias)
            self.down_proj = torch.nn.Linear(inner, 8, bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    x = torch.randn(3, 8)
    odd, even = Gated(21), Gated(24)
    before = odd(x)
    assert fuse.pad_mlps(torch.nn.ModuleList([odd, even]), Changes()) == 1
    assert odd.gate_proj.weight.shape == (64, 8)
    assert even.gate_proj.weight.shape == (24, 8)
    torch.testing.assert_close(odd(x), before)
    assert joined.fuse_linears(odd, Changes()) == 1
    torch.testing.assert_close(odd(x), before)


def test_a_convolution_of_single_patches_is_a_product() -> None:
    tower = torch.nn.Sequential(torch.nn.Conv3d(3, 5, (2, 4, 4), (2, 4, 4)))
    patch, wider = torch.randn(7, 3, 2, 4, 4), torch.randn(2, 3, 2, 8, 4)
    before, around = tower(patch), tower(wider)
    assert fuse.replace_patch_convolutions(tower, Changes()) == 1
    torch.testing.assert_close(tower(patch), before)
    torch.testing.assert_close(tower(wider), around)
    overlapping = torch.nn.Sequential(torch.nn.Conv3d(3, 5, (2, 4, 4), (2, 2, 2)))
    assert fuse.replace_patch_convolutions(overlapping, Changes()) == 0


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "fused"])
@pytest.mark.parametrize(
    ("device", "dtype", "allowed"), [("cuda", "float32", False), ("cuda", "bfloat16", True), ("cpu", "float32", True)]
)
def test_float32_on_a_gpu_is_not_tf32(
    device: str, dtype: str, allowed: bool, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is done to a model: enforce_eager and `beheld verify` skip the surgery."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setenv("BEHELD_FUSE", "0")
    monkeypatch.setenv("BEHELD_COMPILE", "0")
    surgery = Surgery(Target(load("llama"), fake_config(device=device, dtype=dtype, enforce_eager=eager)))
    surgery.perform(operations_of(resolve_and_decide(EngineArgs(model=str(tiny.checkpoint("llama")))).info))
    with surgery.passing():
        assert torch.backends.cudnn.allow_tf32 == allowed
    assert torch.backends.cudnn.allow_tf32, "outside of passes it is the user's"
