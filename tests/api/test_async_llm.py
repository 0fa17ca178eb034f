"""AsyncLLM gives what LLM gives, to many at once, and lets go of what nobody reads."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

import pytest

from beheld import LLM, SamplingParams
from beheld.api.async_llm import AsyncLLM
from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError, EngineDeadError, ModelError, PromptError, PromptTooLongError, StepError
from beheld.core.outputs import RequestOutput
from beheld.core.structured_outputs import StructuredOutputs
from beheld.engine.codec import CODEC
from beheld.engine.columns import EventColumns
from beheld.engine.messages import Ping, Pong, Submit
from beheld.engine.process import spawn
from beheld.wire.link import Link
from tests import tiny
from tests.inputs.servers import Server, plain

OPTIONS: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_num_seqs": 8, "num_gpu_blocks_override": 400}
PAIR = SamplingParams(n=2, temperature=1.0, max_tokens=24, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["thread", "process"])
def llm(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    """One engine for all tests of this file, each with an event loop of its own."""
    found = AsyncLLM(str(tiny.checkpoint("qwen2_vl")), engine=request.param, **OPTIONS)
    yield found
    found.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def last(generator: Any) -> RequestOutput:
    found = None
    async for output in generator:
        found = output
    assert found is not None
    return found


async def idle(llm: AsyncLLM) -> None:
    """Wait until nothing runs, then every block must be free again."""
    for _ in range(200):
        stats = (await llm.ping()).scheduler
        if stats.num_running == stats.num_waiting == 0:
            break
        await asyncio.sleep(0.01)
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
    assert llm.num_live == 0


def conversation(name: str, size: tuple[int, int] = (56, 84)) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": tiny.picture(*size, seed=1)}, {"type": "text", "text": f"What is {name}?"}]
    return [{"role": "user", "content": parts}]


def test_nothing_of_the_messages_is_kept_once_they_were_read(llm: AsyncLLM) -> None:
    class Text(str):
        """A text that tells when it is gone."""

    async def ask() -> None:
        told: list[bool] = []
        text = Text("What is it? " * 9)
        gone = weakref.ref(text)
        talk: Any = [{"role": "user", "content": text}]
        answers = llm.chat(talk, SamplingParams(max_tokens=200, ignore_eos=True), prepared=lambda: told.append(True))
        del text, talk
        assert gone() is not None
        output = await anext(answers)
        assert told == [True]
        assert not output.finished
        assert gone() is None
        await answers.aclose()
        await idle(llm)

    run(ask())


def test_answers_equal_those_of_llm_whoever_shares_the_batch(llm: AsyncLLM) -> None:
    talks = [conversation(f"picture {k}") for k in range(5)]
    with LLM(str(tiny.checkpoint("qwen2_vl")), **OPTIONS) as offline:
        expected = [o.outputs[0].token_ids for o in offline.chat(talks, GREEDY, use_tqdm=False)]

    async def ask() -> list[RequestOutput]:
        found = await asyncio.gather(*(last(llm.chat(talk, GREEDY)) for talk in talks))
        await idle(llm)
        return list(found)

    found = run(ask())
    assert [o.outputs[0].token_ids for o in found] == expected
    assert all(len(o.media) == 1 and o.finished for o in found)
    assert all(o.milliseconds["total"] >= o.milliseconds["first_token"] > 0 for o in found)


def test_deltas_add_up_and_cumulative_outputs_grow(llm: AsyncLLM) -> None:
    async def ask() -> None:
        params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=16, ignore_eos=True)
        whole = await last(llm.generate("one two three", params, pieces="final"))
        text, ids = ["", ""], [[], []]
        async for output in llm.generate("one two three", params, pieces="delta"):
            for answer in output.outputs:
                text[answer.index] += answer.text
                ids[answer.index] += answer.token_ids
        assert text == [o.text for o in whole.outputs]
        assert ids == [o.token_ids for o in whole.outputs]
        assert ids[0] != ids[1]
        before = -1
        async for output in llm.generate("one two three", params):
            assert output.usage.completion_tokens > before
            before = output.usage.completion_tokens
        assert before == 32

    run(ask())


def test_a_stop_string_ends_it_for_the_engine_too(llm: AsyncLLM) -> None:
    async def ask() -> None:
        free = await last(llm.generate("count", GREEDY))
        text = free.outputs[0].text
        stop = text[len(text) // 2 :][:3]
        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=stop)
        found = await last(llm.generate("count", params))
        assert found.outputs[0].finish_reason == "stop"
        assert found.outputs[0].stop_reason == stop
        assert found.outputs[0].text == text[: text.index(stop)]
        await idle(llm)

    run(ask())


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_closing_the_generator_gives_everything_back(llm: AsyncLLM, tokens: int) -> None:
    async def ask() -> None:
        long = SamplingParams(n=3, temperature=1.0, max_tokens=400, ignore_eos=True)
        beside = asyncio.create_task(last(llm.generate("beside", GREEDY)))
        async with contextlib.aclosing(llm.chat(conversation("this"), long, pieces="delta")) as stream:
            for _ in range(tokens):
                await anext(stream)
        assert (await beside).outputs[0].finish_reason == "length"
        await idle(llm)

    run(ask())


def test_cancelling_while_media_are_prepared_leaves_nothing(llm: AsyncLLM) -> None:
    async def ask() -> None:
        for delay in (0.0, 0.001, 0.005, 0.02):
            task = asyncio.create_task(last(llm.chat(conversation(f"c{delay}", (280, 280)), GREEDY)))
            await asyncio.sleep(delay)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await idle(llm)

    run(ask())


def png() -> bytes:
    held = io.BytesIO()
    tiny.picture(56, 84, seed=1).save(held, "PNG")
    return held.getvalue()


def test_media_that_need_no_fetch_are_prepared_by_one_call_of_a_thread(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    run_in = llm._preparation._pools.run

    async def noted(pool: Any, client: str, function: Any, *args: Any) -> Any:
        called.append(function.__name__)
        return await run_in(pool, client, function, *args)

    monkeypatch.setattr(llm._preparation._pools, "run", noted)
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    linked = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    for messages in (conversation("this"), linked):
        called.clear()
        run(last(llm.chat(messages, GREEDY)))
        assert called == ["read_and_completed"]
    prompt = {"prompt": tiny.prompt("qwen2_vl", 1), "multi_modal_data": {"image": tiny.picture(56, 84, seed=1)}}
    called.clear()
    run(last(llm.generate(prompt, GREEDY)))
    assert called == ["read_and_completed"]


@pytest.mark.parametrize("guess", ["right", "wrong"])
def test_remote_media_are_fetched_in_the_loop_whatever_was_guessed(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, guess: str
) -> None:
    """No thread waits for them, and meanwhile others have the interpreter for as long as usual."""
    monkeypatch.setenv("BEHELD_ALLOW_PRIVATE_FETCH", "1")
    usual, seen = sys.getswitchinterval(), list[float]()
    if guess == "wrong":
        monkeypatch.setattr("beheld.api.preparation.names_remote", lambda prompt: False)

    def answer(connection: socket.socket, head: bytes) -> None:
        time.sleep(0.2)
        seen.append(sys.getswitchinterval())
        plain(png())(connection, head)

    server = Server(answer)
    try:
        parts = [{"type": "image_url", "image_url": {"url": server.url()}}, {"type": "text", "text": "What is this?"}]
        found = run(last(llm.chat([{"role": "user", "content": parts}], GREEDY)))
    finally:
        server.close()
    assert found.outputs[0].token_ids == run(last(llm.chat(conversation("this"), GREEDY))).outputs[0].token_ids
    assert seen == [usual]


def test_abort_ends_with_a_reason(llm: AsyncLLM) -> None:
    async def ask() -> None:
        long = SamplingParams(n=2, temperature=1.0, max_tokens=400, ignore_eos=True)
        stream = llm.generate("go on", long, "mine")
        output = await anext(stream)
        await llm.abort("mine")
        async for output in stream:  # noqa: B007
            pass
        assert {o.finish_reason for o in output.outputs} == {"abort"}
        await idle(llm)

    run(ask())


def test_errors_reach_only_their_request(llm: AsyncLLM) -> None:
    async def ask() -> None:
        good = asyncio.create_task(last(llm.generate("fine", GREEDY)))
        with pytest.raises(PromptError):
            await last(llm.generate("", GREEDY))
        with pytest.raises(PromptTooLongError):
            await last(llm.generate([5] * 100_000, GREEDY))
        assert (await good).outputs[0].finish_reason == "length"
        await idle(llm)

    run(ask())


def test_a_dead_engine_says_so_to_all() -> None:
    async def ask() -> None:
        async with AsyncLLM(str(tiny.checkpoint("llama")), **OPTIONS) as llm:
            long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
            stream = llm.generate("go on", long, pieces="delta")
            await anext(stream)

            def broken(*_: object) -> None:
                raise AssertionError("for the test")

            llm._engine._core.scheduler.schedule = broken  # type: ignore[attr-defined]
            with pytest.raises(EngineDeadError, match="died"):
                async for _ in stream:
                    pass
            assert not llm.alive
            with pytest.raises(EngineDeadError):
                await llm.ping()
            with pytest.raises(EngineDeadError):
                await last(llm.generate("more", GREEDY))

    run(ask())


def test_grammars_and_the_cache_work_wherever_the_engine_runs(llm: AsyncLLM) -> None:
    async def ask() -> None:
        params = SamplingParams(
            temperature=1.0, n=2, max_tokens=30, structured_outputs=StructuredOutputs(choice=["left", "right"])
        )
        for prompt in ("go", "stay"):
            output = await last(llm.generate(prompt, params))
            assert {answer.text for answer in output.outputs} <= {"left", "right"}
        long = list(range(20, 100))
        assert (await last(llm.generate(long, GREEDY))).num_cached_tokens == 0
        assert (await last(llm.generate(long, GREEDY))).num_cached_tokens > 0
        llm.reset_prefix_cache()
        assert (await last(llm.generate(long, GREEDY))).num_cached_tokens == 0
        await idle(llm)

    run(ask())


def test_wrong_options_are_told_from_the_other_process() -> None:
    with pytest.raises(ModelError):
        AsyncLLM("/nonexistent/model", engine="process")
    with pytest.raises(ConfigError):
        AsyncLLM(str(tiny.checkpoint("llama")), engine="process", hf_overrides=lambda config: config)


def unreadable(engine: Any, where: str, concerned: Callable[[Any], bool]) -> contextlib.AbstractContextManager[None]:
    """Let the bodies of messages for which `concerned` is true arrive broken on one of the link's ends."""
    link = engine._link
    if where == "to the engine":
        whole = link._codec.encode

        def encode(message: Any) -> Any:
            pieces = whole(message)
            return (
                [pieces[0], bytes(pieces[1]).replace(b"value", b"velua"), *pieces[2:]] if concerned(message) else pieces
            )

        return mock.patch.object(link, "_codec", mock.Mock(encode=encode, decode=link._codec.decode))

    def decode(body: Any) -> Any:
        message = CODEC.decode(body)
        if concerned(message):
            raise MemoryError
        return message

    return mock.patch.object(link, "_codec", mock.Mock(encode=link._codec.encode, decode=decode))


