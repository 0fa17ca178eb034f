"""What LLM does with iterators: nothing waits for a slow one, its errors come in their turn, it is ended properly."""

from __future__ import annotations

import contextvars
import gc
import io
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import pytest

from beheld import LLM, SamplingParams
from beheld.api import iterables, run
from beheld.api.feed import Reading
from beheld.core.errors import EngineError, ParamsError, PromptError
from beheld.inputs.pipeline import RequestOrder
from tests import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BAD = {"promt": "Say 1"}


@pytest.fixture(
    scope="module",
    params=[{}, {"media_workers": 2, "async_scheduling": True}],
    ids=["prepared_when_taken", "prepared_ahead"],
)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Without threads that prepare, as on a CPU; with them, and with steps that overlap, as beside a GPU."""
    options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "seed": 1}
    with LLM(str(tiny.checkpoint("llama")), **options, **request.param) as made:
        assert bool(made._config.prepare_threads) == made._config.overlap == bool(request.param)
        yield made
        assert not readers()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "beheld-read"]


def ids(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def idle(llm: LLM) -> bool:
    """Nothing is left of a run."""
    stats = llm.stats().scheduler
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch, seen: Callable[[int], None]) -> None:
    """`seen` is told of the number of steps after each."""
    core = llm._live().core
    step, numbers = core.step, itertools.count(1)

    def stepping(in_flight: Any) -> Any:
        made = step(in_flight)
        seen(next(numbers))
        return made

    monkeypatch.setattr(core, "step", stepping)


class OwnError(Exception):
    """What a user's code raises."""


# ---- nothing waits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["Say 1", BAD], ids=["answered", "refused"])
def test_the_first_output_comes_while_the_source_is_at_work_on_its_second_item(llm: LLM, first: Any) -> None:
    gate = threading.Event()

    def source() -> Iterator[Any]:
        yield first
        assert gate.wait(10), "the first output waited for the second prompt"
        yield "Say 2"

    results = llm.generate_iter(source(), GREEDY)
    index, output = next(results)
    gate.set()
    assert index == 0
    assert (output.error is None) == (first != BAD)
    assert [index for index, _ in results] == [1]


def test_what_runs_goes_on_while_the_source_is_at_work(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    watched(llm, monkeypatch, lambda number: gate.set() if number == 4 else None)

    def source() -> Iterator[str]:
        yield "Say 1"
        yield "Say 2"
        assert gate.wait(10), "there were no steps"
        yield "Say 3"

    results = dict(llm.generate_iter(source(), GREEDY))
    assert sorted(results) == [0, 1, 2]
    assert [ids(results[n]) for n in range(3)] == [
        ids(output) for output in llm.generate([f"Say {n}" for n in (1, 2, 3)], GREEDY, use_tqdm=False)
    ]


def test_generate_answers_while_it_reads_and_gives_all_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    watched(llm, monkeypatch, lambda number: gate.set())
    prompts = [f"Say {n}" for n in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + n % 5, ignore_eos=True) for n in range(20)]

    def source() -> Iterator[str]:
        yield from prompts[:1]
        assert gate.wait(10), "all was read before the first step"
        yield from prompts[1:]

    outputs = llm.generate(source(), params, use_tqdm=False)
    assert [len(ids(output)) for output in outputs] == [1 + n % 5 for n in range(20)]
    assert [ids(output) for output in outputs] == [ids(o) for o in llm.generate(prompts, params, use_tqdm=False)]


