"""Speed of the kinds of cache on one GPU, and what the hardware allows: recurrent states, latents, Whisper's states.

    python -m benchmarks.caches [--only rule,attention,latent,kernel,whisper] [--at-once] [--small]

Shapes are real, weights random, in bfloat16. One JSON line each:

    rule      Qwen3.5-4B: one request's next token, and the bytes of its weights and states; prompt tokens per second
    attention the same model with attention in every layer
    latent    GLM-4.7-Flash, 16 of 47 layers: one request's next token, and the bytes that it reads
    kernel    the kernel of latent attention alone, of GLM-4.7-Flash's heads, and the bytes of the latents
    whisper   Whisper-large-v3: seconds of audio per second, 32 windows of 30 s at once, 100 tokens to each

A floor is bytes over the rate of a large copy on the same card. `--small` makes all of it tiny, to try the script.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import shapes

STREAMS, SECONDS, TOKENS = 32, 30.0, 100
LONGEST_START_S = 110.0
CACHE_BYTES = 9 << 30
"""Of each of several engines: 64 prompts of 1,024 tokens of a 4B shape with attention in every layer."""


def copied_bytes_per_s(device: str) -> float:
    """Return the bytes per second, read and written, of a large copy; the best of five."""
    source = torch.empty(1 << (30 if device == "cuda" else 24), dtype=torch.uint8, device=device).random_()
    target, best = torch.empty_like(source), 0.0
    for _ in range(6):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = max(best, 2 * source.numel() / (time.perf_counter() - start))
    return best


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def token_bytes(path: Path) -> int:
    """Return the bytes of 16-bit weights that one token reads: no tower, no row of embeddings, chosen experts alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(path)
    text = getattr(config, "text_config", config)
    text.tie_word_embeddings = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    share = getattr(text, "num_experts_per_tok", 1) / (getattr(text, "n_routed_experts", None) or 1)
    total = 0.0
    for name, weight in model.named_parameters():
        if "embed_tokens" not in name:
            total += weight.numel() * 2 * (share if ".experts." in name else 1)
    return int(total)


def state_bytes(path: Path) -> int:
    """Return the bytes of recurrent states, float32, that one token reads and writes."""
    text = json.loads((path / "config.json").read_text(encoding="utf-8"))["text_config"]
    layers = text["layer_types"].count("linear_attention")
    size = text["linear_num_value_heads"] * text["linear_key_head_dim"] * text["linear_value_head_dim"]
    return int(2 * layers * size * 4)


class Turn:
    """Lets engines that start at once in processes of their own be measured one after another.

    Args:
        folder: shared by the processes; None if there is only one.
        count: the processes that measure.
    """

    def __init__(self, folder: Path | None, count: int) -> None:
        self._folder, self._count = folder, count

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Wait until all have started, or as long as the slowest may take, and then for the turn."""
        if self._folder is None:
            yield
            return
        (self._folder / f"{name}.ready").touch()
        stop = time.monotonic() + LONGEST_START_S
        while len(list(self._folder.glob("*.ready"))) < self._count and time.monotonic() < stop:
            time.sleep(0.05)
        with open(self._folder / "turn", "w", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class Bench:
    """An engine on a shape, with few kinds of questions."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        from beheld import LLM

        self.path = shapes.checkpoint(name, folder)
        start = time.perf_counter()
        self.llm = LLM(str(self.path), load_format="dummy", seed=0, disable_log_stats=True, **options)
        self.start_s = time.perf_counter() - start

    def run(self, prompts: list[Any], new: int) -> float:
        """Return the seconds for these prompts, `new` tokens each."""
        from beheld import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def prompts(self, count: int, length: int, seed: int) -> list[Any]:
        """Return token-id prompts that share no prefix."""
        import numpy as np

        rng = np.random.default_rng(seed)
        return [{"prompt_token_ids": rng.integers(20, 400, length).tolist()} for _ in range(count)]

    def next_token_s(self, length: int, new: int) -> float:
        """Return the seconds of each next token of one request: the least of three long and short answers."""
        asked = self.prompts(1, length, 1)
        times = [(self.run(asked, new + 8), self.run(asked, 8)) for _ in range(3)]
        return (min(long for long, _ in times) - min(short for _, short in times)) / new

    def prompt_rate(self, count: int, length: int) -> float:
        """Return the prompt tokens per second of many prompts, one token out; median of three."""
        times = sorted(self.run(self.prompts(count, length, seed), 1) for seed in (5, 6, 7))
        return count * length / times[1]


