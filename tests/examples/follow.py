"""Follows pages of the documentation word by word: runs every `bash` and `python` block, in order.

    python -m tests.examples.follow docs/getting-started.md docs/how-to/*.md

Blocks in other languages (`sh`, `yaml`, ...) are not run: they need a network, several GPUs or hosts, Docker or files
of the reader's. A page is followed in an empty folder that holds the examples and a few files that pages name. Names
of hub models stand for tiny checkpoints of the tests: in place of the name, or under it in a cache of the page's own.
A line `beheld serve ...` or `beheld encode-serve ...` starts a server that runs until the page ends, or starts another
one at its port.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
# What pages name -> the family whose tiny checkpoint stands for it.
MODELS = {
    "smolvlm-256m": "idefics3",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2_5_vl",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
    "Qwen/Qwen2-Audio-7B-Instruct": "qwen2_audio",
    "openai/whisper-large-v3-turbo": "whisper",
    "tencent/HunyuanOCR": "hunyuan_vl",
    "zai-org/GLM-4.5V-FP8": "glm4v_moe_fp8",
    "zai-org/GLM-4.1V-9B-Thinking": "glm4v",
    "Qwen/Qwen3-0.6B": "qwen2",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama",
}
# What pages name as it stands, in a cache of the page's own.
REPOSITORIES = (
    "openai/clip-vit-base-patch32",
    "Qwen/Qwen3-Reranker-0.6B",
    "Qwen/Qwen3-VL-Reranker-2B",
    "vidore/colqwen2-v1.0-hf",
)
# GGUF files that pages name, in the page's folder.
TEXT_FILE, VISION_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolVLM/SmolVLM-500M-Instruct-Q8_0.gguf"
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SNIPPET = re.compile(r'--8<-- "([^":]+)(?::(\w+))?"')


@dataclass(frozen=True)
class Block:
    """A block of a page: its language, its text, and the line on which it begins."""

    language: str
    text: str
    line: int

    @property
    def included(self) -> bool:
        """It shows a part of an example, which a test of its own runs."""
        return _SNIPPET.search(self.text) is not None


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, those in tabs and lists included."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match[1], textwrap.dedent(match[2]), line))
    return found


def commands(block: Block) -> list[str]:
    """The commands of a `bash` block; continued lines, here-documents and quoted texts are joined."""
    found: list[str] = []
    pending: list[str] = []
    end = ""
    for line in block.text.splitlines():
        pending.append(line)
        if end:
            if line == end:
                end = ""
            else:
                continue
        elif heredoc := re.search(r"<<'?(\w+)'?", line):
            end = heredoc[1]
            continue
        text = "\n".join(pending)
        if line.endswith("\\") or re.sub(r"(^|\s)#\s.*$", "", text, flags=re.MULTILINE).count("'") % 2:
            continue
        if text.strip() and not text.startswith("#"):
            found.append(text)
        pending = []
    assert not pending, f"line {block.line}: the block ends in the middle of a command"
    return found


def stand_ins(text: str) -> str:
    """A block's text with the folders of tiny checkpoints in place of hub names."""
    for name, family in MODELS.items():
        if name in text:
            text = text.replace(name, str(tiny.checkpoint(family)))
    return text


def lay(text: str, folder: Path) -> None:
    """Lay tiny checkpoints into the page's cache, under the hub names that a block's text has."""
    for name in REPOSITORIES:
        if name in text:
            # It needs pytest, which a user's environment lacks.
            from tests.compat import example_repositories

            example_repositories.lay(folder / ".cache" / "hub", name)


def lay_files(text: str, folder: Path) -> None:
    """Lay tiny GGUF files into the page's folder, under the names that a block's text has."""
    # They need the package gguf, which a user's environment may lack.
    if TEXT_FILE in text and not (folder / TEXT_FILE).exists():
        from tests import tiny_gguf

        tiny_gguf.write(tiny.checkpoint("llama"), folder / TEXT_FILE, tiny_gguf.Kind.Q4_1)
    if VISION_FILE in text and not (folder / VISION_FILE).exists():
        from tests import tiny_gguf

        named = folder / VISION_FILE
        made = tiny_gguf.idefics3(tiny.checkpoint("idefics3"), named.parent, tiny_gguf.Kind.Q8_0)
        made.rename(named)
        (named.parent / "mmproj-a.gguf").rename(named.parent / "mmproj-SmolVLM-500M-Instruct-f16.gguf")


