"""dtype="float16" on a CPU without such products is computed in float32, "bfloat16" slowly, and the log says so."""

from __future__ import annotations

import pytest

from beheld.core.config import EngineArgs
from beheld.engine.setup import resolve_and_decide
from beheld.platform import host
from tests import tiny


@pytest.mark.parametrize("asked", ["float16", "half", "torch.float16"])
@pytest.mark.parametrize(("flags", "found"), [("avx2 avx512_bf16", "float32"), ("avx512_fp16", "float16")])
def test_float16_is_computed_where_there_are_products_of_it(
    asked: str, flags: str, found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    args = EngineArgs(model=str(tiny.checkpoint("qwen2")), device="cpu", dtype=asked)
    with caplog.at_level("WARNING", logger="beheld"):
        assert resolve_and_decide(args).config.dtype == found
    assert ("is computed in float32" in caplog.text) == (found == "float32")


@pytest.mark.parametrize(("flags", "slow"), [("avx2", True), ("avx2 avx512_bf16", False)])
def test_a_slow_type_is_told(
    flags: str, slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    args = EngineArgs(model=str(tiny.checkpoint("qwen2")), device="cpu", dtype="bfloat16")
    with caplog.at_level("WARNING", logger="beheld"):
        assert resolve_and_decide(args).config.dtype == "bfloat16"
    assert ("dtype='bfloat16' is slow" in caplog.text) == slow
