"""Which backend a device gets, and that the choice is said."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from beheld.attention.select import select, select_tower
from beheld.core.errors import ConfigError
from beheld.platform.cuda import Cuda
from beheld.platform.registry import CPU, platform_of
from beheld.platform.triton import HAS_TRITON


class OnCpu(Cuda):
    """A GPU whose kernels are tried on the CPU."""

    device = torch.device("cpu")


def test_a_cpu_gets_the_reference() -> None:
    assert select(CPU, None).name == select(CPU, "torch").name == "torch"
    with pytest.raises(ConfigError, match="'triton' does not exist for cpu"):
        select(CPU, "triton")


def test_what_only_plain_pytorch_computes_gets_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "a learned bias by distance is added to its scores"
    monkeypatch.setattr(logging.getLogger("beheld"), "propagate", True)
    with caplog.at_level(logging.INFO, "beheld"):
        assert select(platform_of("cuda"), None, "nowhere", reason).name == "torch"
    assert f"'torch': {reason}" in caplog.text
    with pytest.raises(ConfigError, match=f"'triton' does not exist for cuda and this model: {reason}"):
        select(platform_of("cuda"), "triton", "nowhere", reason)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_a_gpu_gets_triton_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("beheld"), "propagate", True)
    with caplog.at_level(logging.INFO, "beheld"):
        assert select(platform_of("cuda"), None).name == "triton"
    assert "'triton': the device is cuda" in caplog.text
    assert select(platform_of("cuda"), "torch").name == "torch"


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("beheld.platform.cuda.HAS_TRITON", False)
    platform = Cuda()
    monkeypatch.setattr(logging.getLogger("beheld"), "propagate", True)
    with caplog.at_level(logging.INFO, "beheld"):
        assert select(platform, None).name == "torch"
    assert "not installed" in caplog.text
    with pytest.raises(ConfigError, match="needs the package triton"):
        select(platform, "triton")


class Installed:
    """Stands for FlashAttention-3's module: what it computes, and how often it was asked."""

    def __init__(self, off: float = 0.0, where: str = "everywhere") -> None:
        self.off, self.where = off, where

    def flash_attn_varlen_func(self, q: Any, k: Any, v: Any, *bounds: Any, softmax_scale: float, **how: Any) -> Any:
        off = self.off if self.where in ("everywhere", "text" if how["causal"] else "windows") else 0.0
        return packed(q, k, v, bounds[0], softmax_scale, how["causal"]) + off, "sums"


def packed(q: Any, k: Any, v: Any, bounds: Any, scale: float, causal: bool) -> Any:
    """What FlashAttention gives: each sequence alone."""
    parts = []
    for first, last in itertools.pairwise(bounds.tolist()):
        heads = (x[first:last].transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=causal, scale=scale, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize(
    ("off", "where", "capability", "used"),
    [
        (0.0, "everywhere", (9, 0), "flash"),
        (0.5, "everywhere", (9, 0), "triton"),
        (0.5, "text", (9, 0), "triton"),
        (0.5, "windows", (9, 0), "triton"),
        (0.0, "everywhere", (8, 9), "triton"),
    ],
)
def test_flash_attention_where_it_is_installed_and_right(
    off: float,
    where: str,
    capability: tuple[int, int],
    used: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from beheld.attention import flash

    monkeypatch.setattr(flash.importlib.util, "find_spec", lambda name: name == "fa3_fwd_interface" or None)
    monkeypatch.setattr(flash.importlib, "import_module", lambda name: Installed(off, where))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(logging.getLogger("beheld"), "propagate", True)
    platform = OnCpu()
    with caplog.at_level(logging.INFO, "beheld"):
        assert select(platform, None).name == used
        assert select(platform, "triton").name == "triton"
        towers = {wanted: select_tower(platform, wanted) for wanted in (None, "triton", "torch")}
        assert towers == {None: used, "triton": "triton", "torch": "torch"}
        assert select_tower(CPU, None) == "torch"
    assert ("results are wrong" in caplog.text) == bool(off)
    assert ("FlashAttention-3 is installed, and" in caplog.text) == (used == "flash")


def test_a_build_without_some_heads_leaves_these_to_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from beheld.attention import flash

    def attend(q: Any, k: Any, v: Any, bounds: Any, scale: float, *, causal: bool = False, softcap: float = 0.0) -> Any:
        if q.shape[2] == 256 or softcap:
            raise RuntimeError("not built")
        return packed(q, k, v, bounds, scale, causal)

    monkeypatch.setattr(flash, "installed", lambda platform: attend)
    monkeypatch.setattr(logging.getLogger("beheld"), "propagate", True)
    platform = OnCpu()
    assert flash.computes(platform, 128, 8, 0.0)
    assert flash.computes(platform, 80, 1, 0.0)
    assert not flash.computes(platform, 84, 1, 0.0)
    with caplog.at_level(logging.WARNING, "beheld"):
        assert not flash.computes(platform, 256, 2, 0.0)
        assert not flash.computes(platform, 128, 8, 30.0)
    assert {record.args[0] for record in caplog.records} == {256, 128}  # type: ignore[index]
