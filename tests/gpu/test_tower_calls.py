"""Tower calls that read back from the device: found out without a capture, and no memory is lost after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from beheld.models.call_graphs import CallGraphs
from beheld.platform import cuda
from beheld.platform.registry import platform_of

DEVICE = torch.device("cuda")


def reading(inputs: Mapping[str, Tensor]) -> Tensor:
    first = inputs["x"].flatten()[:1].tolist()
    return inputs["x"] * 2 + 0 * len(first)


def waiting_in_a_capture(inputs: Mapping[str, Tensor]) -> Tensor:
    """As what is not found out before."""
    return reading(inputs) if torch.cuda.is_current_stream_capturing() else inputs["x"] * 2


def doubled(inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs["x"] * 2


def new_pictures(count: int) -> None:
    """Each goes up beside the computing stream and is used there; 4 MiB, as a model's."""
    upload = platform_of(DEVICE).uploader(DEVICE)
    host = torch.ones(1 << 20)
    for _ in range(count):
        upload(host).mul_(2)


@pytest.mark.parametrize("compute", [reading, waiting_in_a_capture])
@torch.inference_mode()
def test_no_memory_is_lost_and_other_kinds_are_captured(compute: Callable[[Mapping[str, Tensor]], Tensor]) -> None:
    graphs, x = CallGraphs(cuda.CudaGraphs()), torch.ones(64, 8, device=DEVICE)
    abandoned = len(cuda._abandoned)
    for _ in range(6):
        assert torch.equal(graphs("image", 64, {"x": x}, compute), x * 2)
    if compute is reading:
        assert len(cuda._abandoned) == abandoned, "no capture was begun"
    new_pictures(20)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    new_pictures(500)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before < 64 << 20
    for _ in range(6):
        assert torch.equal(graphs("audio", 64, {"x": x}, doubled), x * 2)
    assert list(graphs._captured) == [64]
    assert torch.cuda.get_sync_debug_mode() == 0
