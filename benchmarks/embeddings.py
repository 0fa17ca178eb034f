"""Embeddings on the CPU: texts per second, beside transformers as sentence-transformers calls it.

    python -m benchmarks.embeddings FOLDER --texts 256

FOLDER is a checkpoint of sentence-transformers whose method is the mean, such as all-MiniLM-L6-v2. The peer sorts texts
by length and pads batches of 32, as `SentenceTransformer.encode` does; with the package installed, that is called too.
Both times are given: seconds, and seconds of processor time, which other programs on the machine disturb less. The best
of three runs counts. Peers compute in float32; beheld does so, too, and then in bfloat16, and each line says how far
its vectors are from beheld's in float32.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from beheld import LLM

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "river",
    "mountain",
    "music",
    "sleeps",
    "stands",
    "sees",
    "small",
    "large",
    "red",
    "blue",
    "circle",
    "square",
    "chair",
    "left",
    "of",
    "and",
]


def texts_of(count: int, seed: int = 0) -> list[str]:
    """Texts of 4 to 60 words."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(4, 60))) for _ in range(count)]


def ours(folder: str, dtype: str = "float32") -> Callable[[Sequence[str]], torch.Tensor]:
    """Embed by beheld."""
    llm = LLM(folder, dtype=dtype)
    return lambda texts: torch.tensor([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])


def transformers(folder: str, size: int = 32) -> Callable[[Sequence[str]], torch.Tensor]:
    """Embed by transformers, in padded batches of texts of about the same length."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = (
        AutoModel.from_pretrained(folder, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(folder),
    )

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> torch.Tensor:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found: dict[int, torch.Tensor] = {}
        for start in range(0, len(order), size):
            own = order[start : start + size]
            given = tokenizer(
                [texts[i] for i in own], padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            mask = given["attention_mask"].unsqueeze(-1).float()
            means = (model(**given).last_hidden_state * mask).sum(1) / mask.sum(1)
            found |= dict(zip(own, F.normalize(means, dim=-1), strict=True))
        return torch.stack([found[index] for index in range(len(texts))])

    return embed


def sentence_transformers(folder: str) -> Callable[[Sequence[str]], torch.Tensor]:
    """Embed by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(folder, device="cpu")
    return lambda texts: torch.from_numpy(model.encode(list(texts)))


def fastest(embed: Callable[[Sequence[str]], torch.Tensor], texts: Sequence[str]) -> tuple[float, float, torch.Tensor]:
    """Return the least seconds and seconds of processor time of three runs, and the vectors."""
    embed(texts[:32])
    walls, processors = [], []
    for _ in range(3):
        wall, processor = time.perf_counter(), time.process_time()
        vectors = embed(texts)
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return min(walls), min(processors), vectors


def main() -> None:
    """Measure each in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--texts", type=int, default=256)
    arguments = parser.parse_args()
    texts = texts_of(arguments.texts)
    makers: dict[str, Callable[[str], Callable[[Sequence[str]], torch.Tensor]]] = {
        "beheld, float32": ours,
        "beheld, bfloat16": partial(ours, dtype="bfloat16"),
        "transformers": transformers,
    }
    if find_spec("sentence_transformers") is not None:
        makers["sentence-transformers"] = sentence_transformers
    first: torch.Tensor | None = None
    for name, make in makers.items():
        wall, processor, vectors = fastest(make(arguments.folder), texts)
        first = vectors if first is None else first
        rates = f"{len(texts) / wall:.1f} texts/s, {len(texts) / processor:.1f} per second of processor time"
        print(f"{name}: {rates}; least cosine {float((first * vectors).sum(-1).min()):.6f}", flush=True)


if __name__ == "__main__":
    main()
