"""`beheld serve` takes options from flags, a file and the environment alike, and none that would open it unawares."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from beheld.cli import main, serve
from beheld.cli.flags import apply_file, engine_options
from beheld.core.errors import ConfigError
from beheld.server.options import ServerOptions
from beheld.utils import env


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BEHELD_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def read(*words: str, text: str | None = None, tmp_path: Path | None = None) -> tuple[ServerOptions, dict[str, Any]]:
    """The options that a command line and a file lead to, up to where a model would be loaded."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    arguments = parser.parse_args([str(word) for word in words])
    found: dict[str, Any] = {}

    def caught(arguments: argparse.Namespace, actions: list[argparse.Action]) -> None:
        if text is not None:
            assert tmp_path is not None
            path = tmp_path / "options.yaml"
            path.write_text(text)
            apply_file(arguments, path, actions)
        found["model"] = serve.model_of(arguments, actions)
        found["engine"] = engine_options(arguments)
        found["place"] = serve.place_of(arguments, found["model"], found["engine"])
        found["server"] = serve.server_options(arguments, found["model"], found["engine"])

    run, serve.run = serve.run, caught  # type: ignore[assignment]
    try:
        arguments.run(arguments)
    finally:
        serve.run = run
    return found["server"], found


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('trust-request-chat-template: "no"', "trust_request_chat_template"),
        ("trust-request-chat-template: 0", "trust_request_chat_template"),
        ("no-page: maybe", "no_page"),
        ("tool-call-parser: foo", "tool_call_parser"),
        ("reasoning-parser: graphite", "reasoning_parser"),
        ("root-path: x", "root_path"),
        ("ssl-keyfile: x", "ssl_certfile"),
        ("allowed-origins: '[1]'", "allowed_origins"),
        ("max-modle-len: 5", "max_modle_len"),
        ("engine: nonsense", "engine"),
        ("port: eight", "port"),
        ("port: 99999", "port"),
        ("port: true", "port"),
        ("port: 8000.5", "port"),
        ("port: [1, 2]", "port"),
        ("max-body-mib: 0", "max_body_mib"),
        ("max-reading-mib: 1", "max_reading_mib"),
        ("drain-timeout: -5", "drain_timeout"),
        ("drain-timeout: .nan", "drain_timeout"),
        ('host: ""', "host"),
        ("host:", "host"),
        ('api-key: ""', "api_key"),
        ("api-key: []", "api_key"),
        ("api-key: [one, two words ]\nhost: ' '", "host"),
        ("api-key: {a: b}", "api_key"),
        ("enforce-eager: 'off'", "enforce_eager"),
        ("max-model-len: long", "max_model_len"),
        ("limit-mm-per-prompt: '{\"image\": '", "limit_mm_per_prompt"),
        ("max_model_len: 1\nmax-model-len: 2", "max_model_len"),
        ("port: 8001\nport: 8002", "port"),
        ("limit-mm-per-prompt: {image: 1, image: 2}", "image"),
        ("run: x", "run"),
        ("config: x", "config"),
        ("api_keys: x", "api_keys"),
    ],
)
def test_a_file_is_read_as_flags_are(text: str, param: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text=text, tmp_path=tmp_path)
    assert caught.value.param == param


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened: No such file") as caught:
        apply_file(argparse.Namespace(), tmp_path / "options.yaml", [])
    assert caught.value.param == "config"


def test_what_a_file_may_say(tmp_path: Path) -> None:
    text = """
port: '8001'
max-body-mib: '32'
api-key: 12345
served-model-name: [one, two]
trust-request-mm-kwargs: true
trust_request_chat_template: false
no-page: true
drain-timeout: 5
limit-mm-per-prompt: {image: 2}
enable-prefix-caching: false
allowed-media-domains: [a.test, b.test]
hf-token: abc
engine: thread
model: some/where
disable-log-requests: true
reasoning-parser: deepseek_r1
"""
    server, found = read("--port", "8002", text=text, tmp_path=tmp_path)
    assert (server.port, server.max_body_bytes, server.drain_s) == (8002, 32 << 20, 5.0)
    assert server.api_keys == ("12345",)
    assert server.names == ("one", "two")
    assert server.aliases == ("some/where",)
    assert (server.trust_processor_options, server.trust_templates, server.show_page) == (True, False, False)
    assert found["engine"] == {
        "served_model_name": ["one", "two"],
        "limit_mm_per_prompt": {"image": 2},
        "enable_prefix_caching": False,
        "allowed_media_domains": ["a.test", "b.test"],
        "hf_token": "abc",
    }
    assert (found["model"], found["place"], server.reasoning_parser) == ("some/where", "thread", "think")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", ""], "--host is empty"),
        (["--api-key", ""], "API key is empty"),
        (["--api-key", "a", ""], "API key is empty"),
        (["--api-key", " a"], "API key is empty"),
        (["--api-key", "k1", "some/model"], "Write MODEL before"),
        (["--served-model-name", "a", "some/model"], "Write MODEL before"),
        (["--drain-timeout", "-5"], "--drain-timeout must be from 0"),
        (["--drain-timeout", "nan"], "--drain-timeout must be from 0"),
        (["--port", "-1"], "--port must be from 0 to 65535"),
        (["--max-concurrent-requests", "0"], "must be at least 1"),
        (["--max-body-mib", "2048"], "Raise --max-reading-mib"),
        (["--served-model-name", ""], "None"),
        ([""], "name is empty"),
        (["--model", ""], "name is empty"),
        (["a", "--model", "b"], "different models"),
    ],
)
def test_flags_that_are_empty_or_mean_two_things(words: list[str], message: str) -> None:
    if message == "None":
        assert read(*words)[0].names == ("mote",)
        return
    with pytest.raises(ConfigError, match=message) as caught:
        read(*words)
    assert caught.value.remedy
    # A key is never shown.
    assert "k1" not in str(caught.value)


