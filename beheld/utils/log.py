"""The loggers of beheld, and a way to log a message only once."""

from __future__ import annotations

import logging
import sys

from beheld.utils import env

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"


def get_logger(name: str) -> logging.Logger:
    """A logger below "beheld". The first call sets the handler (standard error) and the level (BEHELD_LOG_LEVEL)."""
    root = logging.getLogger("beheld")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(env.LOG_LEVEL())
        root.propagate = False
    return logging.getLogger(name if name.startswith("beheld") else f"beheld.{name}")


_said: set[str] = set()


def once(logger: logging.Logger, level: int, message: str) -> None:
    """Log `message` once per process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)
