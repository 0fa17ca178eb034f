"""A module that multiplies a layer's weight itself is found by the code of its forward, and the text of few is read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import linear

from beheld.models.surgery import linears


class Calls(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * self.scale.weight


class Itself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.proj.weight)


class Imported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.proj.weight, self.proj.bias)


class Within(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return [(lambda y: F.linear(y, self.proj.weight))(row) for row in x]


class Given(nn.Module):
    def forward(self, x: Tensor, linear: Callable[..., Tensor] = F.linear) -> Tensor:
        return linear(x, self.proj.weight)


def _wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def around(*given: Any) -> Any:
        return forward(*given)

    return around


class Wrapped(nn.Module):
    @_wrapped
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.proj.weight)


@pytest.mark.parametrize(
    ("kind", "reads"),
    [(Calls, False), (Itself, True), (Imported, True), (Within, True), (Given, True), (Wrapped, True)],
)
def test_a_weight_that_forward_multiplies_is_found(kind: type[nn.Module], reads: bool) -> None:
    assert linears._reads(kind(), "proj") is reads
    assert not linears._reads(kind(), "scale")


def test_the_text_is_not_read_where_no_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "forward_text", lambda kind: pytest.fail("read"))
    assert not linears._reads(Calls(), "proj")
