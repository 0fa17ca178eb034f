"""What NCCL reads from the environment is there while groups use it, and not longer."""

from __future__ import annotations

import datetime
import os
from typing import Any

import pytest
import torch

from beheld.core.errors import ConfigError
from beheld.platform.nccl import NCCL, Nccl
from beheld.platform.registry import platform_of
from beheld.utils.held_variables import HeldVariables

NAMES = ("NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE", "TORCH_NCCL_ENABLE_MONITORING")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        # Set first, so that it is restored as it was.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_the_last_group_takes_back_what_was_set_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    held = HeldVariables()
    variables = Nccl(held)
    variables.hold("eth0")
    variables.hold("eth0")
    assert [os.environ[name] for name in NAMES] == ["eth0", "1", "0"]
    # Another host's interface may have another name.
    assert held.has_set("NCCL_SOCKET_IFNAME", "eth0")
    assert not held.has_set("NCCL_NVLS_ENABLE", "1")
    variables.leave()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "1"
    variables.leave()
    assert [os.environ.get(name) for name in NAMES] == [None, "1", "1"]


def test_another_interface_than_the_one_that_nccl_keeps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on this host alone may follow one on several."""
    variables = Nccl(HeldVariables())
    variables.hold("eth0")
    variables.leave()
    variables.hold("lo")
    variables.leave()
    variables = Nccl(HeldVariables())
    variables.hold("lo")
    variables.leave()
    with pytest.raises(ConfigError, match=r"need eth0.*new process"):
        variables.hold("eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    variables.hold("eth0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
    variables.leave()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"


def test_a_group_is_torch_s_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NCCL is here: torch's class of that name gets what torch documents."""

    class Made:
        class Options:
            _timeout: Any = None

        def __init__(self, store: Any, rank: int, size: int, options: Made.Options) -> None:
            self.given = (store, rank, size, options._timeout)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Made, raising=False)
    store, limit = object(), datetime.timedelta(minutes=3)
    assert Nccl(HeldVariables()).group(store, 1, 2, limit).given == (store, 1, 2, limit)


def test_gpus_use_it_unless_ranks_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEHELD_ONE_GPU", raising=False)
    assert platform_of("cuda").collectives is NCCL
    monkeypatch.setenv("BEHELD_ONE_GPU", "1")
    assert platform_of("cuda").collectives is None
    assert platform_of("cpu").collectives is None
