"""On the server an adapter is a model's name; a request cannot name anything else."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from beheld import LoRARequest, SamplingParams
from beheld.api.async_llm import AsyncLLM
from beheld.cli import serve as command
from beheld.core.errors import ConfigError, LoRAError
from beheld.lora import ahead
from tests import tiny
from tests.lora import adapters
from tests.lora.adapters import Adapter
from tests.server.running import ENGINE, Running

FAMILY = "llama"
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 4}
BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclass
class Served:
    """A server with two adapters, and their folders."""

    running: Running
    folders: list[str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("lora")
    folders = [adapters.write(Adapter(FAMILY, n, 2, "q_proj|v_proj"), root / str(n)) for n in range(2)]
    loras = tuple(LoRARequest(name, n + 1, folders[n]) for n, name in enumerate(("blue", "red")))
    running = Running(FAMILY, ENGINE | LORA, loras=loras)
    yield Served(running, folders)
    running.close()


def test_adapters_are_models(served: Served) -> None:
    run = served.running
    cards = run.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("blue", "tiny"), ("red", "tiny")]
    assert run.get("/v1/models/red").json()["id"] == "red"
    texts = {}
    for name in ("tiny", "blue", "red"):
        answer = run.post("/v1/completions", BODY | {"model": name}).json()
        assert answer["model"] == name
        texts[name] = answer["choices"][0]["text"]
    assert len(set(texts.values())) == 3
    assert run.post("/v1/completions", BODY).json()["choices"][0]["text"] == texts["tiny"]
    with openai.OpenAI(base_url=run.url + "/v1", api_key="EMPTY", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hello"}]
        said = {}
        for name in texts:
            whole = client.chat.completions.create(model=name, messages=messages, max_tokens=8, temperature=0)
            parts = client.chat.completions.create(
                model=name, messages=messages, max_tokens=8, temperature=0, stream=True
            )
            said[name] = whole.choices[0].message.content
            assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == said[name]
        assert len(set(said.values())) == 3


@pytest.mark.parametrize("name", ["green", "../1", "../../etc", "https://example.org/a", "", "blue/", "Blue", "bl\0ue"])
def test_55_a_name_that_is_no_model_is_not_found(served: Served, name: str) -> None:
    for route in ("/v1/completions", "/v1/chat/completions"):
        body = {"model": name, "max_tokens": 1}
        body |= {"prompt": "x"} if "chat" not in route else {"messages": [{"role": "user", "content": "x"}]}
        answer = served.running.post(route, body)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] == "model"
    for folder in served.folders:
        assert served.running.post("/v1/completions", BODY | {"model": folder}).status_code == 404
    assert served.running.post("/v1/completions", BODY | {"model": "blue"}).status_code == 200


def test_a_broken_adapter_is_told_of_at_the_start(served: Served, tmp_path: Path) -> None:
    async def add(llm: AsyncLLM) -> None:
        with pytest.raises(LoRAError, match="adapter_config"):
            await llm.add_lora(LoRARequest("broken", 9, str(tmp_path)))

    llm = AsyncLLM(str(tiny.checkpoint(FAMILY)), **ENGINE | LORA)
    try:
        asyncio.run(add(llm))
    finally:
        llm.close()


def test_others_go_on_while_an_adapter_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, read = threading.Event(), threading.Event(), ahead.load

    def slow(name: str, folder: str, form: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return read(name, folder, form)

    async def ask(llm: AsyncLLM, tokens: int, lora: LoRARequest | None) -> str:
        text = ""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        async for output in llm.generate("Hello", params, lora_request=lora):
            text = output.outputs[0].text
        return text

    async def talk(llm: AsyncLLM) -> None:
        red = LoRARequest("red", 2, served.folders[1])
        adding = asyncio.create_task(llm.add_lora(red))
        adapted = asyncio.create_task(ask(llm, 8, red))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        # All of it while the disk gives nothing.
        await asyncio.wait_for(ask(llm, 40, None), 60)
        assert not adding.done()
        assert not adapted.done()
        go_on.set()
        await adding
        assert await adapted == expected

    # Before there is another engine in this process: a forward pass is one at a time.
    expected = served.running.post("/v1/completions", BODY | {"model": "red"}).json()["choices"][0]["text"]
    monkeypatch.setattr(ahead, "load", slow)
    llm = AsyncLLM(str(tiny.checkpoint(FAMILY)), **ENGINE | LORA)
    try:
        asyncio.run(talk(llm))
    finally:
        go_on.set()
        llm.close()


def test_an_engine_in_another_process_reads_adapters_too(served: Served, tmp_path: Path) -> None:
    async def talk(llm: AsyncLLM) -> None:
        with pytest.raises(LoRAError, match="does not exist"):
            await llm.add_lora(LoRARequest("broken", 9, str(tmp_path / "nowhere")))
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        lora = LoRARequest("red", 2, served.folders[1])
        await llm.add_lora(lora)
        async for output in llm.generate("Hello", params, lora_request=lora):
            text = output.outputs[0].text
        expected = served.running.post("/v1/completions", BODY | {"model": "red"}).json()["choices"][0]["text"]
        assert text == expected
        with pytest.raises(LoRAError, match="lora_int_id 2"):
            async for _ in llm.generate("Hello", params, lora_request=LoRARequest("blue", 2, served.folders[0])):
                pass

    llm = AsyncLLM(str(tiny.checkpoint(FAMILY)), engine="process", **ENGINE | LORA)
    try:
        asyncio.run(talk(llm))
    finally:
        llm.close()


def options(*words: str) -> tuple[Any, dict[str, Any]]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(words)
    engine = command.engine_options(arguments)
    return command.server_options(arguments, "m", engine), engine


def test_modules_of_the_command_line() -> None:
    made, engine = options("--enable-lora", "--lora-modules", "a=/x/y=z", '{"name": "b", "path": "/b"}')
    assert made.loras == (LoRARequest("a", 1, "/x/y=z"), LoRARequest("b", 2, "/b"))
    assert engine["max_cpu_loras"] == 2
    _, engine = options("--enable-lora", "--max-cpu-loras", "1", "--lora-modules", "a=/a", "b=/b")
    assert engine["max_cpu_loras"] == 1
    assert "max_cpu_loras" not in options()[1]


@pytest.mark.parametrize(
    "words",
    [
        ("--lora-modules", "a=/a"),
        ("--enable-lora", "--lora-modules", "a"),
        ("--enable-lora", "--lora-modules", "=/a"),
        ("--enable-lora", "--lora-modules", "a=/a", "a=/b"),
        ("--enable-lora", "--lora-modules", "m=/a"),
        ("--enable-lora", "--lora-modules", '{"name": "a"}'),
        ("--enable-lora", "--lora-modules", '{"name": "a", "path": "/a", "rank": 4}'),
        ("--enable-lora", "--lora-modules", "{"),
    ],
)
def test_modules_that_say_nothing_clear_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        options(*words)
    assert caught.value.param == "lora_modules"
