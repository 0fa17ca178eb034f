"""Start-up: `beheld --help`, `beheld ask` on mote from a cold process to the answer, and what the imports alone take.

    python -m benchmarks.startup [--rounds 5]
    python -m benchmarks.startup --size 3B [--rounds 3]

Prints one JSON line of medians in seconds. "Cold" means a new process; files are in the system's cache. With a size of
benchmarks/shapes.py, from the start of a process to an `LLM` of that shape that is ready, and to the first token behind
its first picture: once with empty caches of what is compiled (kernels, layers, Python's bytecode), once with Python's
bytecode kept ("compile cold"), then with what the runs before left there, each of those on a line of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.shapes import SHAPES, checkpoint, prompt

SCENE = Path(__file__).parent.parent / "examples" / "scene.png"
COMMANDS = {
    "help": [sys.executable, "-m", "beheld.cli.main", "--help"],
    "import_torch": [sys.executable, "-c", "import torch"],
    "import_transformers_model": [
        sys.executable,
        "-c",
        "from transformers import Qwen2VLForConditionalGeneration, AutoProcessor",
    ],
    "ask": [sys.executable, "-m", "beheld.cli.main", "ask", str(SCENE), "What is in this picture?"],
}


# Says when it is ready and when the first token behind a picture is there; ends without taking libraries down.
READY = """
import json, os, sys, time
from beheld import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", max_model_len=4096, max_num_seqs=256, seed=0, use_tqdm_on_load=False)
ready = time.time()
from PIL import Image
asked = {"prompt": sys.argv[2], "multi_modal_data": {"image": Image.new("RGB", (448, 448), "teal")}}
llm.generate(asked, SamplingParams(max_tokens=1), use_tqdm=False)
print(json.dumps([ready, time.time()]), flush=True)
os._exit(0)
"""


def until_ready(size: str, rounds: int) -> None:
    """Print seconds to a ready engine and to the first token behind a picture: all cold, compilers cold, then warm."""
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(size, Path(folder) / "models")
        caches = {name: str(Path(folder) / name.lower()) for name in
                  ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONPYCACHEPREFIX")}  # fmt: skip
        for run in ("cold", "compile cold", *("warm" for _ in range(rounds))):
            if run == "compile cold":
                for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                    shutil.rmtree(caches[name], ignore_errors=True)
            start = time.time()
            command = [sys.executable, "-c", READY, str(model), prompt(size, 1)]
            # Where images came without bytecode they often forbid Python to write it, too.
            environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | caches
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            ready, first = json.loads(done.stdout.splitlines()[-1])
            figures = {"ready_s": round(ready - start, 2), "first_picture_s": round(first - start, 2)}
            print(json.dumps({"size": size, "caches": run, **figures}), flush=True)


def main() -> None:
    """Time each command in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--size", choices=tuple(SHAPES))
    arguments = parser.parse_args()
    if arguments.size:
        until_ready(arguments.size, arguments.rounds or 3)
        return
    rounds = arguments.rounds or 5
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - start)
    print(json.dumps({name: round(statistics.median(values), 2) for name, values in seconds.items()}))


if __name__ == "__main__":
    main()