def furnish(folder: Path) -> None:
    """Put into a folder what pages name."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name, seed in (("photo.jpg", 1), ("a.png", 2), ("b.png", 3)):
        tiny.picture(112, 84, seed).save(folder / name)
    shutil.copy(ROOT / "examples" / "motion.mp4", folder / "clip.mp4")
    (folder / "speech.wav").write_bytes(tiny.wav(tiny.sound(1.5)))
    # A checkout's command, whatever is installed.
    (folder / ".bin").mkdir()
    for name, words in (("beheld", f'"{sys.executable}" -m beheld'), ("python", f'"{sys.executable}"')):
        command = folder / ".bin" / name
        command.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        command.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """What the commands of a page see: no network, this checkout, a cache of their own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("BEHELD_", "VLLM_"))}
    # Commands of optional packages, such as Ray's, are beside the interpreter.
    beside = Path(sys.executable).parent
    return own | {
        "PATH": f"{folder / '.bin'}:{beside}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / ".cache"),
        "BEHELD_LOG_LEVEL": "WARNING",
    }


class Walk:
    """One page being followed; servers that it starts end with it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._environment = environment(folder)
        self._servers: dict[str, ExitStack] = {}

    def run(self, block: Block) -> None:
        """Run a block.

        Raises:
            AssertionError: a command failed; it says which, and what the command wrote.
        """
        lay(block.text, self._folder)
        lay_files(block.text, self._folder)
        if block.language == "python":
            self._call([sys.executable, "-c", stand_ins(block.text)], block)
            return
        for command in commands(block):
            # What runs is this checkout, installed or not.
            text = re.sub(r"^pip install (-e )?\S+ && ", "", stand_ins(command))
            exported = re.fullmatch(r"export (\w+)=(\S+)", text)
            if exported:
                self._environment[exported[1]] = exported[2]
            elif text.startswith(("beheld serve", "beheld encode-serve")):
                self._serve(text)
            else:
                self._call(["bash", "-c", text], block)

    def _call(self, words: list[str], block: Block) -> None:
        done = subprocess.run(
            words, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"line {block.line}: {words[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        # A page may show the error of one item among others.
        refused = re.search(r'^\{"error": \{', done.stdout, re.MULTILINE)
        assert refused is None, f"line {block.line}: {words[-1]}\n{done.stdout[-2000:]}"

    def _serve(self, text: str) -> None:
        given = re.search(r"--port (\d+)", text)
        if given is None and "--config" in text:
            given = re.search(r"port: (\d+)", (self._folder / "serve.yaml").read_text(encoding="utf-8"))
            assert given is not None
        port = "8000" if given is None else given[1]
        if port in self._servers:
            self._servers[port].close()
        self._servers[port] = self._stack.enter_context(ExitStack())
        self._servers[port].enter_context(self._serving(text, port))

    @contextmanager
    def _serving(self, text: str, port: str) -> Iterator[None]:
        # It would answer in place of the page's own server, which may not even start.
        with socket.socket() as trial:
            assert trial.connect_ex(("127.0.0.1", int(port))) != 0, f"another program listens at port {port}"
        log = (self._folder / "server.log").open("w", encoding="utf-8")
        # A session of its own, so that its end reaches the server and all its workers.
        server = subprocess.Popen(
            ["bash", "-c", f"exec {text}"], cwd=self._folder, env=self._environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                assert server.poll() is None, (self._folder / "server.log").read_text(encoding="utf-8")[-4000:]
                try:
                    url = f"http://127.0.0.1:{port}/health"
                    if httpx.get(url, timeout=5, trust_env=False, verify=False).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.2)
            else:
                raise AssertionError(f"{text}: it does not serve within 120 s")
            yield
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(timeout=60)
            log.close()


def follow(page: Path, say: bool = False) -> int:
    """Follow a page; returns the number of blocks that were run."""
    number = 0
    with tempfile.TemporaryDirectory(prefix="beheld-follow-") as name, ExitStack() as stack:
        folder = Path(name)
        furnish(folder)
        walk = Walk(folder, stack)
        for block in blocks(page):
            if block.language in ("bash", "python") and not block.included:
                start = time.monotonic()
                walk.run(block)
                number += 1
                if say:
                    first = block.text.splitlines()[0]
                    print(f"  {time.monotonic() - start:5.1f} s  {page.name}:{block.line}: {first}", flush=True)
    return number


def main(pages: list[str]) -> int:
    """Follow pages; returns the number of those that failed."""
    failed = 0
    for page in map(Path, pages):
        try:
            print(f"{page}: {follow(page, say=True)} blocks", flush=True)
        except (AssertionError, subprocess.SubprocessError) as error:
            failed += 1
            print(f"{page}: FAILED {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
