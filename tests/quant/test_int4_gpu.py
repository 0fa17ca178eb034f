"""Weights of 4 bits on a GPU: the kernels in Triton's interpreter, and what is kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from beheld.platform import cuda
from beheld.platform.triton import HAS_TRITON
from beheld.quant.gguf import GGUF
from beheld.quant.grouped import GroupedForm, affine, rounded
from beheld.quant.int4_gpu import Int4GPULinear, fits, packed, unpacked
from beheld.quant.kept_groups import KeptGroups
from beheld.quant.linear import join, same_form
from beheld.quant.method import StorageTarget
from tests import interpreted

CASES = Path(__file__).with_name("int4_interpreted.py")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_kernels() -> None:
    interpreted.run(CASES)


def test_numbers_are_kept_exactly_joined_and_cut() -> None:
    torch.manual_seed(0)
    whole = torch.randint(0, 16, (48, 256), dtype=torch.uint8)
    for inputs in (256, 224, 32):
        part = whole[:, :inputs].contiguous()
        assert torch.equal(unpacked(packed(part), inputs), part)
    # A scale of float16 and a zero point, as AWQ and GPTQ have them.
    numbers = affine(whole, torch.randint(0, 16, (48, 2)), torch.rand(48, 2).half(), 4)
    layer = Int4GPULinear(numbers, torch.randn(48), torch.bfloat16)
    found = layer.numbers
    assert torch.equal(found.numbers_NK, whole)
    assert torch.equal(found.scale_NG, numbers.scale_NG)
    torch.testing.assert_close(found.low_NG, numbers.low_NG, rtol=2.0**-11, atol=0.0)
    other = Int4GPULinear(rounded(torch.randn(32, 256), 4, 128), None, torch.bfloat16)
    assert same_form([layer, other])
    both = join([layer, other])
    assert isinstance(both, Int4GPULinear)
    assert torch.equal(both.part(slice(0, 48)).numbers.numbers_NK, whole)
    restored = layer.restored()
    assert isinstance(restored, nn.Linear)
    assert torch.equal(restored.weight, found.dequantized().bfloat16())
    turned = affine(whole, 8, torch.ones(48, 2), 4, torch.randperm(256))
    ordered = Int4GPULinear(turned, None, torch.bfloat16)
    assert not same_form([layer, ordered])


def test_what_is_kept_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def objection(dtype: torch.dtype = torch.float16) -> str | None:
        return KeptGroups(StorageTarget("cuda", dtype)).objection

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(cuda, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # AWQ's and GPTQ's checkpoints are mostly of float16.
    assert objection() is objection(torch.bfloat16) is None
    # A file's tied head would need a product on a GPU that is there for CPUs alone.
    assert GGUF(StorageTarget("cuda", torch.bfloat16)).stored_bytes(Path("none"), None, lambda model: model) is None
    # Experts are dequantized there, and what memory is needed counts them so.
    weight = SimpleNamespace(outputs=64, form=GroupedForm(4, 256, 2))
    names = "layers.0.mlp.down_proj.weight", "layers.0.mlp.experts.3.down_proj.weight"
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(256, 64, bias=False, dtype=torch.float16) for _ in names])
    kept = KeptGroups(StorageTarget("cuda", torch.float16))
    assert kept.stored_bytes(dict.fromkeys(names, weight), model) == 64 * 256 * 2 + weight.form.kept_bytes(64)
    monkeypatch.setenv("BEHELD_INT4_ON_GPU", "0")
    assert objection() == "BEHELD_INT4_ON_GPU=0"
    monkeypatch.delenv("BEHELD_INT4_ON_GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert "below 8.0" in str(objection())


def test_what_the_kernel_takes() -> None:
    assert fits(GroupedForm(4, 256, 2), 48)
    assert not fits(GroupedForm(8, 256, 2), 48)
    assert not fits(GroupedForm(4, 256, 16), 48)
    assert not fits(GroupedForm(4, 256, 2), 40)
