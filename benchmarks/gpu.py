"""Offline speed on one GPU: the workloads of docs/performance.md, on a Qwen2.5-VL shape with random weights.

    python -m benchmarks.gpu --size 3B [--only decode,text,images,prefill,first_token] [--transformers]

Prints one JSON line per workload. All runs are greedy, `ignore_eos`, bfloat16; pictures are 448x448 noise, each new.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "3B": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "window_size": 112,
}
PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is the content of this image?<|im_end|>\n"


def checkpoint(size: str, folder: Path) -> Path:
    """The configuration, tokenizer and processor of a Qwen2.5-VL of that size, without weights."""
    from tests import tiny

    path = folder / f"qwen2_5_vl_{size}"
    path.mkdir(parents=True, exist_ok=True)
    for file in tiny.checkpoint("qwen2_5_vl").iterdir():
        if ".safetensors" not in file.name:
            shutil.copy(file, path / file.name)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config.update(SHAPES[size], vocab_size=151936, torch_dtype="bfloat16", max_position_embeddings=32768)
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [16, 24, 24]}
    config["vision_config"].update(VISION, out_hidden_size=SHAPES[size]["hidden_size"])
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def pictures(count: int, seed: int) -> list[Any]:
    """Distinct noise pictures."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (448, 448, 3), dtype=np.uint8)) for _ in range(count)]


class Bench:
    """A started engine and its workloads; each returns figures by name."""

    def __init__(self, path: Path, **options: Any) -> None:
        from beheld import LLM, SamplingParams

        start = time.perf_counter()
        self.llm = LLM(str(path), load_format="dummy", max_model_len=4096, max_num_seqs=256, seed=0, **options)
        self.start_s = time.perf_counter() - start
        self._params = SamplingParams

    def run(self, prompts: list[Any], new: int) -> float:
        """Seconds for these prompts, `new` tokens each."""
        params = self._params(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def text_prompts(self, count: int, length: int, seed: int) -> list[Any]:
        """Token-id prompts that share no prefix."""
        import numpy as np

        rng = np.random.default_rng(seed)
        return [{"prompt_token_ids": rng.integers(20, 400, length).tolist()} for _ in range(count)]

    def decode(self) -> dict[str, float]:
        """One request: milliseconds for each next token."""
        prompt = self.text_prompts(1, 512, 1)
        self.run(prompt, 8)
        short, long = self.run(prompt, 20), self.run(prompt, 220)
        return {"next_token_ms": 1e3 * (long - short) / 200}

    def text(self) -> dict[str, float]:
        """256 requests, 512 tokens in, 256 out: output tokens per second."""
        self.run(self.text_prompts(256, 64, 2), 4)
        return {"output_tokens_per_s": 256 * 256 / self.run(self.text_prompts(256, 512, 3), 256)}

    def prefill(self) -> dict[str, float]:
        """64 prompts of 1024 tokens, one token out: prompt tokens per second."""
        self.run(self.text_prompts(8, 1024, 4), 1)
        return {"prompt_tokens_per_s": 64 * 1024 / self.run(self.text_prompts(64, 1024, 5), 1)}

    def images(self) -> dict[str, float]:
        """256 requests with a picture each, 128 tokens out: requests per second, new pictures and the same again."""
        self.run(self._image_prompts(16, 6), 4)
        prompts = self._image_prompts(256, 7)
        return {
            "requests_per_s_new": 256 / self.run(prompts, 128),
            "requests_per_s_again": 256 / self.run(prompts, 128),
        }

    def first_token(self) -> dict[str, float]:
        """One request with a new picture: milliseconds to its first token."""
        self.run(self._image_prompts(1, 8), 1)
        times = sorted(self.run(self._image_prompts(1, 100 + i), 1) for i in range(9))
        return {"first_token_ms": 1e3 * times[4]}

    def _image_prompts(self, count: int, seed: int) -> list[Any]:
        filler = " picture" * 8
        return [{"prompt": PROMPT + filler, "multi_modal_data": {"image": p}} for p in pictures(count, seed)]


WORKLOADS = ("decode", "first_token", "prefill", "text", "images")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), default="3B")
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON, an engine option")
    arguments = parser.parse_args()
    options = {name: json.loads(value) for name, value in (o.split("=", 1) for o in arguments.option)}
    bench = Bench(checkpoint(arguments.size, arguments.folder), **options)
    print(json.dumps({"size": arguments.size, "start_s": round(bench.start_s, 2), **options}), flush=True)
    for name in arguments.only.split(","):
        figures = {key: round(value, 3) for key, value in getattr(bench, name)().items()}
        print(json.dumps({"size": arguments.size, "workload": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
