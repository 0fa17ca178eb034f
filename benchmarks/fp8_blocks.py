"""A model of Qwen2-7B's shape with FP8 weights by blocks of 128 x 128 on one GPU, and the same in bfloat16.

    python -m benchmarks.fp8_blocks [--layers 28] [--form fp8,bf16] [--folder FOLDER] [--option NAME=JSON]

Writes the FP8 checkpoint (8.7 GB with all layers; random weights) into the folder once; bfloat16 has the same sizes and
random weights. Prints for each form the seconds of its start, the time of a next token after 512, tokens of prompts per
second (64 x 1024), and output tokens per second (256 requests, 512 in, 128 out).
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import in_files

HIDDEN, INNER, HEADS, KEYS, WORDS, BLOCK = 3584, 18944, 28, 4, 152064, 128
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "tie_word_embeddings": False,
    "vocab_size": WORDS,
}
STORED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
_LINEAR = {
    "self_attn.q_proj": (HEADS * 128, HIDDEN),
    "self_attn.k_proj": (KEYS * 128, HIDDEN),
    "self_attn.v_proj": (KEYS * 128, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * 128),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
_BIASES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def checkpoint(folder: Path, layers: int, *, stored: bool) -> Path:
    """Write the checkpoint once, without weights unless they are stored in FP8; returns its path."""
    path = folder / f"qwen2_{'fp8' if stored else 'bf16'}_{layers}"
    fields = SHAPE | {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers, "dtype": "bfloat16"}
    if not stored:
        return in_files(path, "qwen2", fields, ())
    return in_files(path, "qwen2", fields | {"quantization_config": STORED}, _files(layers))


def _files(layers: int) -> Iterator[dict[str, torch.Tensor]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def plain(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    outside = {"model.embed_tokens.weight": plain(WORDS, HIDDEN), "lm_head.weight": plain(WORDS, HIDDEN)}
    yield outside | {"model.norm.weight": ones}
    for layer in range(layers):
        weights, at = {}, f"model.layers.{layer}."
        for name, (outputs, inputs) in _LINEAR.items():
            # 448, the largest FP8 number, is four and a half standard deviations; what is larger would become NaN.
            eights = plain(outputs, inputs).mul_(5000).clamp_(-448, 448)
            weights[f"{at}{name}.weight"] = eights.to(torch.float8_e4m3fn)
            blocks = -(-outputs // BLOCK), -(-inputs // BLOCK)
            weights[f"{at}{name}.weight_scale_inv"] = torch.full(blocks, 1 / 5000)
        weights |= {f"{at}{name}.bias": plain(_LINEAR[name][0]) for name in _BIASES}
        yield weights | {f"{at}{name}.weight": ones.clone() for name in _NORMS}


def measure(path: Path, **options: Any) -> dict[str, float]:
    """Return the figures of a model."""
    import numpy as np

    from beheld import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(str(path), max_model_len=4096, max_num_seqs=256, seed=0, **options)
    figures = {"start_s": time.perf_counter() - start}

    def seconds(count: int, length: int, new: int, seed: int) -> float:
        prompts = np.random.default_rng(seed).integers(20, 400, (count, length)).tolist()
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        return time.perf_counter() - begun

    for seed in range(2):
        seconds(1, 512, 20, seed)
    figures["next_token_ms"] = 1e3 * (seconds(1, 512, 220, 3) - seconds(1, 512, 20, 3)) / 200
    seconds(8, 1024, 1, 4)
    figures["prompt_tokens_per_s"] = 65536 / sorted(seconds(64, 1024, 1, seed) for seed in (5, 6, 7))[1]
    seconds(256, 64, 4, 8)
    figures["output_tokens_per_s"] = 256 * 128 / seconds(256, 512, 128, 9)
    llm.close()
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--form", default="fp8,bf16")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON, an engine option")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    options = {name: json.loads(value) for name, value in (each.split("=", 1) for each in arguments.option)}
    for form in arguments.form.split(","):
        stored = form == "fp8"
        path = checkpoint(arguments.folder, arguments.layers, stored=stored)
        loaded = {} if stored else {"load_format": "dummy"}
        print(json.dumps({"form": form, **measure(path, **loaded, **options)}), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