@pytest.mark.parametrize("llm", ["process"], indirect=True)
@pytest.mark.parametrize("where", ["to the engine", "from the engine"])
def test_20_a_message_that_cannot_be_read_costs_its_request_alone(llm: AsyncLLM, where: str) -> None:
    """Of the requests "good" and "bad" the second's messages arrive broken; so does a ping's."""

    def of_bad(message: Any) -> bool:
        if isinstance(message, EventColumns):
            return any(name.startswith("bad") for name in message.request_ids)
        return isinstance(message, Submit) and any(request.id.startswith("bad") for request in message.requests)

    async def ask() -> None:
        calm = (await last(llm.generate("good", GREEDY))).outputs[0].token_ids
        before = (await llm.ping()).num_unread
        with unreadable(llm._engine, where, of_bad):
            # One after the other: what the engine tells of a step concerns all who share it.
            with pytest.raises(StepError, match="could not be read"):
                await asyncio.wait_for(last(llm.generate("bad", PAIR, "bad")), 20)
            assert (await last(llm.generate("good", GREEDY, "good"))).outputs[0].token_ids == calm
        broken = unreadable(llm._engine, where, lambda message: isinstance(message, Ping | Pong))
        with broken, pytest.raises(StepError, match="could not be read"):
            await asyncio.wait_for(llm.ping(), 20)
        assert (await llm.ping()).num_unread >= before + 2
        await idle(llm)

    run(ask())