def test_chat_answers_while_it_reads(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    talks = [[{"role": "user", "content": f"Say {n}"}] for n in range(3)]
    want = [ids(output) for output in llm.chat(talks, GREEDY, use_tqdm=False)]
    gate = threading.Event()
    watched(llm, monkeypatch, lambda number: gate.set())

    def source() -> Iterator[Any]:
        yield talks[0]
        assert gate.wait(10), "all was read before the first step"
        yield from talks[1:]

    assert [ids(output) for output in llm.chat(source(), GREEDY, use_tqdm=False)] == want
    assert [ids(output) for output in llm.chat(iter(talks[1]), GREEDY, use_tqdm=False)] == want[1:2]
    assert llm.chat(iter([]), GREEDY) == []


def test_failures_without_end_are_told_one_after_another(llm: LLM) -> None:
    results = llm.generate_iter(itertools.repeat(BAD), GREEDY)
    for number in range(20):
        index, output = next(results)
        assert index == number
        assert isinstance(output.error, PromptError)
    results.close()  # type: ignore[attr-defined]


# ---- how far it is read, and where -----------------------------------------------------------------------------------


def test_a_source_is_read_only_as_needed(llm: LLM) -> None:
    taken: list[int] = []

    def source() -> Iterator[str]:
        for number in range(60):
            taken.append(number)
            yield f"Question {number}"

    results = llm.generate_iter(source(), GREEDY)
    first = next(results)
    assert first[1].finished
    assert len(taken) <= 8 + 8 + 16 + 1, "what runs, what waits, the window, and what the first one made room for"
    with pytest.raises(EngineError, match="busy"):
        llm.generate("x", GREEDY, use_tqdm=False)
    rest = dict([first, *results])
    assert sorted(rest) == list(range(60))
    assert ids(rest[7]) == ids(llm.generate("Question 7", GREEDY, use_tqdm=False)[0])


@pytest.mark.parametrize("workers", [0, 2], ids=["prepared_when_taken", "prepared_ahead"])
def test_what_is_queued_is_bounded_by_the_bytes_of_its_features(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for two pictures' prompts, a queue for 32 of them: it holds as many as may take memory, and one more."""
    family = "qwen2_vl"
    prompts = [
        {"prompt": tiny.prompt(family, 1, 0, "Hi?"), "multi_modal_data": {"image": tiny.picture(56, 56, seed)}}
        for seed in range(40)
    ]
    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 32, "block_size": 16, "seed": 0}
    with LLM(str(tiny.checkpoint(family)), media_workers=workers, num_gpu_blocks_override=8, **options) as llm:
        one = llm._inputs.prepare(RequestOrder(prompts[0], GREEDY, request_id="x")).spans[0].item.feature_bytes
        monkeypatch.setattr(run, "MAX_BYTES", 5 * one)
        core, waiting = llm._live().core, [0]
        watched(llm, monkeypatch, lambda number: waiting.append(core.scheduler.num_waiting))
        results = dict(llm.generate_iter(iter(prompts), GREEDY))
    assert sorted(results) == list(range(40))
    assert all(output.error is None for output in results.values())
    assert 3 <= max(waiting) <= 6


def test_the_first_step_waits_for_a_crowd_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for more than it can compute, nor where nothing more comes."""
    family = "qwen2_vl"
    prompts = [
        {"prompt": tiny.prompt(family, 1, 0, "Hi?"), "multi_modal_data": {"image": tiny.picture(56, 56, seed)}}
        for seed in range(16)
    ]
    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 16, "block_size": 16, "seed": 0}
    options |= {"max_num_batched_tokens": 128, "media_workers": 2, "async_scheduling": True}
    with LLM(str(tiny.checkpoint(family)), **options) as llm:
        scheduler, first = llm._live().core.scheduler, list[int]()
        length = len(llm._inputs.prepare(RequestOrder(prompts[0], GREEDY, request_id="x")).token_ids)
        assert 15 * length > 128
        # Whoever waits where nothing more comes waits for long here.
        monkeypatch.setattr(run, "_LULL_S", 20.0)
        start = time.monotonic()
        llm.generate(prompts[0], GREEDY, use_tqdm=False)
        assert time.monotonic() - start < 15
        monkeypatch.setattr(run, "_LULL_S", 0.5)
        monkeypatch.setattr(run, "_MOST_LULLS_S", 10.0)
        for _ in range(2):
            seen = list[int]()
            watched(
                llm, monkeypatch, lambda number, seen=seen: seen.append(scheduler.num_running + scheduler.num_waiting)
            )
            llm.generate(prompts, GREEDY, use_tqdm=False)
            first.append(seen[0])
    assert first[0] < first[1] == 16


@pytest.mark.parametrize("source", ["iterator", "list"])
def test_the_first_step_does_not_wait_for_all_that_comes_slowly(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterator's first item is computed as it is there; a list's within a bounded time, for any number of rows."""
    family = "qwen2_vl"
    prompt = {"prompt": tiny.prompt(family, 1, 0, "Hi?"), "multi_modal_data": {"image": tiny.picture(56, 56, 1)}}
    options = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 64, "num_gpu_blocks_override": 300, "seed": 0}
    with LLM(str(tiny.checkpoint(family)), media_workers=1, async_scheduling=True, **options) as llm:
        list(llm.generate_iter([prompt], GREEDY))
        seen = list[int]()
        core, prepare = llm._live().core, llm._inputs.prepare
        watched(llm, monkeypatch, lambda number: seen.append(core.scheduler.num_running + core.scheduler.num_waiting))

        def slow(*given: Any, **more: Any) -> Any:
            time.sleep(0.01)
            return prepare(*given, **more)

        monkeypatch.setattr(llm._inputs, "prepare", slow)
        # Each next one comes while it is waited for, and all together take more than half a second.
        monkeypatch.setattr(run, "_LULL_S", 0.1)
        prompts = [prompt] * 64
        outputs = dict(llm.generate_iter(iter(prompts) if source == "iterator" else prompts, GREEDY))
    assert [index for index, output in outputs.items() if output.error] == []
    assert seen[0] < 48


