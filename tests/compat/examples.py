"""Runs a folder of vLLM's example scripts as they stand and prints a row for each; the scripts are not kept here.

    python -m tests.compat.examples FOLDER [--only TEXT] [--stage FOLDER]

FOLDER is a copy of vLLM's examples/offline_inference, or of the offline scripts of its examples since 0.33. Each script
runs in a process of its own, as `beheld run-vllm SCRIPT` with the arguments of ARGUMENTS, on tiny checkpoints under the
real repositories' names and without a network; those of PROCESSES are started by torchrun.
A row says what happened:

ran      it ended with status 0
refused  it ended with an error of one line that says what is not built
lacks    it imports a package that is not installed, and one line says so
broke    anything else
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.compat import example_repositories, laid
from tests.compat.stage import Stage

LIMIT_S = 240
RUN_VLLM = ("-m", "beheld.cli.main", "run-vllm")
# A million positions of the tiny checkpoint take 0.38 GiB.
_ROOM = {"BEHELD_CPU_KV_CACHE_GIB": "0.5"}
LLAMA = "meta-llama/Llama-3.2-1B-Instruct"
# A tiny model ends seldom by itself; {model} is a folder with a Llama, {out} an empty folder.
ARGUMENTS: Mapping[str, str] = {
    "basic/chat.py": "--max-tokens 8",
    "kv_load_failure_recovery/decode_example.py": "--simulate-failure",
    "data_parallel.py": "--dp-size 2 --enforce-eager --max-model-len 512",
    "data_parallel_offline.py": "-dp=2 --enforce-eager --max-model-len 512",
    "llm_engine_example.py": "--model facebook/opt-125m",
    "llm_engine_reset_kv.py": "--model facebook/opt-125m",
    "load_sharded_state.py": "--model {model}",
    "mistral-small.py": "simple --format hf",
    "pooling/convert_model_to_seq_cls.py": '--path {out} --classifier_from_tokens ["e"]',
    "save_sharded_state.py": "--model {model} --output {out}",
    "spec_decode.py": "--method ngram --num-prompts 2 --dataset-name random --random-input-len 8 --output-len 8",
    "vision_language.py": "-m llava",
    "vision_language_multi_image.py": "-m qwen2_vl",
    "vision_language_pooling.py": "-m vlm2vec_phi3v",
    "audio_language.py": "-m qwen2_audio",
    # The default is a Llama with attention both ways, which is not built.
    "pooling/score/using_template_offline.py": "--model Qwen/Qwen3-Reranker-0.6B",
}
# How many processes of a script torchrun starts: as many as its options share the model or the prompts among.
PROCESSES: Mapping[str, int] = {
    "torchrun_example.py": 4,
    "torchrun_example_offline.py": 4,
    "torchrun_dp_example.py": 2,
    "torchrun_dp_example_offline.py": 2,
}
# A script that goes on with what another one has left in its folder -> that one, which lies next to it.
AFTER: Mapping[str, str] = {"decode_example.py": "prefill_example.py"}
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
_NAME = re.compile(r"[\"']([\w.-]+/[\w.-]+)[\"']")
# What a script reads with urllib lies beside the process: a text of this length.
_SITE = """
import io, os, urllib.request
_open = urllib.request.urlopen
def _urlopen(url, *args, **options):
    if str(url).endswith(".txt"):
        return io.BytesIO(b"a long text " * 20)
    return _open(url, *args, **options)
