"""Runs vLLM's own server tests over `beheld serve`, and counts by file what passes; the tests are not kept here.

    python -m tests.compat.peer_tests SOURCE [--parsers] [--only TEXT] [--record FILE] [--stage FOLDER] [--python FILE]

SOURCE is a source tree of vLLM with its folder tests/entrypoints. The tests see a package `tests.utils` whose
RemoteOpenAIServer starts beheld with a tiny checkpoint under the real model's name, a package `vllm`, and a command of
that name: beheld's.
A name that beheld has not skips a test as soon as it is used. With --parsers the tests of parsers of calls and of
reasoning run over beheld's readers, with one tokenizer in place of each model's, and no server. --python is a Python
with pytest-asyncio and the packages of the development environment. Each test ends as one of

passed    the server did what the test wants
failed    it did something else; the record has the error's line
inside    the test asks for what is inside vLLM, or was skipped by itself
absent    the server did not start: an option, or a model without a tiny checkpoint; or no reader of that format
"""

from __future__ import annotations

import argparse
import contextlib
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

from beheld.compat import assets
from tests.compat import examples, laid, peer_models
from tests.compat.stage import Stage

# Tests of parsers, and the functions of their helpers that feed a parser piece by piece.
PARSERS = {
    "tool_parsers": ("run_tool_extraction_streaming",),
    "reasoning": ("run_reasoning_extraction_streaming",),
}
ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).parent / "peer_shim"
_INNER = ("engine", "logits_processors", "sample")
# What processes that a test starts import as `vllm`; the test's own process has the shim.
_PACKAGE = """import sys

del sys.modules[__name__]
from beheld.compat.finder import install

install()
import vllm
"""
# A file is stopped after this time; the tests that ended until then count.
LIMIT_S = 280
# Where most of what a server does is tested.
FILES = (
    "openai/chat_completion",
    "openai/completion",
    "openai/responses",
    "openai/decisions",
    "openai/models",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/test_stop_token_ids.py",
    "openai/test_tool_calls_serialization.py",
    "openai/test_tool_choice_content_none.py",
    "openai/test_session_id.py",
    "openai/test_penalty_default_resolution.py",
    "openai/test_reasoning_enable_thinking.py",
    "openai/test_watermarking.py",
    "openai/test_openai_schema.py",
    "anthropic",
    "cohere",
    "cli",
    "common",
    "launchers",
    "llm",
    "rl",
    "scale_out",
    "serve",
    "tool_parsers",
    "generate",
    "multimodal",
    "pooling",
    "speech_to_text",
    "unit_tests",
)

# Further ones, beside the folder of those.
FURTHER = (
    *("detokenizer", "samplers", "test_pooling_params.py", "test_request_input_bounds.py", "test_sampling_params.py"),
    *("v1/engine/test_async_llm.py", "v1/engine/test_llm_engine.py", "v1/sample/test_logprobs.py"),
    *("v1/logits_processors/test_custom_offline.py", "v1/logits_processors/test_custom_online.py"),
    "v1/sample/test_sampling_params_e2e.py",
)


