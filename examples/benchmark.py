"""Measure a model on this machine: requests and tokens per second, and the first token of a lone request.

python examples/benchmark.py
python examples/benchmark.py --model Qwen/Qwen2.5-VL-3B-Instruct --requests 256 --tokens 128
"""

import argparse
import time

import numpy as np
from PIL import Image

from beheld import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a folder or a hub name; without it the embedded model answers")
parser.add_argument("--requests", type=int, default=16)
parser.add_argument("--tokens", type=int, default=32, help="of each answer")
parser.add_argument("--side", type=int, default=224, help="of the images, in pixels")
arguments = parser.parse_args()


def conversation(seed: int) -> list:
    """A question about an image that nobody has seen before."""
    side = arguments.side
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    content = [
        {"type": "image", "image": Image.fromarray(pixels)},
        {"type": "text", "text": "What is in this picture?"},
    ]
    return [{"role": "user", "content": content}]


# --8<-- [start:measure]
with LLM(arguments.model, max_model_len=4096) as llm:
    # ignore_eos: every answer has the same length, so that runs can be compared.
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    llm.chat([conversation(seed) for seed in range(4)], params, use_tqdm=False)  # warm up

    (lone,) = llm.chat(conversation(100), params, use_tqdm=False)
    print(f"first token of one request: {lone.milliseconds['first_token']:.1f} ms")

    start = time.monotonic()
    outputs = llm.chat([conversation(1000 + seed) for seed in range(arguments.requests)], params, use_tqdm=False)
    seconds = time.monotonic() - start
    answered = sum(output.usage.completion_tokens for output in outputs)
    print(f"{len(outputs) / seconds:.1f} requests/s, {answered / seconds:.0f} output tokens/s")
# --8<-- [end:measure]
