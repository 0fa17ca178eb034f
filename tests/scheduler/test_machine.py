"""A state machine over the scheduler: any order of adding, planning, reading, ending and clearing gives right answers.

200 examples of 100 steps run (some seconds); with BEHELD_LONG=1, 4000.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from beheld.core.config import KVGroup
from beheld.core.errors import CapacityError, StepError, UserError
from beheld.core.outputs import TokenEvent
from beheld.core.plan import StepPlan
from beheld.core.pooling_params import Pooling
from beheld.core.request import FinishReason, LoRARequest, Request
from beheld.core.sampling import Sampling
from beheld.scheduler.pace import StepPace
from beheld.scheduler.scheduler import Scheduler
from beheld.scheduler.shared_prefill import SharedPrefills
from tests.fake_store import FakeStore
from tests.fakes import (
    CROSS,
    FULL,
    LATENT,
    VOCAB,
    FakeRunner,
    chunked,
    conv,
    expected_tokens,
    expected_vector,
    fake_capacity,
    fake_config,
    fake_info,
    fake_item,
    fake_request,
    half_right,
    now_and_then_right,
    recurrent,
    sliding,
)
from tests.long import sized
from tests.toy_recurrent import RECURRENT

pytestmark = pytest.mark.case(82)

GROUPS: list[tuple[KVGroup, ...]] = [
    (FULL,),
    (FULL, LATENT),
    (FULL, sliding(6)),
    (sliding(9),),
    (sliding(1), FULL),
    (sliding(3), sliding(10)),
    (FULL, CROSS),
    (FULL, chunked(7)),
    (FULL, conv(4)),
    (sliding(9), conv(3)),
    (LATENT,),
    (LATENT, sliding(6), conv(4)),
    (RECURRENT,),
    (FULL, RECURRENT),
    (FULL, sliding(6), RECURRENT, CROSS),
    (recurrent(8),),
    (FULL, recurrent()),
    (FULL, recurrent(12)),
    (FULL, sliding(6), recurrent(8), CROSS),
]
BROKEN_TOKEN = VOCAB - 1
LOST = "the states are lost"
BAD = fake_item("bad", 5)
BAD_BESIDE = fake_item("bad beside", 1, num_states=4)
ITEMS = [
    fake_item("a", 3),
    fake_item("b", 7),
    fake_item("c", 8, [False, True, True, False, False, True, True, False]),
    fake_item("d", 6, [True] * 6),
    fake_item("text only", 3, [False] * 3),
    BAD,
]
BESIDE = [
    fake_item("e", 1, num_states=3),
    fake_item("f", 1, num_states=7),
    fake_item("g", 2, num_states=8),
    BAD_BESIDE,
]
# Prompts are built from few pieces, so that they share prefixes, spans and whole blocks.
PIECES = st.one_of(
    st.sampled_from([(3, 4, 5, 6), (3, 4, 5, 6, 7, 8, 9, 10), (11,), (12, 13), (14,) * 9]),
    st.sampled_from(ITEMS[:-1]),
    st.sampled_from(ITEMS),
    st.tuples(st.integers(3, VOCAB - 1)),
)


class FixedPace(StepPace):
    """Limits as small as prompts are here."""

    def __init__(self, units: int, weight: int) -> None:
        super().__init__(1.0)
        self._fixed = max(units, weight), weight

    def units(self, *, alone: bool = False) -> int:
        return self._fixed[0]

    @property
    def weight(self) -> int:
        return self._fixed[1]


class SchedulerMachine(RuleBasedStateMachine):
    """The device verifies each plan; what is asserted here is the outcome."""

    @initialize(
        groups=st.sampled_from(GROUPS),
        num_blocks=st.sampled_from([6, 9, 14, 60]),
        rows=st.sampled_from([1, 2, 5]),
        budget=st.sampled_from([5, 9, 16, 64]),
        embeds=st.sampled_from([8, 12, 40]),
        caching=st.sampled_from([True, True, False]),
        chunked=st.sampled_from([True, True, False]),
        atomic=st.sampled_from([False, False, True]),
        policy=st.sampled_from(["fcfs", "priority"]),
        max_model_len=st.sampled_from([24, 48]),
        max_loras=st.sampled_from([1, 2]),
        drafts=st.sampled_from([0, 0, 1, 4, 7]),
        clients=st.sampled_from([1, 1, 3]),
        min_shared=st.sampled_from([4, 8, 128]),
        pace=st.sampled_from([None, None, (1, 1), (4, 3), (12, 2)]),
        outside=st.sampled_from([0, 1, 2, 50]),
        at_once=st.booleans(),
    )
    def begin(
        self,
        groups: tuple[KVGroup, ...],
        num_blocks: int,
        rows: int,
        budget: int,
        embeds: int,
        caching: bool,
        chunked: bool,
        atomic: bool,
        policy: str,
        max_model_len: int,
        max_loras: int,
        drafts: int,
        clients: int,
        min_shared: int,
        pace: tuple[int, int] | None,
        outside: int,
        at_once: bool,
    ) -> None:
        self.clients = clients
        self.info = fake_info(*groups, atomic_spans=atomic)
        self.config = fake_config(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_encoder_tokens=embeds,
            prefix_caching=caching,
            chunked_prefill=chunked,
            policy=policy,
            max_model_len=max_model_len,
            max_loras=max_loras,
            num_draft_tokens=drafts,
        )
        capacity = fake_capacity(self.info, self.config, num_blocks)
        self.most_positions = (num_blocks - 1) * 4 if {FULL, LATENT} & {*groups} else max_model_len
        # Blocks are kept outside of the engine, and so many sequences' may be read ahead.
        keeps = outside and caching and all(group.keeps_all for group in groups)
        self.store = FakeStore(most=outside) if keeps else None
        if self.store is not None:
            self.store.at_once = at_once
        self.scheduler = Scheduler(self.config, self.info, capacity, self.store)
        # Prompts are short here.
        self.scheduler._shared_prefills = SharedPrefills(self.config.block_size, min_shared)
        if pace is not None and chunked:
            self.scheduler._pace = FixedPace(*pace)
        self.runner = FakeRunner(self.config, self.info, capacity)
        self.runner.broken_tokens = {BROKEN_TOKEN}
        self.runner.broken_digests = {BAD.digest, BAD_BESIDE.digest}
        self.runner.drafts = half_right if drafts == 4 else now_and_then_right
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, TokenEvent | None] = {}
        self.flights: list[StepPlan] = []
        self.count = 0
        self.num_lost: Counter[str] = Counter()

    @property
    def alive(self) -> list[str]:
        return [request_id for request_id in self.requests if request_id not in self.ended]

    @rule(
        pieces=st.lists(PIECES, min_size=1, max_size=5),
        max_tokens=st.integers(1, 14),
        min_tokens=st.sampled_from([0, 0, 3]),
        stops=st.sampled_from([frozenset(), frozenset({2, 5}), frozenset(range(30))]),
        priority=st.integers(0, 2),
        logprobs=st.sampled_from([None, None, None, 1]),
        lora=st.sampled_from([None, None, LoRARequest("x", 1), LoRARequest("y", 2), LoRARequest("z", 3)]),
        copies=st.integers(1, 3),
        client=st.integers(0, 2),
    )
    def add(
        self,
        pieces: list[object],
        max_tokens: int,
        min_tokens: int,
        stops: frozenset[int],
        priority: int,
        logprobs: int | None,
        lora: LoRARequest | None,
        copies: int,
        client: int,
    ) -> None:
        if self.info.cross is not None:
            pieces = [BESIDE[ITEMS.index(piece) % len(BESIDE)] if piece in ITEMS else piece for piece in pieces]
        for _ in range(copies):
            request = fake_request(
                f"r{self.count}",
                *pieces,
                max_tokens=max(max_tokens, min_tokens),
                min_tokens=min_tokens,
                stop_ids=stops,
                own_stop_ids=stops & {5},
                priority=priority,
                prompt_logprobs=logprobs,
                lora=lora,
                client=str(client % self.clients),
            )
            self.count += 1
            try:
                self.scheduler.add(request)
            except (UserError, CapacityError):
                return
            self.requests[request.id] = request
            self.outputs[request.id] = []

    @rule(
        pieces=st.lists(PIECES, min_size=1, max_size=5),
        method=st.sampled_from(["last", "cls", "mean", "all"]),
        priority=st.integers(0, 2),
        client=st.integers(0, 2),
    )
    def add_pooling(self, pieces: list[object], method: str, priority: int, client: int) -> None:
        if self.info.cross is not None:
            pieces = [BESIDE[ITEMS.index(piece) % len(BESIDE)] if piece in ITEMS else piece for piece in pieces]
        request = fake_request(
            f"r{self.count}",
            *pieces,
            params=Pooling(method=method),
            priority=priority,
            client=str(client % self.clients),
        )
        self.count += 1
        try:
            self.scheduler.add(request)
        except (UserError, CapacityError):
            return
        self.requests[request.id] = request
        self.outputs[request.id] = []

    @rule()
    def plan(self) -> None:
        if len(self.flights) == 2:
            return
        plan = self.scheduler.schedule()
        if plan is not None:
            rows = self.scheduler.request_ids(plan)
            assert rows.keys() == {piece.row for piece in plan.slices}
            self.runner.launch(plan)
            self.flights.append(plan)

    @rule()
    def read(self) -> None:
        if not self.flights:
            return
        plan = self.flights.pop(0)
        for event in self.scheduler.update(plan, self.runner.collect(plan)):
            self.take(event)

    @rule(data=st.data())
    def lose_states(self, data: st.DataObject) -> None:
        """The oldest step failed amid the recurrent states of some of its sequences."""
        if not self.flights or not self.info.recurrent:
            return
        plan = self.flights.pop(0)
        rows = data.draw(st.sets(st.sampled_from([piece.row for piece in plan.slices])))
        for row, request_id in self.scheduler.request_ids(plan).items():
            self.num_lost[request_id] += row in rows
        result, left = self.runner.collect(plan), {}
        for name in ("tokens", "logprobs", "prompt_logprobs", "pooled", "draft_ids", "failed"):
            left[name] = {row: value for row, value in getattr(result, name).items() if row not in rows}
        result = dataclasses.replace(result, **left, redone=dict.fromkeys(rows, LOST))
        for event in self.scheduler.update(plan, result):
            self.take(event)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.plan()
            self.read()

    @rule(data=st.data(), how=st.sampled_from(["abort", "stop"]))
    def end(self, data: st.DataObject, how: str) -> None:
        if not self.alive:
            return
        request_id = data.draw(st.sampled_from(self.alive))
        if how == "stop":
            self.scheduler.stop(request_id)
            self.ended[request_id] = None
            return
        event = self.scheduler.abort(request_id)
        assert event is not None
        assert (event.finish, event.error) == (FinishReason.ABORT, None)
        self.ended[request_id] = event

    @rule()
    def clear(self) -> None:
        self.scheduler.clear_prefix_cache()

    @rule()
    def finish_reading(self) -> None:
        if self.store is not None:
            self.store.finish()

    @rule(data=st.data(), how=st.sampled_from(["gone", "bad"]))
    def lose_block(self, data: st.DataObject, how: str) -> None:
        """A file is gone, or cannot be used."""
        if self.store is not None and self.store.held:
            key = data.draw(st.sampled_from(sorted(self.store.held)))
            if how == "gone":
                del self.store.held[key]
            else:
                self.store.bad.add(key)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert self.scheduler.has_work == bool(self.alive)

    def take(self, event: TokenEvent) -> None:
        request = self.requests[event.request_id]
        assert event.request_id not in self.ended, "an event after the last"
        output = self.outputs[request.id]
        first = not output
        assert (event.pooled is not None) <= isinstance(request.params, Pooling)
        if event.token_ids:
            assert isinstance(request.params, Sampling)
            output += event.token_ids
            if first and request.params.prompt_logprobs is not None:
                told = [one.token_id for one in event.prompt_logprobs or ()]
                assert told == list(request.token_ids[1:])
            else:
                assert event.prompt_logprobs is None
        if event.finish is not None:
            self.ended[request.id] = event
            self.verify(request, event)

    def verify(self, request: Request, event: TokenEvent) -> None:
        """The whole answer, and the reason of its end, as computed by hand."""
        if event.error is not None and LOST in str(event.error):
            assert self.num_lost[request.id] > 2, "a sequence is computed again twice before it fails"
            return
        bad = any(span.item in (BAD, BAD_BESIDE) for span in request.spans) or BROKEN_TOKEN in request.token_ids
        if isinstance(request.params, Pooling):
            assert not self.outputs[request.id]
            assert (event.pooled is None) == bad
            assert event.finish is (FinishReason.ERROR if bad else FinishReason.STOP)
            assert event.pooled is None or event.pooled.tolist() == expected_vector(request)
            return
        tokens, reason = expected_tokens(request, self.config.max_model_len)
        output = self.outputs[request.id]
        room = self.most_positions + 1 - len(request.token_ids)
        if bad:
            assert (output, event.finish) == ([], FinishReason.ERROR)
            assert isinstance(event.error, StepError)
            return
        broken = tokens.index(BROKEN_TOKEN) + 1 if BROKEN_TOKEN in tokens else len(tokens)
        if broken < len(tokens) and broken < room:
            assert output == tokens[:broken]
            assert isinstance(event.error, StepError)
        elif room < len(tokens):
            assert output == tokens[:room]
            assert isinstance(event.error, CapacityError)
        else:
            assert output == tokens
            assert event.finish is FinishReason(reason)
            own = tokens[-1] in request.params.own_stop_ids and reason == "stop"
            assert event.stop_id == (tokens[-1] if own else None)

    def teardown(self) -> None:
        """Whatever is left ends by itself, and everything has been given back."""
        if not hasattr(self, "scheduler"):
            return
        if self.store is not None:
            self.store.at_once = True
        for _ in range(400 * (len(self.requests) + 1)):
            if not self.alive and not self.flights:
                break
            self.step(1)
        assert not self.alive, "does not end"
        self.scheduler.check()
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        for request_id, event in self.ended.items():
            if event is None or event.finish is FinishReason.ABORT:
                request = self.requests[request_id]
                output = self.outputs[request_id]
                if isinstance(request.params, Pooling):
                    assert not output
                    continue
                assert output == expected_tokens(request, self.config.max_model_len)[0][: len(output)]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=sized(200, 4_000),
    stateful_step_count=100,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
