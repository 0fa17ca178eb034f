"""What people see at a terminal, and what files get."""

from __future__ import annotations

import io
import logging

import pytest

from beheld.api.run import Bars
from beheld.cli.main import _set_log_level, build_parser
from beheld.core.outputs import CompletionOutput, RequestOutput
from beheld.utils import env, log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The logger, which is put back, and no variable."""
    found = logging.getLogger("beheld")
    monkeypatch.setattr(found, "propagate", found.propagate)
    level = found.level
    for name in ("BEHELD_LOG_LEVEL", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    yield found
    found.setLevel(level)


@pytest.mark.parametrize(
    ("stderr", "variable", "level"),
    [
        (Terminal, None, "WARNING"),
        (io.StringIO, None, "INFO"),
        (Terminal, "INFO", "INFO"),
        (io.StringIO, "WARNING", "WARNING"),
    ],
)
def test_a_terminal_is_quiet_and_a_file_is_not(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, stderr: type[io.StringIO], variable: str | None, level: str
) -> None:
    shown = stderr()
    monkeypatch.setattr("sys.stderr", shown)
    # As before the first call; the tests' own handler is put back.
    monkeypatch.setattr(root, "handlers", [])
    if variable is not None:
        monkeypatch.setenv("BEHELD_LOG_LEVEL", variable)
    log.get_logger("beheld.x").info("a line")
    log.headline("one line at start")
    assert logging.getLevelName(root.level) == level
    assert ("a line" in shown.getvalue()) == (level == "INFO")
    assert ("one line at start" in shown.getvalue()) == (level != "INFO" and stderr is Terminal)


@pytest.mark.parametrize(
    ("words", "stderr", "given", "level"),
    [
        (["ask", "x"], io.StringIO, None, "WARNING"),
        (["ask", "x", "-v"], io.StringIO, None, "INFO"),
        (["ask", "x", "-v"], io.StringIO, "WARNING", "INFO"),
        (["ask", "x", "-v"], io.StringIO, "DEBUG", "DEBUG"),
        (["ask", "x"], io.StringIO, "DEBUG", "DEBUG"),
        (["serve"], Terminal, None, "INFO"),
        (["serve"], Terminal, "ERROR", "ERROR"),
        (["run-vllm", "x.py"], Terminal, None, "INFO"),
        (["doctor"], io.StringIO, None, "WARNING"),
        (["models"], Terminal, None, ""),
    ],
)
def test_commands_choose_what_is_logged(
    root: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    stderr: type[io.StringIO],
    given: str | None,
    level: str,
) -> None:
    monkeypatch.setattr("sys.stderr", stderr())
    # Set through monkeypatch first, which puts back what the command sets.
    monkeypatch.setenv("BEHELD_LOG_LEVEL", given or "")
    _set_log_level(build_parser().parse_args(words))
    assert env.LOG_LEVEL() == level


@pytest.mark.parametrize("stderr", [Terminal, io.StringIO])
def test_bars_in_a_file_hold_no_codes(monkeypatch: pytest.MonkeyPatch, stderr: type[io.StringIO]) -> None:
    monkeypatch.setattr("sys.stderr", stderr())
    shown = stderr()
    monkeypatch.setattr("sys.stderr", shown)
    bars = Bars(2, True)
    answer = RequestOutput("x", None, [1], [CompletionOutput(0, "y", [2], None, None)], finished=True)
    for _ in range(2):
        bars.added()
    for _ in range(2):
        bars.finished(answer)
    bars.close()
    text = shown.getvalue()
    assert "Adding requests: 100%" in text
    assert "Processed prompts: 100%" in text
    assert ("\x1b" in text) == (stderr is Terminal)
