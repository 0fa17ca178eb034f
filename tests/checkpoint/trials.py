"""Starts of checkpoints that may be broken, each in a process of its own, forked from one that has the libraries."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TEXT = [{"role": "user", "content": "What is in this picture?"}]
_OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "kv_cache_memory_bytes": 4 << 20,
    "seed": 0,
}
_ADDRESS_BYTES = 24 << 30


@dataclass(frozen=True)
class Trial:
    """What came of a start and its questions.

    Attributes:
        end: "answered"; "refused" at start by an error of ours; "failed" at a question; "crashed": another exception
            at start; "hung" or "killed".
        text: what the error said.
        answers: the token ids of each answer.
        seconds: from the start to the refusal, or to being ready.
        peak_bytes: resident memory at most, less what was resident before.
    """

    end: str
    text: str = ""
    answers: tuple[tuple[int, ...], ...] = ()
    seconds: float = 0.0
    peak_bytes: int = 0


class Trials:
    """A process that forks one for each trial. A context manager."""

    def __init__(self, *warm: Path) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.trials", *map(str, warm)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def of(self, folder: Path, *, media: bool = False, limit_s: float = 30.0, **options: Any) -> Trial:
        """Start the checkpoint in `folder`, and ask it one text, and one image with `media`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"folder": str(folder), "media": media, "limit_s": limit_s, "options": options}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks has ended"
        found = json.loads(line)
        found["answers"] = tuple(map(tuple, found.get("answers", ())))
        return Trial(**found)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _attempt(folder: str, *, media: bool, options: dict[str, Any]) -> dict[str, Any]:
    from beheld import LLM, SamplingParams
    from beheld.core.errors import BeheldError

    before, begin = _status("VmRSS"), time.perf_counter()
    found: dict[str, Any] = {}
    try:
        llm = LLM(folder, **{**_OPTIONS, **options})
    except BeheldError as error:
        found = {"end": "refused", "text": f"{type(error).__name__}: {error}"}
    except BaseException:
        found = {"end": "crashed", "text": traceback.format_exc()[-1500:]}
    found["seconds"] = time.perf_counter() - begin
    if "end" not in found:
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        try:
            # What generation_config.json says holds for requests that say nothing.
            usual = llm.get_default_sampling_params()
            usual.max_tokens = 3
            llm.chat(TEXT, usual, use_tqdm=False)
            answers = [llm.chat(TEXT, params, use_tqdm=False)[0].outputs[0].token_ids]
            if media:
                from tests import tiny

                part = {"type": "image_pil", "image_pil": tiny.picture(56, 56, 0)}
                messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
                answers.append(llm.chat(messages, params, use_tqdm=False)[0].outputs[0].token_ids)
            found |= {"end": "answered", "answers": [list(map(int, ids)) for ids in answers]}
        except BaseException:
            found |= {"end": "failed", "text": traceback.format_exc()[-1500:]}
    found["peak_bytes"] = max(0, _status("VmHWM") - before)
    return found


def _forked(folder: str, *, media: bool, limit_s: float, options: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))
        try:
            os.write(writer, json.dumps(_attempt(folder, media=media, options=options)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    begin = time.perf_counter()
    ready = bool(select.select([reader], [], [], limit_s)[0])
    line = os.read(reader, 1 << 20) if ready else b""
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if line:
        found: dict[str, Any] = json.loads(line)
        return found
    return {"end": "killed" if ready else "hung", "seconds": time.perf_counter() - begin}


def main(warm: list[str]) -> None:
    """Start and ask the healthy checkpoints once, then fork for each line of standard input."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for folder in warm:
        _attempt(folder, media=(Path(folder) / "preprocessor_config.json").exists(), options={})
    for line in sys.stdin:
        order = json.loads(line)
        found = _forked(order["folder"], media=order["media"], limit_s=order["limit_s"], options=order["options"])
        print(json.dumps(found), file=answer, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