def lay_out(source: Path, folder: Path) -> Path:
    """Copy the tests and put the shim in place of what they import; returns the folder of the tests."""
    tests = folder / "tests"
    if not tests.is_dir():
        shutil.copytree(source / "tests" / "entrypoints", tests / "entrypoints")
        for path in tests.rglob("conftest.py"):
            if "gpu" in path.read_text(encoding="utf-8") and path.parent == tests:
                path.unlink()
    for place in map(Path, (*FURTHER, "v1/logits_processors/utils.py", "v1/sample/utils.py")):
        copy = tests / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists():
            (shutil.copy if (source / "tests" / place).is_file() else shutil.copytree)(source / "tests" / place, copy)
    engine = tests / "v1/engine/test_async_llm.py"
    # The whole file is skipped without CUDA, which few of its tests ask for.
    text = engine.read_text(encoding="utf-8").replace("if not current_platform.is_cuda():", "if False:")
    engine.write_text(text, encoding="utf-8")
    for name, helpers in PARSERS.items():
        if not (tests / name).is_dir():
            shutil.copytree(source / "tests" / name, tests / name)
            shutil.copytree(source / "tests" / "parser", tests / "parser", dirs_exist_ok=True)
            utils = tests / name / "utils.py"
            wrapped = "".join(f"{helper} = finishing({helper})\n" for helper in helpers)
            text = utils.read_text(encoding="utf-8")
            utils.write_text(f"{text}\nfrom peer_parsers import finishing\n\n{wrapped}", encoding="utf-8")
    for name in ("peer_plugin.py", "peer_parsers.py", "peer_runners.py"):
        shutil.copy(SHIM / name, folder / name)
    (folder / "vllm").mkdir(exist_ok=True)
    (folder / "vllm" / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
    vectors = Path("models/language/pooling/embed_utils.py")
    (tests / vectors.parent).mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "tests" / vectors, tests / vectors)
    for name, place in (
        *(("utils.py", "utils.py"), ("peer_conftest.py", "conftest.py"), ("peer_model_utils.py", "models/utils.py")),
    ):
        shutil.copy(SHIM / name, tests / place)
    for path in (source / "examples").rglob("*.jinja"):
        copy = folder / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    inner = ("models", "models/language", "models/language/pooling", *(f"v1/{name}" for name in _INNER))
    for place in (".", "v1", *inner):
        (tests / place / "__init__.py").touch()
    return tests


