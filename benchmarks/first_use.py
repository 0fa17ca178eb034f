"""What the first use of a feature costs in a running engine on a GPU: seconds beyond the same request later.

    python -m benchmarks.first_use [--size 3B] [--only sampled,answers,...] [--lora]

Each case runs three times on new prompts of one form; the hitch is the first time less the lesser of the two others.
With --lora the engine has places for adapters, and the first cases are requests with one, whose files are read then.
Prints one JSON line per case, with the kernels that Triton compiled in its first run (name: how many forms,
milliseconds), those found in Triton's cache on the disk counted apart. A kernel that a case before it used is not
compiled again, as in a server.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import SAMPLED, Bench
from benchmarks.shapes import SHAPES, prompt

# Places for adapters, and their rank.
RANK = 16
ADAPTED = {"enable_lora": True, "max_loras": 4, "max_lora_rank": RANK}
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


class Compiled:
    """Counts what Triton compiles or loads from the disk between two calls of `take`."""

    def __init__(self) -> None:
        from triton import knobs

        self._made: dict[str, list[float]] = defaultdict(list)
        self._found = 0
        knobs.compilation.listener = self._heard

    def _heard(self, *, src: Any, metadata: dict[str, Any], metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if cache_hit:
            self._found += 1
        else:
            self._made[metadata.get("name", "?")].append(times.total / 1e3)

    def take(self) -> dict[str, Any]:
        """What was heard since the last call."""
        made = {name: f"{len(each)}x, {sum(each):.0f} ms" for name, each in self._made.items()}
        found, self._found = self._found, 0
        self._made.clear()
        return {"compiled": made, "found": found}


def write_adapter(config: dict[str, Any], folder: Path) -> Path:
    """Write an adapter of all attention's and MLPs' products of Qwen's text model, with small random numbers.

    Args:
        config: the checkpoint's `config.json`, whose text model has `layers`.
        folder: made if it is not there; returned.
    """
    import torch
    from safetensors.torch import save_file

    text = {**config, **config.get("text_config", {})}
    hidden, units, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    size = text.get("head_dim") or hidden // heads
    queries, keys = heads * size, text["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (units, hidden),
        "mlp.up_proj": (units, hidden),
        "mlp.down_proj": (hidden, units),
    }
    chance, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(text["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            start = f"base_model.model.model.language_model.layers.{layer}.{name}"
            for matrix, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                tensors[f"{start}.{matrix}.weight"] = 0.02 * torch.randn(shape, generator=chance)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    products = [name.rpartition(".")[2] for name in shapes]
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": products}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


class FirstUse(Bench):
    """A started engine and the features that are used on it."""

    def adapter_cases(self, folder: Path) -> dict[str, Callable[[int], float]]:
        """As `cases`, for an engine with places for adapters; the adapter is the folder's."""
        from beheld import LoRARequest

        with_it = {"lora_request": LoRARequest("benchmark", 1, str(folder))}
        return {
            "lora": lambda seed: self.run(self.text_prompts(1, 100, seed), 16, asked=with_it),
            "lora_64": lambda seed: self.run(self.text_prompts(64, 100, seed), 16, asked=with_it),
        }

    def cases(self) -> dict[str, Callable[[int], float]]:
        """Name -> seconds of its run with a seed of new prompts."""
        return {
            "one_text": lambda seed: self.run(self.text_prompts(1, 100, seed), 16),
            "one_image": lambda seed: self.run(self.image_prompts(1, seed), 16),
            "new_size": lambda seed: self.run(self.sized(seed, 300 + 28 * (seed % 3), 500), 16),
            "large_image": lambda seed: self.run(self.sized(seed, 1400, 1000), 16),
            "images_16": lambda seed: self.run(self.image_prompts(16, seed), 16),
            "batch_64": lambda seed: self.run(self.text_prompts(64, 200, seed), 32),
            "batch_256": lambda seed: self.run(self.text_prompts(256, 300, seed), 32),
            "sampled": lambda seed: self.run(self.text_prompts(1, 100, seed), 16, **SAMPLED),
            "sampled_64": lambda seed: self.run(self.text_prompts(64, 100, seed), 16, **SAMPLED),
            "seeded": lambda seed: self.run(self.text_prompts(4, 100, seed), 16, seed=7, **SAMPLED),
            "min_p": lambda seed: self.run(self.text_prompts(4, 100, seed), 16, temperature=1.0, min_p=0.1),
            "penalties": lambda seed: self.run(
                self.text_prompts(4, 100, seed), 16, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
            ),
            "logprobs": lambda seed: self.run(self.text_prompts(4, 100, seed), 16, logprobs=5),
            "prompt_logprobs": lambda seed: self.run(self.text_prompts(2, 100, seed), 4, prompt_logprobs=2),
            "bad_words": lambda seed: self.run(self.text_prompts(4, 100, seed), 16, bad_words=["what"]),
            "grammar": self.grammar,
            "answers_1x4": lambda seed: self.run(self.image_prompts(1, seed), 32, n=4),
            "answers_64x4": lambda seed: self.run(self.image_prompts(64, seed), 96, n=4),
            "shared_256": self.shared_prompts,
            "long_12000": lambda seed: self.run(self.text_prompts(1, 12_000, seed), 16),
            "long_4x12000": lambda seed: self.run(self.text_prompts(4, 12_000, seed), 64),
        }

    def sized(self, seed: int, width: int, height: int) -> list[Any]:
        """A prompt with one new picture of this size."""
        import numpy as np
        from PIL import Image

        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return [{"prompt": prompt(self.size, 1), "multi_modal_data": {"image": [Image.fromarray(pixels)]}}]

    def grammar(self, seed: int) -> float:
        """Answers that follow a JSON schema."""
        from beheld.core.structured_outputs import StructuredOutputs

        options = {"structured_outputs": StructuredOutputs(json=_SCHEMA), "ignore_eos": False}
        return self.run(self.text_prompts(2, 100, seed), 16, **options)

    def shared_prompts(self, seed: int) -> float:
        """256 prompts that share 2,048 tokens."""
        (common,) = self.text_prompts(1, 2048, seed)
        own = self.text_prompts(256, 64, seed + 500)
        prompts = [{"prompt_token_ids": common["prompt_token_ids"] + each["prompt_token_ids"]} for each in own]
        return self.run(prompts, 128)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), default="3B")
    parser.add_argument("--only", default="")
    parser.add_argument("--lora", action="store_true", help="an engine with places for adapters, and cases with one")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    arguments = parser.parse_args()
    compiled = Compiled()
    options = ADAPTED if arguments.lora else {}
    bench = FirstUse(arguments.size, arguments.folder, max_model_len=16384, **options)
    print(json.dumps({"size": arguments.size, "start_s": round(bench.start_s, 2), **compiled.take()}), flush=True)
    cases = bench.cases()
    if arguments.lora:
        # First, for other cases use a part of the same kernels.
        config = json.loads((arguments.folder / arguments.size / "config.json").read_text(encoding="utf-8"))
        cases = bench.adapter_cases(write_adapter(config, arguments.folder / f"{arguments.size}-lora")) | cases
    for number, name in enumerate(arguments.only.split(",") if arguments.only else cases):
        times, heard = [], []
        for turn in range(3):
            times.append(cases[name](1000 + 10 * number + turn))
            heard.append(compiled.take())
        hitch = times[0] - min(times[1:])
        line = {"case": name, "hitch_ms": round(1e3 * hitch), "times_ms": [round(1e3 * each, 1) for each in times]}
        later = {"compiled_later": heard[1]["compiled"]} if heard[1]["compiled"] else {}
        print(json.dumps(line | heard[0] | later), flush=True)


if __name__ == "__main__":
    main()
