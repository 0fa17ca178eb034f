"""How much a test does: little in CI, all of it with BEHELD_LONG=1, and a share of that with BEHELD_LONG_SCALE."""

from __future__ import annotations

import os

LONG = os.environ.get("BEHELD_LONG", "") not in ("", "0")
SCALE = float(os.environ.get("BEHELD_LONG_SCALE", "1"))


def sized(short: int, whole: int) -> int:
    """A count: `short` in CI; in the long form `whole` or the scale's share of it, but not less than `short`."""
    return max(short, round(whole * SCALE)) if LONG else short


def lasting_s(short_s: float, whole_s: float) -> float:
    """A duration, as `sized`."""
    return max(short_s, whole_s * SCALE) if LONG else short_s
