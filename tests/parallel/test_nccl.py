"""What NCCL reads from the environment is there while groups use it, and not longer."""

from __future__ import annotations

import os

import pytest

from beheld.core.errors import ConfigError
from beheld.parallel.nccl import NcclVariables
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
    variables = NcclVariables(held)
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
    variables = NcclVariables(HeldVariables())
    variables.hold("eth0")
    variables.leave()
    variables.hold("lo")
    variables.leave()
    variables = NcclVariables(HeldVariables())
    variables.hold("lo")
    variables.leave()
    with pytest.raises(ConfigError, match=r"need eth0.*new process"):
        variables.hold("eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    variables.hold("eth0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
    variables.leave()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"
