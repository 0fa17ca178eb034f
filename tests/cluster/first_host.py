"""Runs on the first of two hosts: answers as one process, then over both, and prints one JSON line for each.

Last it answers until it is stopped, or the other host is gone: it prints "answering", then the error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from beheld import LLM, SamplingParams
from beheld.core.errors import EngineDeadError

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 80}
RANKS = {"distributed_executor_backend": "ray"}
SPLITS: dict[str, dict[str, Any]] = {
    "dp": {"data_parallel_size": 2, "data_parallel_backend": "ray"},
    "pp": {"pipeline_parallel_size": 2, **RANKS},
    "tp": {"tensor_parallel_size": 2, **RANKS},
}


def _tokens(llm: LLM, count: int = 12) -> list[Any]:
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    prompts = ["Hello", "The cat sat on", "One two three"]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)]


def _say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def main(splits: list[str]) -> None:
    """Answer in each split; the last one goes on until it fails."""
    with LLM("mote", **OPTIONS) as llm:
        wanted = _tokens(llm)
    for split in splits:
        with LLM("mote", **OPTIONS, **SPLITS[split]) as llm:
            found: Any = _tokens(llm)
            executor: Any = None if split == "dp" else llm._live().core.executor
            ranks = [] if executor is None else executor._ranks
            _say(split=split, same=found == wanted, hosts=[each.process.host for each in ranks])
            try:
                while split == splits[-1]:
                    _say(answering=True)
                    _tokens(llm, 200)
            except EngineDeadError as error:
                _say(error=str(error))
    _say(ended=True)


if __name__ == "__main__":
    main(sys.argv[1:])