@dataclass(frozen=True)
class Given:
    """What a measurement gets.

    Attributes:
        folder: for its checkpoint.
        turn: see Turn.
        small: whether shapes are tiny.
        alone: whether no other engine stands on the GPU.
    """

    folder: Path
    turn: Turn
    small: bool
    alone: bool

    @property
    def device(self) -> str:
        """Return where it runs."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def options(self, **own: Any) -> dict[str, Any]:
        """Return an engine's options: engines that start at once have caches of a stated size.

        What an engine finds free on a GPU is less by what others take meanwhile.
        """
        return own | ({"gpu_memory_utilization": 0.9} if self.alone else {"kv_cache_memory_bytes": CACHE_BYTES})


def _delta(given: Given, name: str) -> dict[str, float]:
    count, length, new = (2, 64, 4) if given.small else (64, 1024, 200)
    most: dict[str, Any] = {"max_model_len": min(4096, 8 * length), "max_num_seqs": 8 if given.small else 64}
    # No tower is tried.
    most |= {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    bench = Bench(name, given.folder, **given.options(**most))
    bench.run(bench.prompts(1, length // 2, 1), 8)
    bench.run(bench.prompts(max(1, count // 4), length, 4), 1)
    with given.turn(name):
        made = {"start_s": bench.start_s, "prompt_tokens_per_s": bench.prompt_rate(count, length)}
        next_s = bench.next_token_s(length // 2, new)
        floor_s = (token_bytes(bench.path) + state_bytes(bench.path)) / copied_bytes_per_s(given.device)
    return made | {"next_token_ms": 1e3 * next_s, "floor_ms": 1e3 * floor_s, "of_floor": next_s / floor_s}


def rule(given: Given) -> dict[str, float]:
    """Qwen3.5-4B; see above."""
    return _delta(given, "Qwen3.5-4B")


def attention(given: Given) -> dict[str, float]:
    """The same with attention in every layer."""
    return _delta(given, "Qwen3.5-4B-attention")


def latent(given: Given) -> dict[str, float]:
    """GLM-4.7-Flash; see above."""
    lengths, new = ((48,), 4) if given.small else ((512, 16384), 200)
    bench = Bench("GLM-Flash-16", given.folder, **given.options(max_model_len=max(lengths) + 512, max_num_seqs=8))
    text = json.loads((bench.path / "config.json").read_text(encoding="utf-8"))
    row = 2 * text["num_hidden_layers"] * (text["kv_lora_rank"] + text["qk_rope_head_dim"])
    for length in lengths:
        bench.run(bench.prompts(1, length, 1), 8)
    with given.turn("latent"):
        made, rate = {"start_s": bench.start_s}, copied_bytes_per_s(given.device)
        for length in lengths:
            next_s = bench.next_token_s(length, new)
            floor_s = (token_bytes(bench.path) + row * length) / rate
            made |= {f"next_token_ms_{length}": 1e3 * next_s, f"of_floor_{length}": next_s / floor_s}
    return made


def kernel(given: Given) -> dict[str, float]:
    """The kernel of latent attention; see above."""
    from beheld.attention.backend import AttnMetadata, LayerLatent
    from beheld.attention.latent import LatentUp
    from beheld.attention.triton_paged import TritonBackend
    from benchmarks.attention import BLOCK, graph_us, metadata_of, random

    if given.device == "cpu":
        return {}
    heads, rank, rotary, plain, values = 20, 512, 64, 192, 256
    up_HDR = LatentUp(random((heads * (plain + values), rank)), heads).up_HDR
    made: dict[str, float] = {}
    with given.turn("kernel"), torch.inference_mode():
        rate = copied_bytes_per_s(given.device)
        for batch, length in ((1, 4096), (1, 32768), (32, 4096), (64, 8192)):
            blocks = batch * length // BLOCK + 1
            layers = [LayerLatent(random((blocks, BLOCK, rank + rotary)), rank, 0) for _ in range(6)]
            metadata: AttnMetadata = metadata_of([length - 1] * batch, [length] * batch)
            q, new = random((batch, heads, plain + rotary)), random((batch, rank + rotary))
            launch = functools.partial(_attend, TritonBackend(), q, new, up_HDR, layers, metadata)
            us = graph_us(launch) / len(layers)
            floor_us = 1e6 * (batch * length * (rank + rotary) * 2 + up_HDR.numel() * 2) / rate
            made |= {f"us_{batch}x{length}": us, f"of_floor_{batch}x{length}": us / floor_us}
            del layers
    return made


def _attend(backend: Any, q: Tensor, new: Tensor, up_HDR: Tensor, layers: list[Any], metadata: Any) -> None:
    backend.begin(metadata)
    for kv in layers:
        backend.attend_latent(q, new, up_HDR, kv, metadata, 0.0625)


def whisper(given: Given) -> dict[str, float]:
    """Whisper-large-v3; see above."""
    import numpy as np

    streams, tokens = (2, 4) if given.small else (STREAMS, TOKENS)
    bench = Bench("whisper-large", given.folder, **given.options(max_model_len=448, max_num_seqs=streams))
    text = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    rng = np.random.default_rng(3)

    def asked(rate: int = 16000) -> list[Any]:
        waves = rng.standard_normal((streams, int(SECONDS * rate))).astype(np.float32) * 0.1
        return [{"prompt": text, "multi_modal_data": {"audio": (wave, rate)}} for wave in waves]

    bench.run(asked(), tokens)
    with given.turn("whisper"):
        times = sorted(bench.run(asked(), tokens) for _ in range(3))
    return {"start_s": bench.start_s, "s": times[1], "times_real_time": streams * SECONDS / times[1]}


MEASURED: dict[str, Callable[[Given], dict[str, float]]] = {
    "rule": rule,
    "attention": attention,
    "latent": latent,
    "kernel": kernel,
    "whisper": whisper,
}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MEASURED))
    parser.add_argument("--small", action="store_true", help="tiny shapes, on whatever device there is")
    parser.add_argument("--at-once", action="store_true", help="start all engines at once; they are measured in turn")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.only.split(",")
    if given.at_once:
        with tempfile.TemporaryDirectory(prefix="beheld-caches-") as folder:
            own = ["--turn", folder, "--count", str(len(names)), *(["--small"] if given.small else [])]
            command = [sys.executable, "-m", "benchmarks.caches"]
            processes = [subprocess.Popen([*command, "--only", name, *own]) for name in names]
            sys.exit(max(process.wait() for process in processes))
    if given.small:
        shrink()
    for name in names:
        with tempfile.TemporaryDirectory(prefix="beheld-caches-") as folder:
            start = time.perf_counter()
            asked = Given(Path(folder), Turn(given.turn, given.count), given.small, alone=given.count == 1)
            made = MEASURED[name](asked)
        figures = {key: round(value, 4) for key, value in made.items()}
        print(json.dumps({"kind": name, **figures, "took_s": round(time.perf_counter() - start, 1)}), flush=True)
        gc.collect()


def shrink() -> None:
    """Give the shapes few layers and small widths."""
    small = {
        **dict.fromkeys(("hidden_size", "d_model"), 64),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
        **dict.fromkeys(("num_hidden_layers", "decoder_layers", "encoder_layers", "depth"), 4),
        **dict.fromkeys(("num_attention_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
        "vocab_size": 2000, "num_key_value_heads": 4, "head_dim": 64, "out_hidden_size": 64,
    }  # fmt: skip

    def shrunk(part: dict[str, Any]) -> dict[str, Any]:
        made = {key: shrunk(value) if isinstance(value, dict) else small.get(key, value) for key, value in part.items()}
        if "layer_types" in made:
            made["layer_types"] = made["layer_types"][:4]
        return made

    for name in ("Qwen3.5-4B", "Qwen3.5-4B-attention", "GLM-Flash-16", "whisper-large"):
        shape = shapes.SHAPES[name]
        shape.edits["config.json"] = shrunk(shape.edits["config.json"])


if __name__ == "__main__":
    main()
