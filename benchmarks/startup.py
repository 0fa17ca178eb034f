"""Start-up: `beheld --help`, `beheld ask` on mote from a cold process to the answer, and what the imports alone take.

    python -m benchmarks.startup [--rounds 5]

Prints one JSON line of medians in seconds. "Cold" means a new process; files are in the system's cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

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


def main() -> None:
    """Time each command in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - start)
    print(json.dumps({name: round(statistics.median(values), 2) for name, values in seconds.items()}))


if __name__ == "__main__":
    main()
