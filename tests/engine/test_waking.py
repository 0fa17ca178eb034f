"""The device is made ready beside other work, if there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from beheld.executor.waking import wake


def test_nothing_is_begun_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert wake("auto") is None
    assert wake("cuda") is None


def test_a_device_that_is_not_wanted_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert wake("cpu") is None


def test_what_goes_wrong_is_not_told_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", broken)
    thread = wake("auto")
    assert thread is not None
    thread.join(5)
    assert not thread.is_alive()
