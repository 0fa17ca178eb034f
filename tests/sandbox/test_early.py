"""A fork server that begins before its task type is known imports libraries meanwhile, serves the type, or ends."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from beheld.core.errors import ConfigError
from beheld.sandbox.sandbox import Sandbox
from beheld.sandbox.worker_group import ForkServer
from tests.sandbox import tasks
from tests.sandbox.test_sandbox import Pool, gone

# The first is a module that nothing here imports; the second does not exist.
LIBRARIES = ("colorsys", "beheld_has_no_such_module")


def begun(**settings: bool) -> tuple[Pool, int]:
    """A pool whose server is begun early, and that server's id."""
    pool = Pool(1, 96, dict(settings))
    pool.sandbox.begin(tasks.load, LIBRARIES)
    return pool, pool.sandbox._begun[tasks.load].pid


def test_the_type_takes_the_server_that_is_begun() -> None:
    pool, number = begun()
    try:
        assert pool.run(("imported", "colorsys"), 5.0)
        assert pool.server_pid == number
        other = replace(pool.kind, libraries=("wave",))
        assert pool.sandbox.run(other, ("imported", "wave", 5.0))
        assert not pool.sandbox.run(other, ("imported", "colorsys", 5.0))
        assert pool.sandbox.server_pid(other) != number
    finally:
        pool.close()
    assert gone([number], 5.0)


def test_loading_that_refuses_ends_it() -> None:
    pool, number = begun(refuse=True)
    with pytest.raises(ConfigError):
        pool.run(("pid", None), 5.0)
    assert gone([number], 5.0)
    pool.close()


@pytest.mark.parametrize("end", [lambda sandbox: sandbox.abandon(tasks.load), Sandbox.close], ids=["left", "closed"])
def test_one_that_nothing_needs_ends(end: object) -> None:
    pool, number = begun()
    assert callable(end)
    end(pool.sandbox)
    assert gone([number], 5.0)
    pool.close()


def test_libraries_do_not_speak_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some complain that what is set aside was never collected: Triton 3.9 wrote 25 lines below an answer of `ask`."""
    (tmp_path / "beheld_says_goodbye.py").write_text("import atexit\natexit.register(print, 'goodbye')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    server = ForkServer(tasks.load, ("beheld_says_goodbye",))
    # As when its parent has ended.
    server._control.close()
    assert server._process.wait(30) == 0
    assert "goodbye" not in capfd.readouterr().out
