"""What crosses the border of a process arrives as it was, and nothing else is believed."""

from __future__ import annotations

import itertools
import json
import math
import random
import typing
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beheld.core.config import EngineArgs, MediaWork
from beheld.core.errors import ConfigError, DecodeError, StepError
from beheld.core.media import MediaReceipt
from beheld.core.outputs import TokenEvent
from beheld.core.plan import TokenLogprobs
from beheld.core.pooling_params import Pooling
from beheld.core.request import FinishReason, Request
from beheld.core.sampling import Sampling
from beheld.core.structured_outputs import Grammar
from beheld.engine.codec import CODEC
from beheld.engine.columns import columns_of, events_of
from beheld.engine.messages import Abort, Events, Lost, Message, Prepared, Read, Reply, Submit
from tests.fakes import fake_config, fake_item, fake_request, prompt_columns

encode, decode = CODEC.encode, CODEC.decode

WORDS = ["a", "ü\n"] * 20
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


def through(value: Any) -> Any:
    return decode(b"".join(encode(value)))


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_values_come_back(value: Any) -> None:
    found = through(value)
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("outer", [list, tuple])
@pytest.mark.parametrize(
    "row",
    [
        range(-20, 300),
        [True, False] * 20,
        [1, True] * 20,
        [2**80] * 20,
        [1.5] * 20,
        WORDS,
        [*WORDS, None],
    ],
)
def test_long_rows_come_back(outer: Any, row: Any) -> None:
    found = through(outer(row))
    assert repr(found) == repr(outer(row))


def test_long_rows_travel_as_buffers() -> None:
    pieces = encode({"ids": tuple(range(5000))})
    assert len(pieces[1]) < 200


@pytest.mark.parametrize("row", [["list", "str", 0], ["dict", "int", 0], ["list", "int", 9], ["list", "int", 1]])
def test_malformed_rows_are_refused(row: Any) -> None:
    made = encode([b"12345678", b"123"])
    head = json.loads(bytes(made[1])) | {"value": {"row": row}}
    body = json.dumps(head).encode()
    buffers = [b"\0" * (-(8 + len(body)) % 64), b"12345678", b"\0" * 56, b"123"]
    with pytest.raises(ValueError):
        decode(b"".join([len(body).to_bytes(8, "little"), body, *buffers]))


# What an engine's side sends itself, and what `sent_message` takes out.
HERE = {Prepared, Read, Lost, MediaReceipt}


def held(hint: Any) -> set[type]:
    """The classes with fields in an annotation."""
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        return {hint}
    return {kind for part in typing.get_args(hint) for kind in held(part)}


def test_all_classes_that_messages_hold_are_listed() -> None:
    """A request whose parameters hold another would be refused by engines in processes alone."""
    found = set[type]()
    left: set[type] = {*typing.get_args(Message), *typing.get_args(Reply)} - HERE
    # What modules import for their annotations alone.
    unread = {"np": np}
    assert Submit in left
    assert Events in left
    while left:
        kind = left.pop()
        found.add(kind)
        hints = typing.get_type_hints(kind, localns=unread)
        left |= {each for hint in hints.values() for each in held(hint)} - found - HERE
    assert Sampling in found
    listed = set(CODEC._classes.values())
    assert {kind.__name__ for kind in found - listed} == set()


def test_requests_with_media_come_back() -> None:
    features = {
        "pixel_values": torch.randn(3, 4).to(torch.bfloat16),
        "grid": torch.tensor([[1, 2, 3]]),
        "none": torch.empty(0, 5),
    }
    item = fake_item("a", 4, features=features)
    request = fake_request("r", 1, 2, item, 3, stop_ids=frozenset((1, 2)), grammar=Grammar("regex", "a"))
    (found,) = through(Submit((request,))).requests
    assert isinstance(found, Request)
    assert (found.id, found.token_ids, found.params) == (request.id, request.token_ids, request.params)
    (span,) = found.spans
    assert (span.start, span.stop, span.item.digest) == (2, 6, item.digest)
    for name, tensor in features.items():
        assert torch.equal(span.item.features[name], tensor)
        assert span.item.features[name].dtype == tensor.dtype


