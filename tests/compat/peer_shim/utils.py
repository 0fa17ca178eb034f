"""What vLLM's server tests import as `tests.utils`: a server of beheld's, and marks that mean nothing here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import peer_runners
import pytest

VLLM_PATH = Path(__file__).parents[1]
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}
_START_S = 180
# Which device, and how numbers are stored: the tests run on what there is.
_LEFT_OUT = {"--dtype": 1, "--gpu-memory-utilization": 1, "--attention-backend": 1, "--enforce-eager": 0}
# Tests of calls run without marks in their texts, which are not built.
_LEFT_OUT |= {"--watermark-config": 1}
# Routes of token ids are there without it.
_LEFT_OUT |= {"--enable-scale-out": 0}
# The family says how it reasons.
_LEFT_OUT |= {"--reasoning-config": 1}


def requires_spawn_multiprocessing() -> bool:
    """Engines may be forked."""
    return False


def set_random_seed(seed: int) -> None:
    """Seed the generators of this process."""
    import torch

    torch.manual_seed(seed)


class RemoteOpenAIServer:
    """`beheld serve MODEL ARGUMENTS` on a free port until the end of the block."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: Any = None,
        override_hf_configs: Any = None,
        **_: Any,
    ) -> None:
        self.host = "127.0.0.1"
        words = _without(list(map(str, vllm_serve_args)))
        if override_hf_configs is not None:
            words += ["--hf-overrides", json.dumps(override_hf_configs)]
        if "--port" in words:
            self.port = int(words[words.index("--port") + 1])
        else:
            self.port = _free_port()
            words += ["--port", str(self.port)]
        # As tiny models are compared, exactly: nothing is rounded on the way.
        words += ["--dtype", "float32"]
        if "--served-model-name" not in words:
            words += ["--served-model-name", model]
        self.show_hidden_metrics = any(word.startswith("--show-hidden-metrics") for word in words)
        self.uds = words[words.index("--uds") + 1] if "--uds" in words else None
        self.proc: Any = None
        self._log = open(os.environ["PEER_LOG"], "w", encoding="utf-8")  # noqa: SIM115
        self._start(model, words, env_dict)
        # The runner ends it if this process cannot.
        with open(os.environ["PEER_LOG"] + ".pids", "a", encoding="utf-8") as pids:
            pids.write(f"{self.proc.pid}\n")
        until = time.monotonic() + _START_S
        while not self._answers():
            if self.proc.poll() is not None or time.monotonic() > until:
                self._end()
                lines = Path(os.environ["PEER_LOG"]).read_text(encoding="utf-8").strip().splitlines()
                pytest.fail(f"ABSENT: {lines[-1] if lines else 'the server did not start'}", pytrace=False)
            time.sleep(0.2)

    def _start(self, model: str, words: list[str], env_dict: Any) -> None:
        """Start the server's process."""
        self.proc = subprocess.Popen(
            [sys.executable, "-m", "beheld.cli.main", "serve", model, *words],
            env=os.environ | (env_dict or {}),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def _answers(self) -> bool:
        if self.uds is not None:
            # Connections are taken before there are answers.
            with socket.socket(socket.AF_UNIX) as found:
                found.settimeout(2)
                try:
                    found.connect(self.uds)
                    found.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    return found.recv(16).startswith(b"HTTP/1.1")
                except OSError:
                    return False
        try:
            with urllib.request.urlopen(self.url_for("health"), timeout=2):
                return True
        except urllib.error.HTTPError:
            # It wants a key.
            return True
        except OSError:
            return False

    def _end(self) -> None:
        if self.proc.poll() is None:
            os.killpg(self.proc.pid, signal.SIGKILL)
        self.proc.wait()
        self._log.close()

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def url_root(self) -> str:
        """The server's address."""
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """The address of a route."""
        return self.url_root + "/" + "/".join(part.strip("/") for part in parts)

    def _get_process_termination_timeout(self) -> float:
        """Seconds in which a server ends that lets no request finish."""
        return 15.0

    def get_client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client of this server."""
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The same, asynchronous."""
        return openai.AsyncOpenAI(**self._options(options))

    def get_client_anthropic(self, **options: Any) -> Any:
        """Anthropic's client of this server."""
        import anthropic

        return anthropic.Anthropic(
            **({"base_url": self.url_for(), "api_key": self.DUMMY_API_KEY, "max_retries": 0} | options)
        )

    def get_async_client_anthropic(self, **options: Any) -> Any:
        """The same, asynchronous."""
        import anthropic

        return anthropic.AsyncAnthropic(
            **({"base_url": self.url_for(), "api_key": self.DUMMY_API_KEY, "max_retries": 0} | options)
        )

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        plain = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 120}
        return plain | options


class _Forked:
    """A server in a copy of this process, with what subprocess.Popen says of it."""

    def __init__(self, function: Any, words: list[Any], log: int) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.dup2(log, 1)
                os.dup2(log, 2)
                # pytest's own take the place of both.
                sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
                _without_shim()
                function(*words)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                sys.__stderr__.flush()
                os._exit(1)

    def poll(self) -> int | None:
        """Its status, if it has ended."""
        try:
            return None if os.waitpid(self.pid, os.WNOHANG)[0] == 0 else 1
        except ChildProcessError:
            return 1

    def wait(self) -> None:
        """Wait until it has ended."""
        while self.poll() is None:
            time.sleep(0.05)


def _without_shim() -> None:
    """Let `import vllm` give beheld, as in a process that the tests start, and not what tests see."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "peer_plugin"]
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "xgrammar", "fastapi")]:
        del sys.modules[name]
    from beheld.compat import finder

    finder.install = peer_runners.installing


class RemoteOpenAIServerCustom(RemoteOpenAIServer):
    """A server that a function of the test starts, in a copy of the test's process."""

    def __init__(self, model: str, vllm_serve_args: list[str], function: Any, **options: Any) -> None:
        self._function = function
        super().__init__(model, vllm_serve_args, **options)

    def _start(self, model: str, words: list[str], env_dict: Any) -> None:
        given = [env_dict, model, [*words, "--engine", "thread"]]
        self.proc = _Forked(self._function, given, self._log.fileno())


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _without(words: list[str]) -> list[str]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in _LEFT_OUT:
            for _ in range(_LEFT_OUT[word]):
                next(rest)
        else:
            kept.append(word)
    return kept


def _mark(reason: str) -> Any:
    def marked(*_: Any, **__: Any) -> Any:
        return pytest.mark.skip(reason=reason)

    return marked


multi_gpu_test = multi_gpu_only = _mark("several GPUs")
large_gpu_mark = large_gpu_test = _mark("a large GPU")
requires_fp8 = pytest.mark.skip(reason="FP8")


def create_new_process_for_each_test(*_: Any, **__: Any) -> Any:
    """The test runs in the same process."""
    return lambda test: test
