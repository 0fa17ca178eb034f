"""Ten questions about one image, or about one document: what a shared prefix saves models with recurrent layers.

    python -m benchmarks.prefixes [--families qwen3_5,nemotron_h] [--scale 8] [--document 700] [--clock cpu]

Each family's tiny checkpoint, the census's where the oracle has none, with `scale` times the widths and heads, float32,
one thread. A prompt is a document of about `document` tokens, an image for families that read them, and one of ten
questions; for families of text alone, the document ends a turn. The same prompts are asked one by one with and without
prefix caching, each engine with a document that it has not seen. Prints one JSON line a family, then a table:

    question   tokens of a prompt after what all ten have in common, median
    computed   tokens that a question after the first computes (its prompt less what was found), median
    ms         until the first token: of the first question, and the median of the others, with and without
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.families import CLOCKS, make

QUESTIONS = 10
SIZE = (448, 448)
FAMILIES = (
    *("qwen3_5", "lfm2_vl", "lfm3_vl", "minicpmv4_6", "nemotron_h_omni", "nemotron_h", "granitemoehybrid"),
    *("falcon_h1", "bamba", "zamba2", "jamba"),
)
"""What is measured unless families are named: short convolutions, the gated delta rule, Mamba-1 and Mamba-2."""


@dataclass(frozen=True)
class Saved:
    """What a family's prefixes save; see the module."""

    family: str
    image: bool
    prompt: int
    question: int
    computed: int
    found: int
    found_apart: int
    first_ms: float
    next_ms: float
    next_ms_apart: float


def measure(family: str, folder: Path, scale: int, clock: str, document: int = 700) -> Saved:
    """Ask one family; see the module."""
    from beheld import LLM, SamplingParams

    path = folder / family
    own = make(family, path, scale)
    asking, image = _asking(family, path, document)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    found: dict[bool, list[int]] = {}
    taken: dict[bool, list[float]] = {}
    ids: list[Sequence[int]] = []
    for caching in (True, False):
        options: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 28, "disable_log_stats": True}
        options |= own.options()
        with LLM(str(path), dtype="float32", enable_prefix_caching=caching, seed=0, **options) as llm:
            llm.generate([asking(1, "Warm up.")], params, use_tqdm=False)
            found[caching], taken[caching], ids = [], [], []
            for number in range(QUESTIONS):
                question = asking(2, f"{number} is my question: what does all of this show?")
                start = CLOCKS[clock]()
                (output,) = llm.generate([question], params, use_tqdm=False)
                taken[caching].append(1e3 * (CLOCKS[clock]() - start))
                found[caching].append(output.num_cached_tokens or 0)
                ids.append(output.prompt_token_ids or ())
    common = next((place for place, same in enumerate(zip(*ids, strict=False)) if len(set(same)) > 1), 0)
    return Saved(
        family,
        image,
        prompt=round(statistics.median(len(each) for each in ids)),
        question=round(statistics.median(len(each) - common for each in ids)),
        computed=round(statistics.median(len(a) - b for a, b in zip(ids[1:], found[True][1:], strict=True))),
        found=sum(found[True]),
        found_apart=sum(found[False]),
        first_ms=round(taken[True][0], 1),
        next_ms=round(statistics.median(taken[True][1:]), 1),
        next_ms_apart=round(statistics.median(taken[False][1:]), 1),
    )


def _asking(family: str, path: Path, document: int) -> tuple[Callable[[int, str], dict[str, Any]], bool]:
    """Return what makes a prompt of a seed and a question, and whether it has an image."""
    from tests import census, census_media, tiny

    # After the module of checkpoints, which reads it.
    from tests.oracle.cases import Ask
    from tests.oracle.test_oracle import request

    if family in tiny.IMAGE_FAMILIES:
        words = _words(path, document)
        return lambda seed, text: request(family, Ask(f"{seed} {words}{{i}}{text}", ((*SIZE, seed),))), True
    recipe = census.RECIPES.get(family)
    if recipe is None:
        return _turns(path, document), False
    if not recipe.image:
        raise LookupError(f"{family} reads no images")
    words = _words(path, document)

    def asked(seed: int, text: str) -> dict[str, Any]:
        made = census_media.request(recipe, [tiny.picture(*SIZE, seed)])
        return made | {"prompt": f"{seed} {words} {made['prompt']} {text}"}

    return asked, True


def _words(path: Path, document: int) -> str:
    """Return a text of about so many tokens."""
    from tokenizers import Tokenizer

    from tests.oracle.cases import LONG_TEXT

    once = f"{LONG_TEXT} "
    read = Tokenizer.from_file(str(path / "tokenizer.json"))
    return once * max(1, document // len(read.encode(once, add_special_tokens=False)))


def _turns(path: Path, document: int) -> Callable[[int, str], dict[str, Any]]:
    """Return what makes a prompt of ids: a document, the token that ends a turn, and a question."""
    import torch

    end = None
    for name in ("generation_config.json", "config.json"):
        stated = json.loads((path / name).read_text(encoding="utf-8")) if (path / name).is_file() else {}
        end = stated.get("eos_token_id") if end is None else end
    ends = end if isinstance(end, list) else [] if end is None else [end]

    def asked(seed: int, text: str) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        made = torch.randint(3, 400, (document,), generator=generator).tolist()
        kept = [token for token in made if token not in ends]
        # One id a letter: what is asked does not matter.
        return {"prompt_token_ids": [*kept, *ends[:1], *(3 + ord(letter) % 397 for letter in text)]}

    return asked


def table(rows: Sequence[Saved]) -> str:
    """Markdown."""
    head = "| family | about | prompt | question | computed | first, ms | others, ms | others without, ms |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        about = "an image and a text" if row.image else "a text"
        counts = f"{row.prompt} | {row.question} | {row.computed}"
        times = f"{row.first_ms:.0f} | **{row.next_ms:.0f}** | {row.next_ms_apart:.0f}"
        lines.append(f"| {row.family} | {about} | {counts} | {times} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--document", type=int, default=700)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="cpu")
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for family in given.families.split(","):
        with tempfile.TemporaryDirectory(prefix="beheld-prefixes-") as folder:
            try:
                rows.append(measure(family, Path(folder), given.scale, given.clock, given.document))
            except LookupError as error:
                sys.exit(str(error))
        print(json.dumps(asdict(rows[-1])), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
