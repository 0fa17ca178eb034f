"""One GGUF text model on a CPU: beheld against llama.cpp and OpenVINO GenAI, each run in a process of its own.

    python -m benchmarks.gguf_peers FILE.gguf --peers PYTHON --threads 1 --rounds 3     all in turn; prints each run
    python -m benchmarks.gguf_peers FILE.gguf --engine llama.cpp                        one run; prints one JSON line

PYTHON is the interpreter of an environment with the packages xllamacpp (llama.cpp, built for this CPU) and
openvino-genai. Prompts are random token ids, decoding is greedy. Figures with `cpu` in their name are of the process's
own time, all threads: other programs on the machine hardly change it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu_methods import peak_gib

_SHORT, _TOKENS = 64, 64
# Prompts of token ids, and how many tokens to add to each.
Run = Callable[[list[list[int]], int], None]


def _beheld(path: str, threads: int) -> Run:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from beheld import LLM, SamplingParams

    llm = LLM(path, max_model_len=1024, max_num_seqs=16, enable_prefix_caching=False)

    def run(prompts: list[list[int]], tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    return run


def _llama_cpp(path: str, threads: int) -> Run:
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, 1024, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup, params.verbosity = False, -1
    server = xllamacpp.Server(params)

    def run(prompts: list[list[int]], tokens: int) -> None:
        for ids in prompts:
            asked = {"prompt": ids, "n_predict": tokens, "cache_prompt": False, "ignore_eos": True, "temperature": 0}
            answer = server.handle_completions(asked)
            assert answer["usage"]["completion_tokens"] == tokens, answer

    return run


def _openvino(path: str, threads: int) -> Run:
    import numpy as np
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, PERFORMANCE_HINT="LATENCY")

    def run(prompts: list[list[int]], tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        answer = pipeline.generate(inputs, config)
        assert all(len(each) == tokens for each in answer.tokens)

    return run


ENGINES: dict[str, Callable[[str, int], Run]] = {"beheld": _beheld, "llama.cpp": _llama_cpp, "openvino": _openvino}


def measure(engine: str, path: str, threads: int, prompt: int, repeats: int) -> dict[str, Any]:
    """Return the figures of one engine: seconds to start, milliseconds a token and a prompt, and GiB at the peak."""
    started = time.perf_counter()
    run = ENGINES[engine](path, threads)
    start_s = time.perf_counter() - started
    rng = random.Random(0)

    def timed(length: int, tokens: int) -> tuple[float, float]:
        """Return the medians of seconds and of this process's seconds on the CPU, after one to warm up."""
        found = []
        for _ in range(repeats + 1):
            ids = [rng.randrange(500, 40000) for _ in range(length)]
            wall, own = time.perf_counter(), time.process_time()
            run([ids], tokens)
            found.append((time.perf_counter() - wall, time.process_time() - own))
        walls, owns = zip(*found[1:], strict=True)
        return statistics.median(walls), statistics.median(owns)

    first, many, whole = timed(_SHORT, 1), timed(_SHORT, 1 + _TOKENS), timed(prompt, 1)
    return {
        "engine": engine,
        "file": Path(path).name,
        "threads": threads,
        "start_s": start_s,
        "next_token_ms": (many[0] - first[0]) / _TOKENS * 1e3,
        "next_token_cpu_ms": (many[1] - first[1]) / _TOKENS * 1e3,
        "prompt_tokens": prompt,
        "prompt_ms": whole[0] * 1e3,
        "prompt_cpu_ms": whole[1] * 1e3,
        "peak_gib": peak_gib(),
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--engine", choices=tuple(ENGINES))
    parser.add_argument("--peers", help="interpreter of an environment with xllamacpp and openvino-genai")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if given.engine:
        print(json.dumps(measure(given.engine, given.file, given.threads, given.prompt, given.repeats)), flush=True)
        # Ends without taking the libraries down.
        os._exit(0)
    for _ in range(given.rounds):
        for engine in ENGINES if given.peers else ("beheld",):
            python = sys.executable if engine == "beheld" else given.peers
            options = {"threads": given.threads, "prompt": given.prompt, "repeats": given.repeats}
            command = [python, "-m", "benchmarks.gguf_peers", given.file, "--engine", engine]
            command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                sys.exit(f"{engine} failed:\n{done.stderr[-3000:]}")
            print(done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
