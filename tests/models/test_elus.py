"""ELUs by a hyperbolic tangent: the same numbers, to the last bits, and in float32 alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from beheld.models.surgery.elus import TanhELU, replace_elus
from beheld.models.surgery.operation import Changes


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@torch.inference_mode()
def test_numbers_are_those_of_the_units(alpha: float) -> None:
    """Near zero, where e^x - 1 would cancel, and in more than one part; a strided input too."""
    numbers = torch.cat([torch.randn(70_001) * scale for scale in (1e-30, 1e-7, 1e-3, 1.0, 10.0)])
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38])
    elu, fast = nn.ELU(alpha), TanhELU(nn.ELU(alpha))
    for x in (numbers, ends, numbers.view(5, -1).t(), numbers[:0], numbers[:1].reshape(())):
        wanted = elu(x.double())
        torch.testing.assert_close(fast(x).double(), wanted, rtol=4 * 2**-23, atol=0.0, equal_nan=True)
        assert fast(x).shape == x.shape


@torch.inference_mode()
def test_half_precision_is_computed_as_before() -> None:
    x = torch.randn(100, dtype=torch.bfloat16)
    assert torch.equal(TanhELU(nn.ELU())(x), nn.functional.elu(x))


def test_units_are_replaced_and_come_back() -> None:
    model = nn.Sequential(nn.ELU(0.5), nn.ELU(inplace=True), nn.GELU())
    changes = Changes()
    assert replace_elus(model, changes) == 1
    assert [type(each) for each in model] == [TanhELU, nn.ELU, nn.GELU]
    changes.take_back()
    unit = model[0]
    assert type(unit) is nn.ELU
    assert unit.alpha == 0.5
