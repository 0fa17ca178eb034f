"""The loggers of beheld, what is shown without them, and a way to log a message only once."""

from __future__ import annotations

import logging
import sys

from beheld.utils import env

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_NAME = "beheld"


def get_logger(name: str) -> logging.Logger:
    """A logger below "beheld". The first call sets the handler (standard error) and the level.

    Without BEHELD_LOG_LEVEL the level is INFO, or WARNING where standard error is a terminal, which people read.
    """
    root = logging.getLogger(_NAME)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
        apply_level()
    return logging.getLogger(name if name.startswith(_NAME) else f"{_NAME}.{name}")


def apply_level() -> None:
    """Take the level from the environment, also where it was set after the first logger was made."""
    logging.getLogger(_NAME).setLevel(env.LOG_LEVEL() or ("WARNING" if at_terminal() else "INFO"))


def at_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def headline(text: str) -> None:
    """Show one line at a terminal where the log is quiet."""
    if at_terminal() and not get_logger(_NAME).isEnabledFor(logging.INFO):
        print(text, file=sys.stderr, flush=True)


_said: set[str] = set()


def once(logger: logging.Logger, level: int, message: str) -> None:
    """Log `message` once per process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)