def run(
    made: Stage, python: str, folder: Path, files: list[Path], source: Path, *, parsers: bool
) -> dict[str, dict[str, tuple[str, str]]]:
    """Run files in one process; returns file -> test -> (result, last line of its error)."""
    beside = {found for file in files for parent in file.parents if (found := parent / "conftest.py").is_file()}
    # Some name their models there.
    beside |= {found for file in files if (found := file.parent / "utils.py").is_file()}
    texts = "\n".join(file.read_text(encoding="utf-8") for file in (*files, *beside))
    named = dict.fromkeys((*peer_models.ADAPTERS, *re.findall(r"[\"']([\w.-]+(?:/[\w.-]+)?)[\"']", texts)))
    for name in () if parsers else named:
        peer_models.lay(made.hub, name)
    _media(made, texts)
    first = files[0]
    spoken = peer_models.SPOKEN.get(f"{first.parent.name}/{first.name}") or peer_models.SPOKEN.get(first.name, {})
    for name, pieces in spoken.items():
        peer_models.speak(made.hub, name, pieces)
    widened = [name for name in named if first.name in peer_models.WIDE and peer_models.widen(made.hub, name)]
    if f"{first.parent.name}/{first.name}" in peer_models.SPELT:
        widened += [name for name in named if peer_models.spell(made.hub, name)]
    record = made.folder / "record.json"
    record.unlink(missing_ok=True)
    command = made.folder / "bin" / "vllm"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec "{python}" -m beheld.cli.main "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environment = {
        "PATH": os.pathsep.join((str(command.parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        "PEER_PARSERS": "1" if parsers else "",
        "PEER_RECORD": str(record),
        "PEER_SOURCE": str(source.resolve()),
        "PEER_LOG": str(made.folder / "server.log"),
        "BEHELD_LOG_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
    }
    words = [
        "-q",
        "--continue-on-collection-errors",
        "-p",
        "peer_plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-W",
        "ignore",
        "--timeout=240",
    ]
    process = subprocess.Popen(
        [python, "-m", "pytest", *words, "--rootdir", str(folder), "-c", os.devnull, *map(str, files)],
        cwd=folder,
        env=os.environ | made.environment() | environment,
        stdout=(made.folder / "pytest.log").open("w", encoding="utf-8"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _end(process, made.folder / "server.log.pids")
        for name in (*spoken, *widened):
            peer_models.forget(made.hub, name)
    found: dict[str, dict[str, tuple[str, str]]] = {}
    if record.is_file():
        for place, tests in json.loads(record.read_text(encoding="utf-8")).items():
            found[str(folder / place)] = {name: (result, line) for name, (result, line) in tests.items()}
    log = (made.folder / "pytest.log").read_text(encoding="utf-8").strip().splitlines()
    why = next((line for line in log if line.startswith("E  ")), "no test ran")[:200]
    return {str(file): found.get(str(file), {"(the file)": ("absent", why)}) for file in files}


def _media(made: Stage, texts: str) -> None:
    """Lay what the tests fetch: pictures, videos and sounds at their addresses, and sounds by name."""
    texts = texts.replace("{VLLM_S3_BUCKET_URL}", assets.PUBLIC)
    urls = re.findall(r"https://[^\s\"']+\.(?:jpe?g|png|mp4|avi)(?=[\"'])", texts)
    laid.pictures(made.copies, [url for url in urls if url[-3:] not in ("mp4", "avi")])
    film = (made.assets / "sample_demo_1.mp4").read_bytes()
    laid.files(made.copies, {url: film for url in urls if url[-3:] in ("mp4", "avi")})
    sounds = {place: (made.assets / "winning_call.ogg").read_bytes() for place in assets.AUDIOS.values()}
    laid.files(made.copies, {f"{assets.PUBLIC}/{place}": sound for place, sound in sounds.items()})
    for place, sound in sounds.items():
        (made.assets / Path(place).name).write_bytes(sound)


def _end(process: subprocess.Popen[bytes], pids: Path) -> None:
    """End the tests, and the servers that they started and did not end."""
    servers = pids.read_text(encoding="utf-8").split() if pids.is_file() else []
    for pid in (process.pid, *map(int, servers)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    process.wait()
    pids.unlink(missing_ok=True)


def _groups(files: list[Path], *, parsers: bool) -> list[list[Path]]:
    """The files that run in one process: all tests of parsers, all without a model, and any other by itself."""
    if parsers:
        return [files]
    alone = [
        file
        for file in files
        if re.search("RemoteOpenAIServer|client|vllm_runner|LLM\\(", file.read_text(encoding="utf-8"))
    ]
    return [[file for file in files if file not in alone], *([file] for file in alone)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--parsers", action="store_true", help="run the tests of parsers")
    parser.add_argument("--only", action="append", help="files whose path holds this text")
    parser.add_argument("--record", type=Path, help="write each test's result into this file, as JSON")
    parser.add_argument("--stage", type=Path, help="where checkpoints are laid; kept for the next time")
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    made = examples.stage(arguments.stage or Path(tempfile.mkdtemp(prefix="beheld-peer-")))
    folder = made.folder / "peer"
    tests = lay_out(arguments.source, folder)
    places = PARSERS if arguments.parsers else (*(f"entrypoints/{name}" for name in FILES), *FURTHER)
    files = sorted({path for name in places for path in _files(tests / name)})
    counts: Counter[str] = Counter()
    record: dict[str, dict[str, tuple[str, str]]] = {}
    wanted = [file for file in files if any(text in str(file.relative_to(tests)) for text in arguments.only or ("",))]
    for group in filter(None, _groups(wanted, parsers=arguments.parsers)):
        found = run(made, arguments.python, folder, group, arguments.source, parsers=arguments.parsers)
        for file, results in found.items():
            name = str(Path(file).relative_to(tests)).removeprefix("entrypoints/")
            record[name] = results
            own = Counter(result for result, _ in results.values())
            counts.update(own)
            print(f"{name:68} {', '.join(f'{count} {result}' for result, count in sorted(own.items()))}", flush=True)
        if arguments.record:
            arguments.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(", ".join(f"{count} {result}" for result, count in counts.most_common()), "of", counts.total())


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else list(place.rglob("test_*.py"))


if __name__ == "__main__":
    main()
