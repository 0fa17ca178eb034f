"""Far more requests than can be answered: what still is, how soon the others are told, and what is left (case 65)."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.long import lasting_s
from tests.server.running import Reachable, serving
from tests.server.slowness import slowness

pytestmark = pytest.mark.alone

ROWS, PLACES, TOKENS, TIMES = 4, 8, 40, 10
GOODPUT, REFUSED_S, RECOVERED_S = 0.9, 0.050, 5.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reachable]:
    """Four sequences run and four more may wait; the engine has a process of its own, as with a GPU.

    The server has one too. In a thread of a process in which thousands of tests had run before, it answered 0.74 of the
    peak beyond it, and 0.9 to 1 of it in one in which none had.
    """
    flags = {
        "engine": "process",
        "dtype": "float32",
        "max-num-seqs": str(ROWS),
        "max-concurrent-requests": str(PLACES),
        "num-gpu-blocks-override": "600",
        "max-model-len": "2048",
    }
    with serving(tiny.checkpoint("llama"), flags, tmp_path_factory.mktemp("overload") / "log") as (_, port):
        found = Reachable(port)
        yield found
        found.close()


def crowd(running: Reachable, how: str, number: float, seconds: float) -> dict[str, Any]:
    """See `crowd.py`."""
    script = Path(__file__).with_name("crowd.py")
    words = [str(word) for word in (running.port, how, number, seconds, TOKENS)]
    done = subprocess.run([sys.executable, "-I", str(script), *words], capture_output=True, check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["wrong"], found["wrong"][:3]
    return found


def per_s(found: dict[str, Any]) -> float:
    return len(found["answered"]) / float(found["seconds"])


def test_65_ten_times_too_much_leaves_what_can_be_answered(small: Reachable) -> None:
    """Ten times the peak is offered: nine tenths of the peak are answered, the others are told within 50 ms (median) to
    come back, none fails otherwise, the queue keeps its bound, and within 5 s all is as before.

    What else runs on the machine takes from each figure: the best of some rounds is compared with the middle one of the
    peaks, of which one may have had more of the machine than any crowd. A minute each in the long form. On a slower
    machine the 50 ms are as much longer as Python is slower.
    """
    seconds = lasting_s(1.5, 60.0)
    crowd(small, "closed", PLACES, 0.3)
    peaks: list[float] = []
    goodputs: list[float] = []
    refused_s: list[float] = []
    for _ in range(6):
        peak = crowd(small, "closed", PLACES, seconds)
        assert not peak["refused"], "so many at once have a place each"
        peaks.append(per_s(peak))
        found = crowd(small, "open", TIMES * statistics.median(peaks), seconds)
        recovered(small)
        assert len(found["refused"]) > 2 * len(found["answered"]), "far more than can be answered was to be offered"
        goodputs.append(per_s(found))
        refused_s.append(statistics.median(found["refused"]) / slowness())
        if max(goodputs) >= GOODPUT * statistics.median(peaks) and min(refused_s) < REFUSED_S:
            break
    else:
        pytest.fail(f"peaks {peaks}, answered beyond {goodputs}, seconds until a refusal {refused_s}")


def recovered(running: Reachable) -> None:
    """Soon after the last of a crowd, a single client is answered and nothing is left."""
    begin = time.monotonic()
    while (answer := running.post("/v1/completions", {"prompt": "x", "max_tokens": 1})).status_code != 200:
        assert answer.status_code == 503, answer.text
        assert time.monotonic() - begin < RECOVERED_S
        time.sleep(0.02)
    assert time.monotonic() - begin < RECOVERED_S
    running.idle(RECOVERED_S)