urllib.request.urlopen = _urlopen
"""


@dataclass(frozen=True)
class Row:
    """What came of a script.

    Attributes:
        line: the last line of standard error that says something, if it did not run.
        printed: its standard output.
    """

    script: str
    result: str
    seconds: float
    line: str = ""
    printed: str = ""


def stage(folder: Path) -> Stage:
    """A machine without a network, with the media that the examples ask for."""
    made = Stage(folder)
    made.hub.mkdir(parents=True, exist_ok=True)
    laid.assets(made.assets)
    for name in ("azacinto_foscolo",):
        (made.assets / f"{name}.ogg").write_bytes((made.assets / "winning_call.ogg").read_bytes())
    (made.assets / "stop_sign.jpg").write_bytes((made.assets / "cherry_blossom.jpg").read_bytes())
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    return made


def run(
    made: Stage,
    script: Path,
    name: str,
    words: str | None = None,
    limit_s: float = LIMIT_S,
    python: str | None = None,
    processes: int | None = None,
    folder: Path | None = None,
) -> Row:
    """Run one script with its arguments, after the one that it needs.

    Args:
        name: its name in ARGUMENTS.
        words: other arguments.
        python: a Python that runs the script without beheld.
        processes: how many of torchrun's, if not as PROCESSES says.
        folder: where it runs, if not in a new folder.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(dir=made.folder) as place:
            first = script.parent / AFTER.get(script.name, "")
            if first.is_file():
                earlier = run(made, first, name, "", limit_s, python, folder=Path(place))
                if earlier.result != "ran":
                    return earlier
            return run(made, script, name, words, limit_s, python, processes, Path(place))
    source = script.read_text(encoding="utf-8")
    given = _arguments(name) if words is None else words
    for repository in _repositories(source, given.split()):
        if example_repositories.known(repository):
            example_repositories.lay(made.hub, repository)
    laid.pictures(made.copies, re.findall(r'"(https://[^"]+\.(?:jpe?g|png))"', source))
    model = example_repositories.lay(made.hub, LLAMA)
    given = given.format(model=model, out=f"{folder}/out")
    started = time.monotonic()
    process = subprocess.Popen(
        [*_started(python, processes or PROCESSES.get(script.name)), str(script), *given.split()],
        cwd=folder,
        env=os.environ | made.environment() | _ROOM | _paths(made.folder / "site"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Row(name, "broke", limit_s, f"no end after {limit_s:.0f} s")
    seconds = time.monotonic() - started
    return Row(name, *_judged(process.returncode, said, seconds), printed)


def _arguments(name: str) -> str:
    """The arguments of a script: of its own name, or of the older one's that stands elsewhere without `_offline`."""
    path = Path(name)
    by_stem = {Path(other).stem: words for other, words in ARGUMENTS.items()}
    return ARGUMENTS.get(name, by_stem.get(path.stem, by_stem.get(path.stem.removesuffix("_offline"), "")))


def _started(python: str | None, processes: int | None) -> tuple[str, ...]:
    """The command in front of a script."""
    if python:
        return (python,)
    if processes is None:
        return (sys.executable, *RUN_VLLM)
    return (sys.executable, *_TORCHRUN, f"--nproc-per-node={processes}", *RUN_VLLM)


def _repositories(source: str, words: list[str]) -> list[str]:
    """The repositories that a script names: in the function of the model key among the arguments, or anywhere."""
    if "-m" in words and "model_example_map" in source:
        found = re.search(rf'"{re.escape(words[words.index("-m") + 1])}": (\w+)', source)
        return [] if found is None else _NAME.findall(source.split(f"def {found[1]}(")[1].split("\ndef ")[0])
    return [*_NAME.findall(source), *(word for word in words if example_repositories.known(word))]


def _paths(site: Path) -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": os.pathsep.join(map(str, (site, root))), "TQDM_DISABLE": "1", "BEHELD_LOG_LEVEL": "WARNING"}


def _judged(status: int, said: str, seconds: float) -> tuple[str, float, str]:
    lines = [line for line in said.splitlines() if line.strip()]
    if status == 0 and "Traceback (most recent call last)" not in said:
        return "ran", seconds, ""
    told = [line for line in lines if line.startswith("beheld: ")]
    if told and "Traceback" not in said:
        return ("lacks" if "which is not installed" in told[-1] else "refused"), seconds, told[-1]
    return "broke", seconds, lines[-1] if lines else f"status {status}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", help="scripts whose name holds this text")
    parser.add_argument("--stage", type=Path, help="where checkpoints and media are laid; kept for the next time")
    parser.add_argument("--keys", action="store_true", help="run each model key of the scripts that have some")
    arguments = parser.parse_args()
    made = stage(arguments.stage or Path(tempfile.mkdtemp(prefix="beheld-examples-")))
    counts: Counter[str] = Counter()
    for script in sorted(arguments.folder.rglob("*.py")):
        name = str(script.relative_to(arguments.folder))
        if arguments.only and not any(text in name for text in arguments.only):
            continue
        for words in _variants(script, name) if arguments.keys else (None,):
            row = run(made, script, name, words)
            counts[row.result] += 1
            shown = name if words is None else f"{name} {words}"
            print(f"{row.result:8}{row.seconds:6.1f} s  {shown:48}  {row.line[:260]}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.most_common()), "of", counts.total())


def _variants(script: Path, name: str) -> list[str | None]:
    """The arguments for each model key that has a tiny checkpoint, or the usual ones."""
    source = script.read_text(encoding="utf-8")
    table = re.search(r"model_example_map = \{(.*?)\}", source, re.DOTALL)
    if table is None:
        return [None]
    found = []
    for key, function in re.findall(r'"([^"]+)": (\w+)', table[1]):
        if any(map(example_repositories.known, _repositories(source, ["-m", key]))):
            kinds = _modalities(source.split(f"def {function}(")[1].split("\ndef ")[0])
            found += [(number, f"-m {key}{words}") for number, words in enumerate(sorted(kinds))]
    # Every key once comes first.
    return [words for _, words in sorted(found, key=lambda one: one[0])]


def _modalities(body: str) -> list[str]:
    """The words that ask for each kind of media that the function of a model key writes prompts for."""
    only = re.search(r"assert modality (?:==|in) (.+)", body)
    named = re.findall(r'"([\w+]+)"', only[1] if only else " ".join(re.findall(r"modality == .+", body)))
    return [f" --modality {kind}" if kind != "image" else "" for kind in dict.fromkeys(named)] or [""]


if __name__ == "__main__":
    main()
