"""transformers' own batched `generate` on the workloads of benchmarks/gpu.py, random weights, one JSON line.

python -m benchmarks.gpu_transformers --size llava [--batch 64]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import pictures
from benchmarks.shapes import SHAPES, checkpoint, prompt


def main() -> None:
    """Parse the command line, load, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), default="3B")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    arguments = parser.parse_args()
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    path = checkpoint(arguments.size, arguments.folder)
    torch.set_default_device("cuda")
    config = AutoConfig.from_pretrained(path)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    torch.set_default_device("cpu")
    processor = AutoProcessor.from_pretrained(path)
    processor.tokenizer.padding_side = "left"

    @torch.inference_mode()
    def timed(inputs: Mapping[str, Any], new: int, start: float) -> float:
        model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def seconds(made: list[Any], new: int, each: int = 1) -> float:
        """For these pictures, `each` of them to a request."""
        start = time.perf_counter()
        texts = [prompt(arguments.size, each)] * (len(made) // each)
        images = [made[i : i + each] for i in range(0, len(made), each)]
        inputs = processor(text=texts, images=images, return_tensors="pt", padding=True).to("cuda")
        inputs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in inputs.items()}
        return timed(inputs, new, start)

    def text_seconds(length: int, new: int) -> float:
        """For a batch of prompts of so many ids."""
        start = time.perf_counter()
        ids = torch.randint(20, 400, (arguments.batch, length)).to("cuda")
        return timed({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, new, start)

    seconds(pictures(2, 1), 4)
    first = sorted(seconds(pictures(1, 10 + i), 1) for i in range(5))[2]
    one, batch = pictures(1, 3), arguments.batch
    text_seconds(64, 2)
    figures = {
        "first_token_ms": 1e3 * first,
        "next_token_ms": 1e3 * (seconds(one, 33) - seconds(one, 1)) / 32,
        "prompt_tokens_per_s": batch * 1024 / sorted(text_seconds(1024, 1) for _ in range(3))[1],
        "output_tokens_per_s": batch * 256 / text_seconds(512, 256),
        "requests_per_s_new": batch / seconds(pictures(batch, 2), 128),
        # Batches of a quarter of the requests: as many pictures.
        "pictures_per_s_four": batch / seconds(pictures(batch, 4), 32, each=4),
    }
    rounded = {key: round(value, 2) for key, value in figures.items()}
    print(
        json.dumps({"size": arguments.size, "engine": "transformers", "batch": arguments.batch, **rounded}), flush=True
    )


if __name__ == "__main__":
    main()
