"""A model of gpt-oss-20b's shape with random MXFP4 experts on one GPU: memory, and the time of a next token.

    python -m benchmarks.gpt_oss [--layers 24] [--folder FOLDER] [--option NAME=JSON]

Writes the checkpoint (13 GiB with all layers) into the folder once. Prints the weights' size, the bytes that a token
reads at least (its experts, attention, the head), their time at the card's bandwidth, the time of a next token after
512, and that of a prompt of 4,096 tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import in_files
from benchmarks.kept_bits import GPT_OSS_20B, bandwidth

HIDDEN, INNER = GPT_OSS_20B.hidden, GPT_OSS_20B.inner
SHAPE: dict[str, Any] = {
    "experts_per_token": GPT_OSS_20B.choices,
    "head_dim": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "initial_context_length": 4096,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": GPT_OSS_20B.choices,
    "num_key_value_heads": 8,
    "num_local_experts": GPT_OSS_20B.count,
    "sliding_window": 128,
    "vocab_size": 201088,
}
# Parameters of a layer outside experts, by their names' ends.
_PLAIN = {
    "self_attn.q_proj.weight": (4096, HIDDEN),
    "self_attn.q_proj.bias": (4096,),
    "self_attn.k_proj.weight": (512, HIDDEN),
    "self_attn.k_proj.bias": (512,),
    "self_attn.v_proj.weight": (512, HIDDEN),
    "self_attn.v_proj.bias": (512,),
    "self_attn.o_proj.weight": (HIDDEN, 4096),
    "self_attn.o_proj.bias": (HIDDEN,),
    "self_attn.sinks": (64,),
    "mlp.router.weight": (GPT_OSS_20B.count, HIDDEN),
    "mlp.router.bias": (GPT_OSS_20B.count,),
    "mlp.experts.gate_up_proj_bias": (GPT_OSS_20B.count, 2 * INNER),
    "mlp.experts.down_proj_bias": (GPT_OSS_20B.count, HIDDEN),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}


def checkpoint(folder: Path, layers: int) -> Path:
    """Write the checkpoint once; returns its path."""
    fields = {"num_hidden_layers": layers, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    return in_files(folder / f"gpt_oss_{layers}", "gpt_oss", SHAPE | fields, _files(layers))


def _files(layers: int) -> Iterator[dict[str, torch.Tensor]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    outside = {"model.embed_tokens.weight": (201088, HIDDEN), "lm_head.weight": (201088, HIDDEN)}
    shapes = {"model.norm.weight": (HIDDEN,), **outside}
    yield {name: _weight(name, shape, device) for name, shape in shapes.items()}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights = {at + name: _weight(name, shape, device) for name, shape in _PLAIN.items()}
        yield weights | _experts(f"{at}mlp.experts", device)


def _weight(name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02)


def _experts(name: str, device: str) -> dict[str, torch.Tensor]:
    found = {}
    for each, (outputs, inputs) in zip(("gate_up_proj", "down_proj"), GPT_OSS_20B.sizes, strict=True):
        shape = GPT_OSS_20B.count, outputs, inputs // 32
        found[f"{name}.{each}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device=device)
        found[f"{name}.{each}_scales"] = torch.randint(119, 121, shape, dtype=torch.uint8, device=device)
    return found


def bytes_read(layers: int) -> int:
    """Return the least bytes that a next token reads: its experts, attention, routers and the head."""
    attention = sum(2 * torch.Size(shape).numel() for name, shape in _PLAIN.items() if "experts" not in name)
    experts = GPT_OSS_20B.choices * sum(outputs * inputs * 17 // 32 for outputs, inputs in GPT_OSS_20B.sizes)
    return layers * (attention + experts) + 2 * 201088 * HIDDEN


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON, an engine option")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    path = checkpoint(arguments.folder, arguments.layers)
    speed = bandwidth() if torch.cuda.is_available() else 0.0
    print(f"written in {time.perf_counter() - start:.1f} s", flush=True)
    from beheld import LLM, SamplingParams

    options: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 16, "enable_prefix_caching": False}
    options |= {name: json.loads(value) for name, value in (each.split("=", 1) for each in arguments.option)}
    start = time.perf_counter()
    llm = LLM(str(path), **options)
    print(f"started in {time.perf_counter() - start:.1f} s", flush=True)

    def seconds(length: int, new: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": [5 + n * 7 % 200 for n in range(length)]}], params, use_tqdm=False)
        return time.perf_counter() - begun

    for new in (20, 20):
        seconds(512, new)
    token = (seconds(512, 220) - seconds(512, 20)) / 200
    seconds(4096, 1)
    prefill = sorted(seconds(4096, 1) for _ in range(3))[1]
    llm.close()
    least = bytes_read(arguments.layers)
    floor = f", {least / speed * 1e3:.2f} ms at {speed / 1e12:.2f} TB/s" if speed else ""
    print(
        f"next token {token * 1e3:.2f} ms; it reads {least / 1e9:.2f} GB{floor}; prompt of 4096: {prefill * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
