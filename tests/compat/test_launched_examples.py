"""vLLM's own scripts that start ranks, or that torchrun starts, as they stand; their folder may be absent."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.compat import examples
from tests.compat.stage import Stage
from tests.long import LONG

NAMED = os.environ.get("BEHELD_VLLM_EXAMPLES", "")
PROMPTS = ("Hello, my name is", "The president of the United States is", "The capital of France is")
# Older and newer names.
EXAMPLE = ("torchrun_example.py", "torchrun_example_offline.py")
ENGINES = ("torchrun_dp_example.py", "torchrun_dp_example_offline.py")
PARALLEL = ("data_parallel.py", "data_parallel_offline.py")

pytestmark = [
    pytest.mark.skipif(not NAMED, reason="BEHELD_VLLM_EXAMPLES names no folder of vLLM's examples"),
    pytest.mark.skipif(not LONG, reason="starts up to five processes each; BEHELD_LONG=1 runs it"),
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return examples.stage(tmp_path_factory.mktemp("stage"))


def ran(stage: Stage, names: tuple[str, ...], words: str = "", processes: int | None = None) -> str:
    """What the script prints."""
    found = [path for name in names for path in sorted(Path(NAMED).rglob(name))]
    if not found:
        pytest.skip(f"no {names[0]} below {NAMED}")
    row = examples.run(stage, found[0], names[0], words, processes=processes)
    assert row.result == "ran", row
    return row.printed


def test_ranks_of_torchrun(stage: Stage) -> None:
    """One of them prints the answers, which are the same in all."""
    printed = ran(stage, EXAMPLE)
    assert [prompt for prompt in PROMPTS if printed.count(f"Prompt: {prompt!r}\n") == 1] == list(PROMPTS)
    assert printed.count("Generated text: ") == 4


@pytest.mark.parametrize(("words", "processes", "each"), [("", 2, 1), ("--tp-size=2 --dp-size=2 --enable-ep", 4, 2)])
def test_engines_of_torchrun(stage: Stage, words: str, processes: int, each: int) -> None:
    """Each prompt is answered by one engine; all of an engine's processes print its answers."""
    printed = ran(stage, ENGINES, words, processes)
    found = Counter(re.findall(r"DP Rank: (\d) Prompt: '(\d)\.", printed))
    assert found == {(str(number % 2), str(number)): each for number in range(4)}


def test_ranks_that_the_script_starts(stage: Stage) -> None:
    # The newer one has the engine's flags.
    size = "--dp-size=2" if list(Path(NAMED).rglob(PARALLEL[0])) else "-dp=2"
    words = f"--model facebook/opt-125m {size} --enforce-eager --max-model-len=512"
    printed = ran(stage, PARALLEL, words)
    assert {"DP rank 0", "DP rank 1"} <= set(re.findall(r"DP rank \d", printed))
