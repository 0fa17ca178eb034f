"""Operators of ours: what torch.compile learns of their results, and what registering them costs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from beheld.platform import operators


def _doubled(x: Tensor, times: int) -> Tensor:
    return torch.cat([x] * times, -1)


def _doubled_shape(x: Tensor, times: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], times * x.shape[-1]))


def test_an_operator_is_registered_without_a_look_through_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*given: Any, **options: Any) -> None:
        raise AssertionError("all imported modules were looked through")

    with monkeypatch.context() as watched:
        watched.setattr(inspect, "getmodule", looked)
        operators.register("test_doubled(Tensor x, int times) -> Tensor", _doubled, _doubled_shape)
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.ops.beheld.test_doubled(x, 2), _doubled(x, 2))
    # Without memory, and with a size that compiled code takes from each call.
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = mode.from_tensor(x)
        assert torch.ops.beheld.test_doubled(fake, 2).shape[-1] == 6
        assert torch.ops.beheld.test_doubled(fake, 2).device == x.device

    def called(given: Tensor) -> Tensor:
        found: Tensor = torch.ops.beheld.test_doubled(given, 2) + 1
        return found

    graphs: list[Any] = []

    def keeping(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(called, backend=keeping, fullgraph=True, dynamic=True)
    for rows in (2, 5):
        given = torch.randn(rows, 3)
        assert torch.equal(compiled(given), called(given))
    assert len(graphs) == 1