@pytest.mark.parametrize("llm", ["process"], indirect=True)
def test_20_beside_a_running_stream(llm: AsyncLLM) -> None:
    """Noise, broken requests and a bad end of their headers, into the engine's socket while it computes."""

    async def ask() -> None:
        long = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
        calm = (await last(llm.generate("beside", long))).outputs[0].token_ids
        before = (await llm.ping()).num_unread
        beside = asyncio.create_task(last(llm.generate("beside", long)))
        end = llm._engine._link._end  # type: ignore[attr-defined]
        for number in range(20):
            end.send(os.urandom(100 + number))
            await asyncio.sleep(0.005)
            broken = unreadable(llm._engine, "to the engine", lambda message: isinstance(message, Submit))
            with broken, pytest.raises(StepError):
                await last(llm.generate("x", GREEDY))
        assert (await beside).outputs[0].token_ids == calm
        assert (await llm.ping()).num_unread == before + 40
        await idle(llm)

    run(ask())


def test_66_a_killed_process_is_told_of_and_leaves_nothing() -> None:
    async def ask() -> None:
        async with AsyncLLM(str(tiny.checkpoint("llama")), engine="process", **OPTIONS) as llm:
            pid = llm._engine.pid  # type: ignore[attr-defined]
            stream = llm.generate("go on", SamplingParams(max_tokens=1500, ignore_eos=True), pieces="delta")
            await anext(stream)
            begin = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            assert time.monotonic() - begin < 2.0
            with pytest.raises(EngineDeadError):
                await llm.ping()
        assert not _exists(pid)

    run(ask())


