"""Embeddings: texts per second, against sentence-transformers, transformers as it calls it, and vLLM where installed.

    python -m benchmarks.embeddings FOLDER --texts 256
    python -m benchmarks.embeddings --shape minilm --shape qwen3-0.6b --device cuda --texts 4096 [--engine vLLM]

FOLDER is a checkpoint of sentence-transformers; `--shape` makes one of real size with random weights instead. Both
times are given: seconds, and seconds of processor time, which other programs on the machine disturb less. The best of
three runs counts; making one tensor of lists is no part of it. Each line says how far its vectors are from those of the
first. On a CPU, peers compute in float32; beheld does so, too, and then in bfloat16. On a GPU all compute in bfloat16,
and sentence-transformers also in larger batches. `--engine` takes those alone whose names begin so: engines that need
different versions of PyTorch run in turn.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from beheld import LLM
from benchmarks import embedders

# The vectors as an engine gives them: a tensor, or lists.
Embed = Callable[[Sequence[str]], Any]


def texts_of(count: int, seed: int = 0, words: tuple[int, int] = (4, 60)) -> list[str]:
    """Texts of so many words, from the least to the most."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(embedders.WORDS, k=chance.randint(*words))) for _ in range(count)]


def ours(folder: str, dtype: str = "float32", **options: Any) -> Embed:
    """Embed by beheld."""
    llm = LLM(folder, dtype=dtype, **options)
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def transformers(folder: str, size: int = 32) -> Embed:
    """Embed by transformers on the CPU, in padded batches of texts of about the same length, pooled by the mean."""
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


def sentence_transformers(folder: str, device: str = "cpu", dtype: str = "float32", size: int = 32) -> Embed:
    """Embed by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(folder, device=device, model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: torch.from_numpy(model.encode(list(texts), batch_size=size))


def vllm(folder: str, dtype: str) -> Embed:
    """Embed by vLLM."""
    from vllm import LLM as Peer

    llm: Any = Peer(folder, runner="pooling", dtype=dtype, enable_prefix_caching=False, gpu_memory_utilization=0.4)
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def fastest(embed: Embed, texts: Sequence[str]) -> tuple[float, float, torch.Tensor]:
    """Return the least seconds and seconds of processor time of three runs, and the vectors."""
    embed(texts[:256])
    walls, processors = [], []
    for _ in range(3):
        wall, processor = time.perf_counter(), time.process_time()
        vectors = embed(texts)
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    # torch.tensor takes 31 us for a list of 384 numbers.
    return min(walls), min(processors), torch.from_numpy(np.asarray(vectors, dtype=np.float32))


def makers(device: str) -> dict[str, Callable[[str], Embed]]:
    """Return what makes each engine, by its name in the table."""
    found: dict[str, Callable[[str], Embed]] = {}
    peer = find_spec("sentence_transformers") is not None
    if device == "cpu":
        found = {"beheld, float32": ours, "beheld, bfloat16": partial(ours, dtype="bfloat16")}
        found["transformers"] = transformers
        if peer:
            found["sentence-transformers"] = sentence_transformers
        return found
    found["beheld"] = partial(ours, dtype="bfloat16", gpu_memory_utilization=0.4, enable_prefix_caching=False)
    for size in (32, 256) if peer else ():
        found[f"sentence-transformers, batches of {size}"] = partial(
            sentence_transformers, device=device, dtype="bfloat16", size=size
        )
    if find_spec("vllm") is not None:
        found["vLLM"] = partial(vllm, dtype="bfloat16")
    return found


def measure(folder: str, count: int, all_words: Sequence[tuple[int, int]], device: str, engines: Sequence[str]) -> None:
    """Print a line for each engine and each range of words."""
    first: dict[tuple[int, int], torch.Tensor] = {}
    for name, make in makers(device).items():
        if not name.startswith(tuple(engines)):
            continue
        try:
            embed = make(folder)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}"[:500], flush=True)
            continue
        for words in all_words:
            texts = texts_of(count, words=words)
            wall, processor, vectors = fastest(embed, texts)
            vectors = F.normalize(vectors.float(), dim=-1)
            cosine = float((first.setdefault(words, vectors) * vectors).sum(-1).min())
            rates = f"{len(texts) / wall:.1f} texts/s, {len(texts) / processor:.1f} per second of processor time"
            print(f"{name}, {words[0]} to {words[1]} words: {rates}; least cosine {cosine:.6f}", flush=True)
        del embed


def main() -> None:
    """Measure each checkpoint in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--shape", action="append", choices=embedders.SHAPES, help="make a checkpoint of this size")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--words", nargs=2, type=int, action="append", metavar=("LEAST", "MOST"))
    parser.add_argument("--engine", action="append", help="the beginning of an engine's name")
    arguments = parser.parse_args()
    if (arguments.folder is None) == (arguments.shape is None):
        parser.error("give a folder or --shape")
    words = [tuple(each) for each in arguments.words or [(4, 60)]]
    engines = arguments.engine or [""]
    with tempfile.TemporaryDirectory() as place:
        for shape in arguments.shape or ():
            print(shape, flush=True)
            folder = embedders.make(shape, Path(place) / shape, arguments.device)
            measure(str(folder), arguments.texts, words, arguments.device, engines)
    if arguments.folder is not None:
        measure(arguments.folder, arguments.texts, words, arguments.device, engines)


if __name__ == "__main__":
    main()
