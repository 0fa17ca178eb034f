"""All operators are registered from one file, so that PyTorch looks for one file among all modules at a start."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import beheld
from beheld.platform import operators


def _twice(x: Tensor, size: int) -> Tensor:
    return torch.cat([x, x])[:size]


def _twice_shape(x: Tensor, size: int) -> Tensor:
    return x.new_empty((size, *x.shape[1:]))


def test_an_operator_is_computed_and_described() -> None:
    operators.register("tests_twice(Tensor x, int size) -> Tensor", _twice, _twice_shape)
    assert torch.ops.beheld.tests_twice(torch.tensor([1, 2]), 3).tolist() == [1, 2, 1]
    with FakeTensorMode():
        described = torch.ops.beheld.tests_twice(torch.empty(4, 5), 3)
    assert described.shape == (3, 5)


def test_no_other_file_registers_operators() -> None:
    home = Path(beheld.__file__).parent
    found = [path.relative_to(home) for path in home.rglob("*.py") if "torch.library" in path.read_text("utf-8")]
    assert found == [Path("platform/operators.py")]