def test_67_a_stopped_process_answers_no_ping_until_it_goes_on() -> None:
    async def ask() -> None:
        async with AsyncLLM(str(tiny.checkpoint("llama")), engine="process", **OPTIONS) as llm:
            pid = llm._engine.pid  # type: ignore[attr-defined]
            await llm.ping()
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(llm.ping(), 0.5)
            os.kill(pid, signal.SIGCONT)
            await asyncio.wait_for(llm.ping(), 5.0)
            assert (await last(llm.generate("x", GREEDY))).finished

    run(ask())


def test_68_the_process_ends_when_its_parent_is_killed() -> None:
    code = (
        "import sys, time\nfrom beheld.api.async_llm import AsyncLLM\n"
        "if __name__ == '__main__':\n"
        "    llm = AsyncLLM(sys.argv[1], engine='process', num_gpu_blocks_override=100)\n"
        "    print(llm._engine.pid, flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tiny.checkpoint("llama"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _exists(pid)
        parent.kill()
    deadline = time.monotonic() + 5
    while _exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_68_a_process_that_still_loads_ends_with_its_parent() -> None:
    begun = spawn()
    Link(begun.end, CODEC).send(EngineArgs(model=str(tiny.checkpoint("llama"))))
    time.sleep(1.0)
    begun.end.close()
    assert begun.process.wait(5) == 0


def _exists(pid: int) -> bool:
    """True if the process lives; one that only waits to be collected does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