def test_a_sequence_is_read_by_the_caller_and_anything_else_by_a_thread(llm: LLM) -> None:
    where: set[int] = set()

    class Lazy(Sequence[str]):
        """Not a list: each prompt is made when it is asked for."""

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: Any) -> Any:
            where.add(threading.get_ident())
            if index >= 12:
                raise IndexError
            return f"Say {index}"

    lazy = Lazy()
    outputs = llm.generate(lazy, GREEDY, use_tqdm=False)
    assert where == {threading.get_ident()}
    where.clear()
    again = llm.generate(map(lazy.__getitem__, range(12)), GREEDY, use_tqdm=False)
    assert len(where) == 1
    assert threading.get_ident() not in where
    assert [ids(output) for output in outputs] == [ids(output) for output in again]


def test_a_source_is_read_in_the_callers_context(llm: LLM) -> None:
    told = contextvars.ContextVar("told", default="nothing")
    seen: list[str] = []

    def source() -> Iterator[str]:
        seen.append(told.get())
        yield "Say 1"

    token = told.set("something")
    list(llm.generate_iter(source(), GREEDY))
    told.reset(token)
    assert seen == ["something"]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["return", "raise"])
def test_what_a_source_raises_comes_after_the_outputs_before_it(llm: LLM, on_error: str) -> None:
    def source() -> Iterator[str]:
        yield from ("Say 1", "Say 2", "Say 3")
        raise OwnError("the disk is full")

    results = llm.generate_iter(source(), GREEDY, on_error=on_error)
    assert sorted((index, len(ids(output))) for index, output in itertools.islice(results, 3)) == [
        (0, 8),
        (1, 8),
        (2, 8),
    ]
    with pytest.raises(OwnError, match="the disk is full") as caught:
        next(results)
    (note,) = caught.value.__notes__
    assert "Raised by the iterable of prompts, at item 3 (counted from 0)" in note
    assert "thread" in note
    assert any(entry.name == "source" for entry in caught.traceback), "where it was raised is lost"
    with pytest.raises(OwnError):
        llm.generate(source(), GREEDY, use_tqdm=False, on_error=on_error)
    assert idle(llm)
    assert not readers()


def test_an_iterable_that_cannot_begin_says_so(llm: LLM) -> None:
    class Broken:
        def __iter__(self) -> Iterator[str]:
            raise OwnError("no such table")

    with pytest.raises(OwnError) as caught:
        next(llm.generate_iter(Broken(), GREEDY))
    assert "item 0" in caught.value.__notes__[0]


def test_the_first_bad_prompt_of_a_source_is_raised_and_ends_it(llm: LLM) -> None:
    ended = threading.Event()

    def source() -> Iterator[Any]:
        try:
            yield "Say 1"
            yield BAD
            yield from itertools.repeat("Say 2")
        finally:
            ended.set()

    with pytest.raises(PromptError):
        llm.generate(source(), GREEDY, use_tqdm=False)
    assert ended.is_set()
    assert idle(llm)
    assert not readers()


