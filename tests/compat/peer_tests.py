"""Runs vLLM's own server tests over `beheld serve`, and counts by file what passes; the tests are not kept here.

    python -m tests.compat.peer_tests SOURCE [--only TEXT] [--record FILE] [--stage FOLDER] [--python PROGRAM]

SOURCE is a source tree of vLLM with its folder tests/entrypoints. The tests see a package `tests.utils` whose
RemoteOpenAIServer starts beheld with a tiny checkpoint under the real model's name, and a package `vllm`: beheld's.
A name that beheld has not skips a test as soon as it is used. PROGRAM is a Python with pytest-asyncio and the packages
of the development environment. Each test ends as one of

passed    the server did what the test wants
failed    it did something else; the record has the error's line
inside    the test asks for what is inside vLLM, or was skipped by itself
absent    the server did not start: an option, or a model without a tiny checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.compat import examples, peer_models
from tests.compat.stage import Stage

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).parent / "peer_shim"
LIMIT_S = 1200
# Where most of what a server does is tested.
FILES = (
    "openai/chat_completion",
    "openai/completion",
    "openai/responses",
    "openai/models",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/test_stop_token_ids.py",
    "openai/test_tool_choice_content_none.py",
    "anthropic",
    "serve/tokenize",
)


def lay_out(source: Path, folder: Path) -> Path:
    """Copy the tests and put the shim in place of what they import; returns the folder of the tests."""
    tests = folder / "tests"
    if not tests.is_dir():
        shutil.copytree(source / "tests" / "entrypoints", tests / "entrypoints")
        for path in tests.rglob("conftest.py"):
            if "gpu" in path.read_text(encoding="utf-8") and path.parent == tests:
                path.unlink()
    for name, place in (("utils.py", tests), ("peer_plugin.py", folder)):
        shutil.copy(SHIM / name, place / name)
    (tests / "__init__.py").touch()
    return tests / "entrypoints"


def run(made: Stage, python: str, folder: Path, file: Path) -> dict[str, tuple[str, str]]:
    """Run one file; returns test -> (result, last line of its error)."""
    source = file.read_text(encoding="utf-8")
    for name in dict.fromkeys(re.findall(r"[\"']([\w.-]+(?:/[\w.-]+)?)[\"']", source)):
        peer_models.lay(made.hub, name)
    record = made.folder / "record.json"
    record.unlink(missing_ok=True)
    environment = {
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "PEER_RECORD": str(record),
        "PEER_LOG": str(made.folder / "server.log"),
        "BEHELD_LOG_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
    }
    words = ["-q", "-p", "peer_plugin", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore", "--timeout=240"]
    process = subprocess.Popen(
        [python, "-m", "pytest", *words, "--rootdir", str(folder), "-c", os.devnull, str(file)],
        cwd=folder,
        env=os.environ | made.environment() | environment,
        stdout=(made.folder / "pytest.log").open("w", encoding="utf-8"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not record.is_file():
        log = (made.folder / "pytest.log").read_text(encoding="utf-8").strip().splitlines()
        return {"(the file)": ("absent", next((line for line in log if line.startswith("E  ")), "no test ran")[:200])}
    found: dict[str, tuple[str, str]] = {
        name: (result, line) for name, (result, line) in json.loads(record.read_text(encoding="utf-8")).items()
    }
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--only", action="append", help="files whose path holds this text")
    parser.add_argument("--record", type=Path, help="write each test's result into this file, as JSON")
    parser.add_argument("--stage", type=Path, help="where checkpoints are laid; kept for the next time")
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    made = examples.stage(arguments.stage or Path(tempfile.mkdtemp(prefix="beheld-peer-")))
    folder = made.folder / "peer"
    tests = lay_out(arguments.source, folder)
    files = sorted({path for name in FILES for path in _files(tests / name)})
    counts: Counter[str] = Counter()
    record: dict[str, dict[str, tuple[str, str]]] = {}
    for file in files:
        name = str(file.relative_to(tests))
        if arguments.only and not any(text in name for text in arguments.only):
            continue
        record[name] = found = run(made, arguments.python, folder, file)
        own = Counter(result for result, _ in found.values())
        counts.update(own)
        print(f"{name:68} {', '.join(f'{count} {result}' for result, count in sorted(own.items()))}", flush=True)
        if arguments.record:
            arguments.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(", ".join(f"{count} {result}" for result, count in counts.most_common()), "of", counts.total())


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else list(place.rglob("test_*.py"))


if __name__ == "__main__":
    main()
