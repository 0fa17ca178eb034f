"""Offline speed on one GPU: the workloads of docs/explanation/measurements.md, on real shapes with random weights.

    python -m benchmarks.gpu --size 3B [--engine beheld] [--causes decode,rows,new] [--transformers]
        [--only decode,rows,first_token,prefill,text,sampled,images,four,mixed,video,answers,shared,long]

Prints one JSON line per workload; one that fails prints its error, and the next runs. All runs but `sampled` and
`answers` are greedy, all `ignore_eos`, bfloat16; pictures are 448x448 noise, each new, but for `mixed`. `long` and
`shared` need `--option max_model_len=16384` where a card's default is less.
With `--engine vllm`, vLLM runs the same workloads with the same options: --option goes to either engine.
With --transformers, its batched `generate` runs the same in a process of its own first. With --causes, the same engine
then runs these workloads of benchmarks.causes, of at most --causes-tokens tokens each, under a profiler.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, checkpoint, prompt

ENGINES = ("beheld", "vllm")
WORKLOADS = (
    *("decode", "rows", "first_token", "prefill", "text", "sampled", "images", "four", "mixed", "video"),
    *("answers", "shared", "long"),
)
# Width and height; a prompt with one has 676 tokens in the mean.
MIXED = ((224, 224), (336, 336), (448, 448), (640, 480), (800, 600), (448, 896), (1024, 768), (1600, 1092))
# As many models' own settings have it.
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


def pictures(count: int, seed: int, sizes: Sequence[tuple[int, int]] = ((448, 448),)) -> list[Any]:
    """Distinct noise pictures of these widths and heights in turn."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    chosen = [sizes[number % len(sizes)] for number in range(count)]
    return [Image.fromarray(rng.integers(0, 256, (high, wide, 3), dtype=np.uint8)) for wide, high in chosen]


def videos(count: int, seed: int) -> list[Any]:
    """Distinct noise videos of 16 frames of 448x336 at two a second, sampled already, with their metadata."""
    import numpy as np

    rng = np.random.default_rng(seed)
    known = {"fps": 2.0, "duration": 8.0, "total_num_frames": 16, "frames_indices": list(range(16))}
    known |= {"video_backend": "noise", "do_sample_frames": False}
    return [(rng.integers(0, 256, (16, 336, 448, 3), dtype=np.uint8), dict(known)) for _ in range(count)]


def video_prompt(size: str) -> str:
    """A question about one video, in Qwen's form."""
    return prompt(size, 1).replace("image_pad", "video_pad")


