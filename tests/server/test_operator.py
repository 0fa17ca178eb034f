"""The operator's routes: what they do, and that they are off, guarded and told."""

from __future__ import annotations

import argparse
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from beheld.cli import serve as command
from beheld.core.errors import ConfigError
from beheld.server import limits
from beheld.server.operator import switch_of
from beheld.server.options import ServerOptions
from tests import ranks
from tests.lora import adapters
from tests.lora.adapters import Adapter
from tests.server.running import ENGINE, Running
from tests.server.test_docs import SERVER
from tests.server.test_rank_kills import RANKS

FAMILY = "llama"
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 4}
BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
KEY = "a-key-of-the-operator"
AUTH = {"Authorization": f"Bearer {KEY}"}
ON: dict[str, Any] = {"operator_routes": True, "changes_loras": True, "tells_tokenizer": True}


@pytest.fixture(scope="module")
def run() -> Iterator[Running]:
    made = Running(FAMILY, ENGINE | LORA, api_keys=(KEY,), **ON)
    yield made
    made.close()


def post(run: Running, path: str, body: Any = None) -> httpx.Response:
    return run.post(path, body, headers=AUTH)


def test_each_has_the_flag_that_switches_it_on(run: Running) -> None:
    """Where it is off, the refusal names the flag; and each flag named is one of `beheld serve`."""
    found = {path: switch_of(path.partition("/{")[0]) for path in paths(run)}
    assert None not in found.values(), found
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    flags = {word for action in parser._actions for word in action.option_strings}
    assert {*found.values(), "--dashboard"} <= flags


def paths(run: Running) -> dict[str, set[str]]:
    """The operator's routes and their methods."""
    plain = Running(FAMILY)
    try:
        usual = {route.path for route in plain.app.routes}  # type: ignore[attr-defined]
    finally:
        plain.close()
    routes = [route for route in run.app.routes if route.path not in usual]  # type: ignore[attr-defined]
    return {route.path: route.methods - {"HEAD"} for route in routes}  # type: ignore[attr-defined]


def test_they_are_off_guarded_and_told(run: Running) -> None:
    found = paths(run)
    assert len(found) == 19
    for path, methods in found.items():
        for method in methods:
            answer = httpx.request(method, run.url + path, json={}, trust_env=False)
            assert answer.status_code == 401, path
    section = SERVER.split("## Routes of the operator")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    told = {path for row in rows for path in re.findall(r"`(?:[A-Z]+ )?(/[^`?]*)", row)}
    assert told == {path.replace(":path", "") for path in found}