def test_events_and_errors_come_back() -> None:
    logprobs = TokenLogprobs(5, -math.inf, 3, (1, 2), (-0.5, -1.25))
    error = DecodeError("It is broken.", "Mend it.", item="image 2", param="x")
    events = (
        TokenEvent("a", (5,), FinishReason.STOP, 5, (logprobs,), prompt_columns([logprobs] * 300), 7),
        TokenEvent("b", (), FinishReason.ERROR, error=error),
        TokenEvent("c", (), FinishReason.ERROR, error=StepError("nan")),
    )
    found = through(Events(events)).events
    assert found[0].finish is FinishReason.STOP
    assert found[0].logprobs[0].logprob == -math.inf
    assert (found[0].num_cached, found[0].stop_id, [*found[0].prompt_logprobs][299].top_ids) == (7, 5, (1, 2))
    assert type(found[1].error) is DecodeError
    assert str(found[1].error) == str(error)
    assert found[1].error.param == "x"
    assert type(found[2].error) is StepError
    config = fake_config(media_work=MediaWork.PROCESS)
    assert through(config) == config
    params = Pooling("embed", "mean", dimensions=64)
    assert through(fake_request("r", 1, 2, params=params)).params == params
    assert isinstance(through(config).media_work, MediaWork)
    args = EngineArgs(model="m", limit_mm_per_prompt={"image": 2}, seed=None)
    assert through(args) == args


def test_events_cross_as_columns_in_their_order() -> None:
    logprobs = TokenLogprobs(5, -0.5, 1, (5,), (-0.5,))
    others = [
        TokenEvent("a", (), FinishReason.ABORT),
        TokenEvent("b", (7,), FinishReason.LENGTH),
        TokenEvent("c", (0,), num_cached=16, waited_s=0.5),
        TokenEvent("d", (3,), stop_id=3),
        TokenEvent("e", (3,), logprobs=(logprobs,)),
        TokenEvent("f", (3,), prompt_logprobs=prompt_columns([logprobs])),
        TokenEvent("g", (3,), waited_s=0.25),
        TokenEvent("h", (), error=StepError("nan")),
        TokenEvent("i", (), FinishReason.STOP, pooled=np.arange(20, dtype=np.float32) / 7),
        TokenEvent("j", (4, 5, 6), FinishReason.LENGTH),
        TokenEvent("k", (3,), num_preemptions=2),
    ]
    chance = random.Random(4)
    for count, more in itertools.product((0, 1, 15, 16, 100), (1, 3)):
        events = [
            chance.choice([*others, *(TokenEvent(f"p{k}", (k,) * more) for k in range(20))]) for _ in range(count)
        ]
        found = events_of(through(columns_of(Events(tuple(events))))).events
        assert list(map(told, found)) == list(map(told, events))
    plain = Events(tuple(TokenEvent("x" * 30, (k,)) for k in range(100)))
    assert sum(map(len, encode(columns_of(plain)))) < 100 * (33 + 8) + 400


def told(event: TokenEvent) -> list[str]:
    return [repr(entry) for entry in event]


@pytest.mark.parametrize("value", [print, object(), EngineArgs(hf_overrides=lambda x: x), {"a": {1, 2}.union}, 1j])
def test_what_cannot_leave_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        encode(value)


def test_18_garbage_is_refused_and_runs_nothing() -> None:
    good = b"".join(encode(Submit((fake_request("r", 1, 2, fake_item("a", 4, features={"x": torch.ones(3)})),))))
    chance = random.Random(0)
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        bad = bad[: chance.randrange(len(bad))] if chance.random() < 0.3 else bad
        try:
            decode(bytes(bad))
        except ValueError:
            continue
    for body in (b"", b"\0" * 8, b"\xff" * 64, good[:-1], b"\x02" + b"\0" * 7 + b"{}"):
        with pytest.raises(ValueError):
            decode(body)
    for made in (
        '{"class": ["Popen", []]}',
        '{"class": ["Abort", [1, 2]]}',
        '{"tensor": ["float32", [-1], 0]}',
        '{"x": 1}',
        '{"enum": ["FinishReason", "whim"]}',
        '{"array": ["O", [1], 0]}',
        '{"array": ["V8", [0], 0]}',
        '{"words": ["list", ["a", 1]]}',
        '{"words": ["list", "ab"]}',
        '{"words": ["set", ["a"]]}',
        '{"class": ["EventColumns", [["a"], [], [], [], []]]}',
        '{"class": ["EventColumns", [["a"], [1], [], [1], [null]]]}',
        '{"class": ["EventColumns", [["a"], [1], [], [-1], [null]]]}',
        '{"class": ["EventColumns", [["a"], [1], [], [], [null]]]}',
    ):
        text = f'{{"value": {made}, "sizes": [0]}}'.encode()
        with pytest.raises(ValueError):
            decode(len(text).to_bytes(8, "little") + text)
    assert through(Abort(("a",))) == Abort(("a",))
