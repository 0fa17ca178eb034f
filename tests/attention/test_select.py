"""Which backend a device gets, and that the choice is said."""

from __future__ import annotations

import importlib.util
import logging

import pytest

from beheld.attention import select as module
from beheld.attention.select import select
from beheld.core.errors import ConfigError

has_triton = importlib.util.find_spec("triton") is not None


def test_a_cpu_gets_the_reference() -> None:
    assert select("cpu", None).name == select("cpu", "torch").name == "torch"
    with pytest.raises(ConfigError, match="'triton' for cpu"):
        select("cpu", "triton")


@pytest.mark.skipif(not has_triton, reason="triton is not installed")
def test_a_gpu_gets_triton_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("beheld"), "propagate", True)
    with caplog.at_level(logging.INFO, "beheld"):
        assert select("cuda", None).name == "triton"
    assert "'triton': the device is cuda" in caplog.text
    assert select("cuda", "torch").name == "torch"


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "HAS_TRITON", False)
    monkeypatch.setattr(logging.getLogger("beheld"), "propagate", True)
    with caplog.at_level(logging.INFO, "beheld"):
        assert select("cuda", None).name == "torch"
    assert "not installed" in caplog.text
    with pytest.raises(ConfigError, match="needs the package triton"):
        select("cuda", "triton")