def test_several_values_as_vllm_takes_them() -> None:
    server, found = read("some/model", "--served-model-name", "a", "b", "--allowed-media-domains", "x.test", "y.test")
    assert (found["model"], server.names) == ("some/model", ("a", "b"))
    assert found["engine"]["allowed_media_domains"] == ["x.test", "y.test"]
    assert read("--allowed-media-domains", "x.test,y.test")[1]["engine"]["allowed_media_domains"] == [
        "x.test",
        "y.test",
    ]
    assert read("--served-model-name", "a", "b")[0].names == ("a", "b")
    assert read("--api-key", "a/b")[0].api_keys == ("a/b",)


def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read()[0].api_keys == ()
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert read()[0].api_keys == ("theirs",)
    monkeypatch.setenv("BEHELD_API_KEY", "ours")
    assert read()[0].api_keys == ("ours",)
    assert read("--api-key", "said")[0].api_keys == ("said",)
    monkeypatch.setenv("BEHELD_API_KEY", "")
    with pytest.raises(ConfigError, match="BEHELD_API_KEY is set, but empty"):
        read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BEHELD_IMAGE_FETCH_TIMEOUT", "5s"),
        ("VLLM_VIDEO_FETCH_TIMEOUT", "-1"),
        ("BEHELD_AUDIO_FETCH_TIMEOUT", "nan"),
        ("BEHELD_GRAMMAR_TIMEOUT", "0"),
        ("BEHELD_ALLOW_PRIVATE_FETCH", "perhaps"),
        ("VLLM_CPU_KVCACHE_SPACE", "-4"),
    ],
)
def test_variables_are_checked_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        env.check()
    assert main.main(["serve", "--port", "0"]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("beheld: ")
    assert name in last


# Stops where the model would be loaded, and says how many threads the engine's process and the server's may use.
_ASKED = """
import os, sys, types
from beheld.cli import main, serve
from beheld.engine import process

LOADED = "torch" in sys.modules
process.spawn = lambda: os.environ.get("OMP_NUM_THREADS")
serve.has_accelerator = lambda device: True

def stop(model, *, engine, **options):
    place = engine if isinstance(engine, str) else engine[0]
    print(place, os.environ.get("OMP_NUM_THREADS"), LOADED)
    raise SystemExit(0)

sys.modules["beheld.api.async_llm"] = types.SimpleNamespace(AsyncLLM=stop)
sys.modules["beheld.server.serve"] = types.SimpleNamespace(run=None)
"""
_RUN = 'main.main(["serve", "--port", "0", "--engine", sys.argv[1]])\n'
# Where the engine is a copy of the server.
_COPIED = """
import torch
from beheld.api import start

serve.has_accelerator = lambda device: False
start.fork_or_spawn = process.spawn
start.preload = lambda: None
start._MODEL_LIBRARIES = start.PROCESSOR_LIBRARIES = ()
import atexit
atexit.register(lambda: print(torch.get_num_threads()))
"""


@pytest.mark.parametrize(
    ("engine", "given", "told"),
    [
        ("process", None, "None 1 False"),
        ("process", "2", "2 2 False"),
        ("thread", None, "thread None False"),
    ],
)
def test_beside_its_engine_the_server_computes_on_one_thread(engine: str, given: str | None, told: str) -> None:
    assert _asked(_ASKED + _RUN, engine, given) == told


@pytest.mark.parametrize(("given", "told"), [(None, "None 1 False\n1"), ("2", "2 2 False\n2")])
def test_a_server_whose_copy_is_the_engine_computes_on_one_thread_itself(given: str | None, told: str) -> None:
    assert _asked(_ASKED + _COPIED + _RUN, "process", given) == told


def test_no_collection_walks_what_the_listener_imports() -> None:
    watched = """
import gc

class Watched(types.ModuleType):
    def __getattr__(self, name):
        if name != "listen":
            raise AttributeError(name)
        print("collects" if gc.isenabled() else "waits", end=" ")
        return lambda server: None

sys.modules["beheld.server.listen"] = Watched("beheld.server.listen")
"""
    assert _asked(_ASKED + watched + _RUN, "thread", None) == "waits thread None False"


def test_an_engine_that_cannot_be_a_copy_starts_before_the_server_loads_libraries() -> None:
    apart = """
import threading
serve.has_accelerator = lambda device: False
process.spawn = lambda: "torch" in sys.modules
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
    assert _asked(_ASKED + apart + _RUN, "process", None) == "False 1 False"


@pytest.mark.parametrize(("given", "told"), [(None, "1"), ("2", "None")])
def test_beside_its_copy_the_servers_numpy_has_one_thread(given: str | None, told: str) -> None:
    early = """
serve.has_accelerator = lambda device: False
class Stops:
    def find_spec(self, name, *_):
        if name == "numpy":
            print(os.environ.get("OPENBLAS_NUM_THREADS"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Stops())
"""
    assert _asked(_ASKED + early + _RUN, "process", given) == told


def _asked(code: str, engine: str, given: str | None) -> str:
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    own |= {} if given is None else {"OMP_NUM_THREADS": given}
    done = subprocess.run([sys.executable, "-c", code, engine], env=own, capture_output=True, text=True, check=True)
    return done.stdout.strip()