@pytest.mark.parametrize("wrong", [5, None, "Say 1", b"Say 1", {"prompt": "Say 1"}])
def test_what_is_no_list_of_prompts_is_refused_at_once(llm: LLM, wrong: Any) -> None:
    with pytest.raises(PromptError, match="is not a list of prompts"):
        llm.generate_iter(wrong, GREEDY)


@pytest.mark.parametrize(("num_params", "said"), [(2, "2 sampling_params for 3 prompts or more"), (5, "5 .* for 4")])
def test_lists_beside_an_iterator_are_checked_when_its_length_is_known(llm: LLM, num_params: int, said: str) -> None:
    prompts = [f"Say {n}" for n in range(4)]
    with pytest.raises(ParamsError, match=said):
        llm.generate(iter(prompts), [GREEDY] * num_params, use_tqdm=False)
    with pytest.raises(ParamsError, match="lora_request"):
        llm.generate(iter(prompts), GREEDY, lora_request=[None] * num_params, use_tqdm=False)
    assert len(llm.generate(iter(prompts), [GREEDY] * 4, lora_request=[None] * 4, use_tqdm=False)) == 4
    assert idle(llm)


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_leaving_early_closes_the_source_and_gives_everything_back(llm: LLM) -> None:
    where: list[int] = []

    def source() -> Iterator[str]:
        where.append(threading.get_ident())
        try:
            for number in itertools.count():
                yield f"Q {number}"
        finally:
            where.append(threading.get_ident())

    generator = source()
    results = llm.generate_iter(generator, GREEDY)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(where) == 2, "its `finally` did not run"
    assert where[0] == where[1] != threading.get_ident()
    assert next(generator, None) is None
    assert not readers()
    assert idle(llm)
    assert ids(llm.generate("Q 1", GREEDY, use_tqdm=False)[0])


def test_a_file_stays_its_owners(llm: LLM) -> None:
    file = io.StringIO("Say 1\nSay 2\nSay 3\n")
    results = llm.generate_iter(file, GREEDY)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert not file.closed


def test_what_was_never_asked_for_an_output_is_never_read(llm: LLM) -> None:
    taken: list[int] = []
    results = llm.generate_iter((str(taken.append(n)) for n in range(3)), GREEDY)
    results.close()  # type: ignore[attr-defined]
    assert taken == []


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_lengths_are_guessed_for_showing_only() -> None:
    class Stream:
        def __iter__(self) -> Iterator[str]:
            return iter(())

        def __len__(self) -> int:
            raise NotImplementedError

    assert iterables.length([1, 2]) == iterables.length(iter([1, 2])) == iterables.length({1, 2}) == 2
    assert iterables.length([]) == 0
    assert iterables.length(Stream()) is iterables.length(n for n in "ab") is None


def test_who_reads_what() -> None:
    for given in ([], (), range(3)):
        assert iterables.reading(given) is Reading.TAKER
    for slow in ({1}, iter([]), (n for n in ())):
        assert iterables.reading(slow) is Reading.THREAD


def test_a_generator_of_conversations_is_closed() -> None:
    ended: list[bool] = []

    def source() -> Generator[Any, None, None]:
        try:
            yield [{"role": "user"}]
            yield [{"role": "user"}]
        finally:
            ended.append(True)

    reading = iterables.each(iterables.conversations(source()))
    next(reading)
    assert not ended
    reading.close()
    assert ended == [True]


def test_collections_go_on_while_a_source_is_at_work(llm: LLM) -> None:
    found: list[bool] = []

    def source() -> Iterator[str]:
        yield "a"
        # Once the first is answered there is nothing but this to wait for, and what it makes may hold much in cycles.
        end = time.monotonic() + 20
        while not gc.isenabled() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        found.append(gc.isenabled())
        yield "b"

    assert len(llm.generate(source(), SamplingParams(max_tokens=1), use_tqdm=False)) == 2
    assert found == [True]