@pytest.mark.parametrize("level", ["0", "1", "2"])
def test_it_sleeps_and_wakes_up(run: Running, level: str) -> None:
    text = post(run, "/v1/completions", BODY).json()["choices"][0]["text"]
    assert run.get("/is_sleeping", headers=AUTH).json() == {"is_sleeping": False}
    assert post(run, f"/sleep?level={level}").status_code == 200
    assert run.get("/is_sleeping", headers=AUTH).json() == {"is_sleeping": True}
    assert run.get("/health").status_code == 200
    if level != "0":
        refused = post(run, "/v1/completions", BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_asleep")
        assert refused.headers["retry-after"]
        assert post(run, "/wake_up?tags=weights").status_code == 200
        assert run.get("/is_sleeping", headers=AUTH).json() == {"is_sleeping": True}
    assert post(run, "/wake_up").status_code == 200
    assert post(run, "/v1/completions", BODY).json()["choices"][0]["text"] == text


def test_a_paused_server_holds_requests(run: Running) -> None:
    text = post(run, "/v1/completions", BODY).json()["choices"][0]["text"]
    assert post(run, "/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert run.get("/is_paused", headers=AUTH).json() == {"is_paused": True}
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(post(run, "/v1/completions", BODY)))
    thread.start()
    time.sleep(0.2)
    assert not answers
    assert run.get("/load", headers=AUTH).json() == {"server_load": 1}
    assert post(run, "/resume").json() == {"status": "resumed"}
    thread.join(10)
    assert answers[0].json()["choices"][0]["text"] == text
    assert run.get("/is_paused", headers=AUTH).json() == {"is_paused": False}


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_paused_server_refuses_requests_unless_it_keeps_them(run: Running, mode: str) -> None:
    text = post(run, "/v1/completions", BODY).json()["choices"][0]["text"]
    assert post(run, f"/pause?mode={mode}").json() == {"status": "paused"}
    for more in ({}, {"stream": True}, {"n": 2, "temperature": 1}):
        refused = post(run, "/v1/completions", BODY | more)
        error = refused.json()["error"]
        # The form that vLLM's trainers look for.
        assert (refused.status_code, error["code"], error["type"]) == (503, 503, "ServiceUnavailableError")
        assert "paused" in error["message"]
        assert "again" in error["message"]
        assert refused.headers["retry-after"]
    asked = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    own = post(run, "/v1/messages", asked)
    # Anthropic's clients send such a request again.
    assert (own.status_code, own.json()["error"]["type"]) == (503, "overloaded_error")
    assert post(run, "/resume").json() == {"status": "resumed"}
    assert post(run, "/v1/completions", BODY).json()["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "query.level"),
        ("/sleep?mode=gently", "query.mode"),
        ("/wake_up?tags=all", "query.tags"),
        ("/pause?mode=x", "query.mode"),
        ("/pause?clear_cache=x", "query.clear_cache"),
        ("/pause?wait_for_inflight_requests=x", "query.wait_for_inflight_requests"),
    ],
)
def test_what_is_wrong_is_told(run: Running, path: str, param: str) -> None:
    answer = post(run, path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert run.get("/is_sleeping", headers=AUTH).json() == {"is_sleeping": False}


def test_caches_and_what_the_server_is(run: Running) -> None:
    for path in ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"):
        assert post(run, path).status_code == 200
    shown = run.get("/server_info", headers=AUTH)
    assert shown.json()["vllm_config"]["max_num_seqs"] == 8
    assert KEY not in shown.text
    told = run.get("/tokenizer_info", headers=AUTH).json()
    assert told["tokenizer_class"]
    assert "chat_template" in told


def test_a_profile_is_written(run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    assert post(run, "/stop_profile").status_code == 400
    assert post(run, "/start_profile").status_code == 200
    assert post(run, "/start_profile").status_code == 400
    assert post(run, "/v1/completions", BODY).status_code == 200
    assert post(run, "/stop_profile").status_code == 200
    (trace,) = (tmp_path / "traces").iterdir()
    assert "aten::" in trace.read_text(encoding="utf-8")


def test_a_folder_that_takes_no_profile_is_told(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEHELD_PROFILES", "/proc")
    assert post(run, "/start_profile").status_code == 200
    answer = post(run, "/stop_profile")
    assert (answer.status_code, "BEHELD_PROFILES" in answer.json()["error"]["message"]) == (400, True)


def test_adapters_come_and_go(run: Running, tmp_path: Path) -> None:
    folders = [adapters.write(Adapter(FAMILY, n, 2, "q_proj|v_proj"), tmp_path / str(n)) for n in range(2)]
    client = openai.OpenAI(base_url=f"{run.url}/v1", api_key=KEY)

    def text(model: str) -> str:
        return client.completions.create(model=model, prompt="Hello", max_tokens=8, temperature=0).choices[0].text

    plain = text("tiny")
    made = post(run, "/v1/load_lora_adapter", {"lora_name": "red", "lora_path": folders[0]})
    assert (made.status_code, made.text) == (200, "Success: LoRA adapter 'red' added successfully.")
    assert [card.id for card in client.models.list()] == ["tiny", "red"]
    # A client that may name a path may read the one that it, or another, named.
    assert client.models.retrieve("red").model_dump()["root"] == folders[0]
    red = text("red")
    assert red != plain
    again = post(run, "/v1/load_lora_adapter", {"lora_name": "red", "lora_path": folders[1]})
    assert again.status_code == 400
    assert "already been loaded" in again.json()["error"]["message"]
    assert text("red") == red
    body = {"lora_name": "red", "lora_path": folders[1], "load_inplace": True}
    assert post(run, "/v1/load_lora_adapter", body).status_code == 200
    assert text("red") not in (red, plain)
    assert post(run, "/v1/load_lora_adapter", body | {"lora_path": folders[0]}).status_code == 200
    assert text("red") == red
    assert post(run, "/v1/unload_lora_adapter", {"lora_name": "red", "lora_int_id": 1}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        text("red")
    gone = post(run, "/v1/unload_lora_adapter", {"lora_name": "red"})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_name")
    for wrong, status in (
        ({"lora_name": "x", "lora_path": str(tmp_path / "none")}, 404),
        ({"lora_name": "x", "lora_path": "https://a.test/x"}, 400),
        ({"lora_name": "x", "lora_path": str(tmp_path)}, 500),
        ({"lora_name": "tiny", "lora_path": folders[0]}, 400),
    ):
        assert post(run, "/v1/load_lora_adapter", wrong).status_code == status
    assert post(run, "/v1/load_lora_adapter", {"lora_name": "x"}).status_code == 400
    assert [card.id for card in client.models.list()] == ["tiny"]


def test_a_broken_adapter_is_the_server_s_and_told_whole(run: Running, tmp_path: Path) -> None:
    """Trainers for vLLM look for these words, and for an error of the server: the request is right."""
    folder = Path(adapters.write(Adapter(FAMILY, 1, 2, "q_proj|v_proj"), tmp_path / "one"))
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    for changes, words in (
        ({"r": 1024}, ("is greater than max_lora_rank", "Start the engine with max_lora_rank=1024.")),
        ({"use_dora": True}, ("does not yet support DoRA", "Train it without that.")),
        ({"init_lora_weights": "pissa"}, ("init_lora_weights='pissa'", "Convert it")),
        ({"modules_to_save": ["lm_head"]}, ("Unsupported modules_to_save", "Train it without that.")),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        answer = post(run, "/v1/load_lora_adapter", {"lora_name": "broken", "lora_path": str(folder)})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (500, "InternalServerError", "lora_error")
        assert all(each in error["message"] for each in words), error["message"]
    assert post(run, "/v1/completions", BODY).status_code == 200
    assert post(run, "/weight_checker").status_code == 400


def test_adapters_come_and_go_as_sagemaker_asks(run: Running, tmp_path: Path) -> None:
    folder = adapters.write(Adapter(FAMILY, 1, 2, "q_proj|v_proj"), tmp_path / "one")
    made = post(run, "/adapters", {"name": "red", "src": folder, "preload": True})
    assert (made.status_code, made.text) == (200, "Success: LoRA adapter 'red' added successfully.")
    assert post(run, "/v1/completions", BODY | {"model": "red"}).status_code == 200
    missing = post(run, "/adapters", {"name": "blue", "src": str(tmp_path / "none")})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")
    statuses = [httpx.delete(f"{run.url}/adapters/red", headers=AUTH, trust_env=False).status_code for _ in range(2)]
    assert statuses == [200, 404]
    assert post(run, "/v1/completions", BODY | {"model": "red"}).status_code == 404
    # Names of repositories have a slash.
    assert post(run, "/adapters", {"name": "org/red", "src": folder}).status_code == 200
    assert httpx.delete(f"{run.url}/adapters/org/red", headers=AUTH, trust_env=False).status_code == 200


def test_adapters_that_change_at_the_same_time_or_while_the_engine_sleeps(run: Running, tmp_path: Path) -> None:
    folder = adapters.write(Adapter(FAMILY, 1, 2, "q_proj|v_proj"), tmp_path / "one")
    body = {"lora_name": "red", "lora_path": folder}
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: post(run, "/v1/load_lora_adapter", body).status_code, range(4)))
    assert sorted(made) == [200, 400, 400, 400]
    assert post(run, "/sleep").status_code == 200
    asleep = post(run, "/v1/unload_lora_adapter", {"lora_name": "red"})
    assert (asleep.status_code, "sleeps" in asleep.json()["error"]["message"]) == (503, True)
    assert post(run, "/wake_up").status_code == 200
    # Requests can name it still, and so it can be removed.
    assert post(run, "/v1/completions", BODY | {"model": "red"}).status_code == 200
    assert post(run, "/v1/unload_lora_adapter", {"lora_name": "red"}).status_code == 200
    assert run.llm._engine._core.executor.loras() == ()  # type: ignore[attr-defined]


def test_there_are_not_more_names_than_a_server_keeps(
    run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapters.write(Adapter(FAMILY, 1, 2, "q_proj|v_proj"), tmp_path / "one")
    monkeypatch.setattr(limits, "MAX_ADAPTERS", 1)
    for name, status in (("red", 200), ("blue", 400)):
        body = {"lora_name": name, "lora_path": folder}
        assert post(run, "/v1/load_lora_adapter", body).status_code == status
    assert post(run, "/v1/load_lora_adapter", body | {"lora_name": "red", "load_inplace": True}).status_code == 200
    assert post(run, "/v1/unload_lora_adapter", {"lora_name": "red"}).status_code == 200


def options_of(*words: str) -> ServerOptions:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = parser.parse_args(list(words))
    engine = {"enable_lora": True} if "--enable-lora" in words else {}
    return command.server_options(given, None, engine)


def test_the_command_line_and_vllm_s_variables_turn_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("operator_routes", "changes_loras", "tells_tokenizer")
    assert [getattr(ServerOptions(), name) for name in names] == [False] * 3
    assert [getattr(options_of(), name) for name in names] == [False] * 3
    flags = ("--operator-routes", "--allow-runtime-lora-updating", "--enable-tokenizer-info-endpoint", "--enable-lora")
    assert [getattr(options_of(*flags), name) for name in names] == [True] * 3
    with pytest.raises(ConfigError, match="enable-lora"):
        options_of("--allow-runtime-lora-updating")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    assert [getattr(options_of("--enable-lora"), name) for name in names] == [True, True, False]


def test_ranks_do_not_sleep_and_go_on() -> None:
    with ranks.forked():
        shared = Running(FAMILY, RANKS | {"tensor_parallel_size": 2}, operator_routes=True)
        try:
            refused = shared.post("/sleep", None)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "tensor_parallel_size"
            assert "several ranks" in error["message"]
            assert shared.get("/is_sleeping").json() == {"is_sleeping": False}
            assert shared.post("/v1/completions", BODY).status_code == 200
            assert shared.post("/sleep?level=0", None).status_code == 200
            assert shared.post("/wake_up", None).status_code == 200
        finally:
            shared.close()
