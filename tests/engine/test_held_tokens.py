"""Tokens of answers that are read at their end come several at a time: none lost, none doubled, all in order."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from beheld import AsyncLLM, SamplingParams
from beheld.core.outputs import TokenEvent
from beheld.core.request import FinishReason, Request
from beheld.core.sampling import Sampling
from beheld.engine.held_tokens import HeldTokens
from tests import tiny

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 80, "max_num_seqs": 4}


def request(name: str, at_end: bool) -> Request:
    return Request(name, (1,), Sampling(), at_end=at_end)


@pytest.mark.parametrize("seed", range(20))
def test_all_tokens_arrive_in_order_whatever_steps_bring(seed: int) -> None:
    draw = random.Random(seed)
    held = HeldTokens()
    held.add([request(str(number), at_end=number < 6) for number in range(8)])
    live, wanted, found = {str(number) for number in range(8)}, dict[str, list[int]](), dict[str, list[int]]()
    num_events, ended = 0, set[str]()
    for step in range(200):
        events = []
        for name in sorted(live):
            ids = tuple(step * 10 + place for place in range(draw.choice((0, 1, 1, 1, 3))))
            end = draw.random() < 0.02 or step == 199
            live -= {name} if end else set()
            reason = draw.choice((FinishReason.LENGTH, FinishReason.ABORT)) if end else None
            wanted.setdefault(name, []).extend(ids)
            events.append(TokenEvent(name, ids, reason))
        for event in held.take(tuple(events)):
            assert event.request_id not in ended
            num_events += int(event.request_id) < 6
            found.setdefault(event.request_id, []).extend(event.token_ids)
            ended |= {event.request_id} if event.finish is not None else set()
    assert found == wanted
    assert ended == set(wanted)
    assert num_events < sum(len(ids) for name, ids in wanted.items() if int(name) < 6) / 4 + 12
    assert held.take(()) == ()
    assert not held._held
    assert not held._most


def test_the_first_event_is_sent_at_once_and_streams_are_left_as_they_are() -> None:
    held = HeldTokens()
    held.add([request("whole", at_end=True), request("stream", at_end=False)])
    first = (TokenEvent("whole", (1,), num_cached=3), TokenEvent("stream", (1,)))
    assert held.take(first) == first
    # The size of the first batch is 64.
    ids = tuple(range(3, 66))
    assert held.take((TokenEvent("whole", ids),)) == ()
    assert held.take((TokenEvent("whole", (2,)),)) == (TokenEvent("whole", (*ids, 2)),)
    later = (TokenEvent("whole", (3,)), TokenEvent("stream", (2,)))
    assert held.take(later) == later[1:]
    assert held.take((TokenEvent("whole", (4,), FinishReason.STOP, 4),)) == (
        TokenEvent("whole", (3, 4), FinishReason.STOP, 4),
    )
    held.add([request("lost", at_end=True)])
    held.drop(["lost"])
    assert not held._held


def test_answers_read_at_their_end_are_those_that_are_streamed() -> None:
    events = list[TokenEvent]()

    async def ask() -> None:
        async with AsyncLLM(str(tiny.checkpoint("llama")), engine="thread", **OPTIONS) as llm:
            live = llm._live
            push = live.push
            live.push = lambda event, *more: (events.append(event), push(event, *more))[1]  # type: ignore[method-assign, func-returns-value]
            for options in (
                {},
                {"n": 2, "temperature": 1.0, "seed": 3},
                {"logprobs": 1},
                {"logprob_token_ids": [5, 6]},
                {"stop": ["zq"]},
            ):
                params = SamplingParams(max_tokens=40, ignore_eos=True, **({"temperature": 0.0} | options))
                streamed: dict[int, list[int]] = {}
                async for output in llm.generate("go on", params, pieces="delta"):
                    for answer in output.outputs:
                        streamed.setdefault(answer.index, []).extend(answer.token_ids)
                events.clear()
                async for output in llm.generate("go on", params, pieces="final"):
                    whole = {answer.index: list(answer.token_ids) for answer in output.outputs}
                assert whole == streamed
                reports = bool(options.keys() & {"logprobs", "logprob_token_ids"})
                assert [len(answer.logprobs or ()) for answer in output.outputs] == [40 * reports] * len(whole)
                held = not reports and "stop" not in options
                most = 2 * len(whole) if held else 40
                assert len(events) <= most, (options, len(events))
                # A stop string is found here: the engine may have sent a token more by then.
                assert held or len(events) >= len(whole[0])

    asyncio.run(ask())