class Bench:
    """A started engine and its workloads; each returns figures by name."""

    def __init__(
        self, size: str, folder: Path, *, engine: str = "beheld", detokenize: bool = True, **options: Any
    ) -> None:
        self.size = size
        self._detokenize = detokenize
        path = checkpoint(size, folder)
        start = time.perf_counter()
        module = importlib.import_module(engine)
        made, self._params = module.LLM, module.SamplingParams
        imported = time.perf_counter()
        options.setdefault("max_model_len", 16384 if size == "onevision" else 4096)
        self.llm = made(str(path), load_format="dummy", max_num_seqs=256, seed=0, **options)
        self.import_s, self.start_s = imported - start, time.perf_counter() - imported

    def run(self, prompts: list[Any], new: int, *, asked: dict[str, Any] | None = None, **options: Any) -> float:
        """Seconds for these prompts, `new` tokens each; greedy unless sampling options say otherwise.

        Args:
            asked: more of what `generate` takes, as `lora_request`.
        """
        options = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "detokenize": self._detokenize, **options}
        params = self._params(**options)
        start = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False, **(asked or {}))
        return time.perf_counter() - start

    def text_prompts(self, count: int, length: int, seed: int) -> list[Any]:
        """Token-id prompts that share no prefix."""
        import numpy as np

        rng = np.random.default_rng(seed)
        return [{"prompt_token_ids": rng.integers(20, 400, length).tolist()} for _ in range(count)]

    def shared_prompts(self, seed: int) -> list[Any]:
        """256 prompts of 64 tokens behind 2,048 that all share."""
        (common,) = self.text_prompts(1, 2048, seed)
        own = self.text_prompts(256, 64, seed + 1)
        return [{"prompt_token_ids": common["prompt_token_ids"] + each["prompt_token_ids"]} for each in own]

    def mixed_prompts(self, seed: int) -> list[Any]:
        """128 prompts with a picture of one of eight sizes each."""
        text = prompt(self.size, 1)
        return [{"prompt": text, "multi_modal_data": {"image": [each]}} for each in pictures(128, seed, MIXED)]

    def video_prompts(self, seed: int) -> list[Any]:
        """32 prompts with a video each."""
        text = video_prompt(self.size)
        return [{"prompt": text, "multi_modal_data": {"video": [each]}} for each in videos(32, seed)]

    def image_prompts(self, count: int, seed: int, each: int = 1) -> list[Any]:
        """Prompts with `each` new pictures."""
        made = pictures(count * each, seed)
        text = prompt(self.size, each)
        return [{"prompt": text, "multi_modal_data": {"image": made[i * each : (i + 1) * each]}} for i in range(count)]

    def decode(self) -> dict[str, float]:
        """One request: milliseconds for each next token."""
        return {"next_token_ms": self._step_ms(self.text_prompts(1, 512, 1))}

    def rows(self) -> dict[str, float]:
        """Eight requests: milliseconds a step."""
        return {"step_ms": self._step_ms(self.text_prompts(8, 512, 22))}

    def _step_ms(self, asked: list[Any]) -> float:
        for _ in range(2):
            self.run(asked, 20)
        short, long = self.run(asked, 20), self.run(asked, 220)
        return 1e3 * (long - short) / 200

    def text(self) -> dict[str, float]:
        """256 requests, 512 tokens in, 256 out: output tokens per second."""
        self.run(self.text_prompts(256, 64, 2), 4)
        return {"output_tokens_per_s": 256 * 256 / self.run(self.text_prompts(256, 512, 3), 256)}

    def sampled(self) -> dict[str, float]:
        """As `text`, each token drawn at random: at once, and again."""
        first, second = (self.run(self.text_prompts(256, 512, seed), 256, **SAMPLED) for seed in (12, 13))
        return {"output_tokens_per_s_first": 256 * 256 / first, "output_tokens_per_s": 256 * 256 / second}

    def prefill(self) -> dict[str, float]:
        """64 prompts of 1024 tokens, one token out: prompt tokens per second, median of three."""
        self.run(self.text_prompts(8, 1024, 4), 1)
        times = sorted(self.run(self.text_prompts(64, 1024, seed), 1) for seed in (5, 6, 7))
        return {"prompt_tokens_per_s": 64 * 1024 / times[1]}

    def images(self) -> dict[str, float]:
        """256 requests with a picture each, 128 tokens out: requests per second, new pictures and the same again."""
        self.run(self.image_prompts(16, 6), 4)
        prompts = self.image_prompts(256, 7)
        new, again = self.run(prompts, 128), self.run(prompts, 128)
        return {"requests_per_s_new": 256 / new, "requests_per_s_again": 256 / again}

    def four(self) -> dict[str, float]:
        """64 requests with four new pictures each, 32 tokens out: pictures per second."""
        self.run(self.image_prompts(4, 8, 4), 4)
        return {"pictures_per_s": 256 / self.run(self.image_prompts(64, 9, 4), 32)}

    def mixed(self) -> dict[str, float]:
        """128 requests with a picture of one of eight sizes, 96 out: requests per second, at once and warmed up."""
        rates = [128 / self.run(self.mixed_prompts(seed), 96) for seed in (23, 24)]
        return {"requests_per_s_first": rates[0], "requests_per_s": rates[1]}

    def video(self) -> dict[str, float]:
        """32 requests with a video of 16 frames each, 64 out: videos per second, at once and warmed up."""
        rates = [32 / self.run(self.video_prompts(seed), 64) for seed in (25, 26)]
        return {"videos_per_s_first": rates[0], "videos_per_s": rates[1]}

    def answers(self) -> dict[str, float]:
        """64 new pictures, four drawn answers of 96 tokens to each: output tokens per second, at once and again."""
        first, second = (self.run(self.image_prompts(64, seed), 96, n=4, **SAMPLED) for seed in (14, 15))
        return {"output_tokens_per_s_first": 256 * 96 / first, "output_tokens_per_s": 256 * 96 / second}

    def shared(self) -> dict[str, float]:
        """256 requests that share 2,048 tokens and have 64 of their own, 128 out: requests per second."""
        rates = [256 / self.run(self.shared_prompts(seed), 128) for seed in (16, 18)]
        return {"requests_per_s_first": rates[0], "requests_per_s": rates[1]}

    def long(self) -> dict[str, float]:
        """16 prompts of 12,000 tokens, 128 out: seconds. Needs `--option max_model_len=16384`."""
        first, second = (self.run(self.text_prompts(16, 12_000, seed), 128) for seed in (20, 21))
        return {"first_s": first, "s": second}

    def first_token(self) -> dict[str, float]:
        """One request with a new picture: milliseconds to its first token, median of nine; and its prompt's length.

        Of beheld also what of it took preparing the prompt, and the model's processor within that.
        """
        params = self._params(temperature=0, max_tokens=1, ignore_eos=True)
        for i in range(4):
            self.llm.generate(self.image_prompts(1, 10 + i), params, use_tqdm=False)
        times, parts = [], []
        for i in range(9):
            prompts = self.image_prompts(1, 100 + i)
            start = time.perf_counter()
            output = self.llm.generate(prompts, params, use_tqdm=False)[0]
            times.append(1e3 * (time.perf_counter() - start))
            if receipts := getattr(output, "media", ()):
                parts.append((output.milliseconds["prepare"], receipts[0].milliseconds["process"]))
        figures = {"first_token_ms": statistics.median(times), "prompt_tokens": len(output.prompt_token_ids)}
        if parts:
            prepared, processed = zip(*parts, strict=True)
            figures |= {"prepare_ms": statistics.median(prepared), "processor_ms": statistics.median(processed)}
        return figures


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), default="3B")
    parser.add_argument("--engine", choices=ENGINES, default="beheld")
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON, an engine option")
    parser.add_argument("--no-detokenize", action="store_true", help="give token ids without text")
    parser.add_argument("--transformers", action="store_true", help="run transformers' generate in turn")
    parser.add_argument("--causes", default="", help="workloads of benchmarks.causes to profile afterwards")
    parser.add_argument("--causes-tokens", type=int, default=48)
    parser.add_argument("--wait", action="store_true", help="measure when a line comes in")
    arguments = parser.parse_args()
    if arguments.transformers:
        peer = [sys.executable, "-m", "benchmarks.gpu_transformers", "--size", arguments.size]
        subprocess.run([*peer, "--folder", str(arguments.folder)], check=True)
    options = {name: json.loads(value) for name, value in (o.split("=", 1) for o in arguments.option)}
    text, named = not arguments.no_detokenize, {"size": arguments.size, "engine": arguments.engine}
    bench = Bench(arguments.size, arguments.folder, engine=arguments.engine, detokenize=text, **options)
    start = {"import_s": round(bench.import_s, 2), "start_s": round(bench.start_s, 2)}
    print(json.dumps({**named, **start, "text": text, **options}), flush=True)
    if arguments.wait:
        sys.stdin.readline()
    for name in filter(None, arguments.only.split(",")):
        try:
            figures = {key: round(value, 3) for key, value in getattr(bench, name)().items()}
        except Exception as error:
            figures = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({**named, "workload": name, **figures}), flush=True)
    if arguments.causes:
        from benchmarks.causes import Profiled, mark_stages

        mark_stages()
        profiled = Profiled(bench, arguments.causes_tokens)
        for name in arguments.causes.split(","):
            print(json.dumps({"size": arguments.size, "causes": name, **profiled.look(name, 8)}), flush=True)
    if arguments.engine == "beheld":
        bench.llm.close()


if __name__ == "__main__":
    main()
