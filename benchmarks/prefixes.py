"""Ten questions about one image on a CPU: what a shared prefix saves a model with recurrent layers.

    python -m benchmarks.prefixes [--family qwen3_5] [--scale 8] [--clock cpu]

The family's tiny checkpoint, the census's where the oracle has none, with `scale` times the widths and heads, float32,
one thread. The same questions are asked one by one with and without prefix caching, each engine with an image of its
own that it has not seen. Prints one JSON line: milliseconds of the first question and of the median of the others until
the first token, with and without, and the prompt tokens that were found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.families import CLOCKS, make

QUESTIONS = 10
SIZE = (448, 448)


def measure(family: str, folder: Path, scale: int, clock: str) -> dict[str, Any]:
    """Return the figures; see above."""
    from beheld import LLM, SamplingParams

    path, now = folder / family, CLOCKS[clock]
    own = make(family, path, scale)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    made: dict[str, Any] = {"family": family, "scale": scale}
    for caching in (True, False):
        options: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 28, "disable_log_stats": True}
        options |= own.options()
        with LLM(str(path), dtype="float32", enable_prefix_caching=caching, seed=0, **options) as llm:
            llm.generate([_question(family, 1, "Warm up.")], params, use_tqdm=False)
            taken, found, asked = [], 0, 0
            for number in range(QUESTIONS):
                question = _question(family, 2, f"Question {number}: what is in this image?")
                start = now()
                (output,) = llm.generate([question], params, use_tqdm=False)
                taken.append(1e3 * (now() - start))
                found += output.num_cached_tokens or 0
                asked += len(output.prompt_token_ids or ())
        name = "shared" if caching else "apart"
        made |= {f"first_ms_{name}": round(taken[0], 1), f"next_ms_{name}": round(statistics.median(taken[1:]), 1)}
        made |= {f"prompt_tokens_{name}": asked, f"found_{name}": found}
    return made


def _question(family: str, seed: int, text: str) -> dict[str, Any]:
    """Return a prompt of one image, made of a seed, and a text."""
    from tests import census, census_media, tiny

    # After the module of checkpoints, which reads it.
    from tests.oracle.cases import Ask
    from tests.oracle.test_oracle import request

    if family in tiny.IMAGE_FAMILIES:
        return request(family, Ask("{i}" + text, ((*SIZE, seed),)))
    recipe = census.RECIPES.get(family)
    assert recipe is not None, f"{family} has no tiny checkpoint that reads images"
    assert recipe.image, f"{family} reads no images"
    made = census_media.request(recipe, [tiny.picture(*SIZE, seed)])
    return made | {"prompt": f"{made['prompt']} {text}"}


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen3_5")
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="cpu")
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="beheld-prefixes-") as folder:
        print(json.dumps(measure(given.family, Path(folder), given.scale, given.clock)), flush=True)


if __name__ == "__main__":
    main()
