"""What may lower a process's share of the cores, where the kernel takes the wish and where it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from beheld.utils import cpu_weight
from beheld.utils.cpu_weight import lower_session


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel says of the session of this process, which leads it."""
    file = tmp_path / "autogroup"
    file.write_text("/autogroup-25 nice 0\n")
    monkeypatch.setattr(cpu_weight, "_GROUP", str(file))
    monkeypatch.setattr(os, "getsid", lambda number: os.getpid())
    return file


def test_a_session_is_lowered_and_never_raised(group: Path) -> None:
    assert lower_session(7)
    assert group.read_text() == "7"
    group.write_text("/autogroup-25 nice 12\n")
    assert lower_session(7)
    assert group.read_text() == "/autogroup-25 nice 12\n"


def test_the_session_of_another_process_stays(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getsid", lambda number: os.getpid() + 1)
    assert lower_session(7)
    assert group.read_text() == "/autogroup-25 nice 0\n"


@pytest.mark.parametrize("content", ["", "nothing that is a number"])
def test_words_that_are_not_known_change_nothing(group: Path, content: str) -> None:
    group.write_text(content)
    assert lower_session(7)
    assert group.read_text() == content


def test_without_such_groups_nothing_is_asked_again(group: Path) -> None:
    group.unlink()
    assert lower_session(7)
    assert not group.exists()


def test_a_kernel_that_takes_no_wish_now_is_asked_again(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*given: object, **more: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr("builtins.open", busy)
    assert not lower_session(7)
