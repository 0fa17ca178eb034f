"""A plugin of pytest for vLLM's server tests: `vllm` is beheld, and each test's result goes into a file."""

from __future__ import annotations

import base64
import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import types
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import peer_parsers
import peer_runners
import pytest
from peer_runners import attribute, caplog_vllm, example_prompts, hf_runner, vllm_runner

from beheld.compat import finder
from beheld.compat.names import MODULES

# The tests are of parsers, and no server runs.
_PARSERS = bool(os.environ.get("PEER_PARSERS"))

# Errors of tests that reach into vLLM: attributes of its classes, of mocks of them, and fixtures of its own tests.
_INSIDE = re.compile(
    r"'vllm\.[\w.]*' object has no attribute|__new__\(vllm\.|Mock object has no attribute|fixture '\w+' not found"
    r"|property 'engine_core' of '\w+' object has no setter"
    r"|has no attribute '(?:update_from_tokenizer|configure_logprobs|output_processor)'"
    r"|AttributeError: __get__|SamplingParams\.verify\(\) (?:takes|got an unexpected)|find_spec at \w+>\('gpt_oss'\)"
)
# File -> test -> (result, line).
_RESULTS: dict[str, dict[str, tuple[str, str]]] = {}


class _Nowhere(type):
    """The type of names that beheld has not; their attributes are such names too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__name__}.{name}")

    def __instancecheck__(cls, other: Any) -> bool:
        return bool(cls())

    def __iter__(cls) -> Any:
        return cls()

    def __add__(cls, other: Any) -> Any:
        return cls()

    def __call__(cls, *_: Any, **__: Any) -> Any:
        pytest.skip(f"inside vLLM: {cls.__name__}", allow_module_level=True)


def _absent(name: str) -> Any:
    return _Nowhere(name, (Exception,), {})


class _Stub(types.ModuleType):
    """A module of vLLM that beheld has not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_tokenizer":
            return lambda tokenizer_name="", **_: _tokenizer(tokenizer_name)
        if f"{self.__name__}.{name}" in (*MODULES, "vllm.envs"):
            return import_module(f"{self.__name__}.{name}")
        found = (peer_parsers.attribute if _PARSERS else attribute)(self.__name__, name)
        return found if found is not None else _absent(f"{self.__name__}.{name}")


def _tokenizer(name: str) -> Any:
    if _PARSERS:
        return peer_parsers.tokenizer()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of vLLM that beheld has not."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for each module under `vllm`, and for the libraries of grammars and of routes that it uses."""
        ours = name.split(".")[0] in ("vllm", "xgrammar", "fastapi")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty one; of a module that beheld has, its names."""
        made = _Stub(spec.name)
        for name, place in MODULES.get(spec.name, {}).items():
            module, _, attribute = place.partition(":")
            if module == "beheld.compat.parsers":
                # The tests of parsers see the readers themselves, and no base of plug-ins; others ask for vLLM's own.
                continue
            setattr(made, name, getattr(import_module(module), attribute))
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is run."""


sys.meta_path.insert(0, _Stubs())
# What tests see is `vllm` already.
peer_runners.installing, finder.install = finder.install, lambda: None
if find_spec("pybase64") is None:
    # The same functions, only faster.
    sys.modules["pybase64"] = base64
assert caplog_vllm
assert example_prompts
assert hf_runner
assert vllm_runner
if _PARSERS:
    import transformers

    transformers.AutoTokenizer.from_pretrained = staticmethod(lambda *_, **__: peer_parsers.tokenizer())


class _Pictures:
    """In place of vLLM's server of test images: a small picture for any name."""

    def url_for(self, name: str) -> str:
        """Its address."""
        import base64
        import io

        written = io.BytesIO()
        self.get_image_asset(name).save(written, "PNG")
        return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()

    def get_image_asset(self, name: str) -> Any:
        """The picture."""
        from PIL import Image

        return Image.new("RGB", (64 + 8 * (len(name) % 7), 64), (len(name) * 5 % 256, 90, 160))


@pytest.fixture(scope="session")
def local_asset_server() -> _Pictures:
    """vLLM's fixture of that name."""
    return _Pictures()


@pytest.fixture
def image_url(request: Any, local_asset_server: _Pictures) -> str:
    """vLLM's fixture of that name."""
    return local_asset_server.url_for(request.param)


@pytest.fixture
def image_urls(request: Any, local_asset_server: _Pictures) -> list[str]:
    """vLLM's fixture of that name."""
    return [local_asset_server.url_for(name) for name in request.param]


@pytest.fixture(scope="session")
def num_gpus_available() -> int:
    """vLLM's fixture of that name: one device."""
    return 1


@pytest.fixture(scope="session")
def image_assets() -> Any:
    """vLLM's fixture of that name."""
    from tests.conftest import ImageTestAssets

    return ImageTestAssets()


@pytest.fixture(scope="session")
def video_assets() -> Any:
    """vLLM's fixture of that name."""
    from tests.conftest import VideoTestAssets

    return VideoTestAssets()


@pytest.fixture(scope="session")
def audio_assets() -> Any:
    """vLLM's fixture of that name."""
    from tests.conftest import AudioTestAssets

    return AudioTestAssets()


def pytest_runtest_logreport(report: Any) -> None:
    """Keep what came of each phase of a test; the worst counts."""
    file, _, name = report.nodeid.partition("::")
    results = _RESULTS.setdefault(file, {})
    line = str(getattr(report, "longreprtext", "")).strip()
    short = next((each for each in reversed(line.splitlines()) if each.startswith("E  ")), line[-300:])[:300]
    if report.skipped:
        line = str(report.longrepr[-1]) if isinstance(report.longrepr, tuple) else line
        results[name] = ("absent" if "absent:" in line else "inside"), line[-300:]
    elif "[XPASS(strict)]" in line:
        # vLLM's own parser does not pass it yet.
        results[name] = "passed", ""
    elif report.failed:
        absent = "ABSENT:" in line or "neither in the local cache" in line
        results[name] = ("absent" if absent else "inside" if _INSIDE.search(line) else "failed"), short
    elif report.when == "call":
        results[name] = "passed", ""
    # A file that is stopped keeps what ended.
    if not _PARSERS:
        _write()


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported counts once."""
    if report.failed or (report.skipped and report.nodeid.endswith(".py")):
        line = str(report.longreprtext).strip().splitlines()[-1][:300]
        _RESULTS.setdefault(report.nodeid, {})["(the file)"] = ("inside" if report.skipped else "failed"), line


def pytest_sessionfinish() -> None:
    """Write the file."""
    _write()


def _write() -> None:
    with open(os.environ["PEER_RECORD"], "w", encoding="utf-8") as file:
        json.dump(_RESULTS, file)
