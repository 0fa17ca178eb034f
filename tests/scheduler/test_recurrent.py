"""Recurrent states: one a sequence, checkpoints where prompts part, and blocks that never run out for want of them."""

from __future__ import annotations

import pytest

from beheld.core.config import EngineConfig, ModelInfo
from beheld.core.plan import StepResult
from beheld.scheduler.cache.blocks import NULL_BLOCK
from beheld.scheduler.checkpoints import checkpoint_blocks
from tests.fakes import FULL, expected_tokens, fake_config, fake_info, fake_item, fake_request, recurrent
from tests.scheduler.drive import Bench

IMAGE = fake_item("image", 22)
SYSTEM = range(10, 19)
END = 2


def bench(num_blocks: int | tuple[int, ...] = 512, every: int = 512, **changes: object) -> Bench:
    config: EngineConfig = fake_config(**changes)
    info: ModelInfo = fake_info(FULL, recurrent(every))
    return Bench(config, info, num_blocks)


def right(made: Bench, request_id: str, *prompt: object, max_tokens: int = 4) -> int:
    """Run a request, check its answer, and return how many of its positions came from the cache."""
    request = fake_request(request_id, *prompt, max_tokens=max_tokens)  # type: ignore[arg-type]
    made.run(request)
    assert made.tokens(request_id) == expected_tokens(request, made.config.max_model_len)[0]
    return made.events[request_id][0].num_cached


def test_checkpoints_lie_before_the_edges_of_a_prompt() -> None:
    """After the system prompt (9 tokens and its end), before and after the image, at the end, every 40 positions."""
    info = fake_info(FULL, recurrent(40))
    request = fake_request("1", SYSTEM, (END,), range(20, 27), IMAGE, range(30, 45))
    assert [span.start for span in request.spans] == [17]
    length = len(request.token_ids)
    assert length == 54
    assert checkpoint_blocks(request, info, 4) == {10 // 4 - 1, 17 // 4 - 1, 39 // 4 - 1, 40 // 4 - 1, 53 // 4 - 1}
    assert checkpoint_blocks(request, fake_info(FULL), 4) is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [7, 32, 256])
def test_ten_questions_about_an_image_compute_it_once(overlap: bool, budget: int) -> None:
    made = bench(overlap=overlap, max_num_batched_tokens=budget)
    before = 0
    for number in range(10):
        question = (60 + number, 50, 51, 52)
        cached = right(made, str(number), SYSTEM, (END, 20), IMAGE, question)
        assert cached == (0 if number == 0 else 33 // 4 * 4)
        computed, before = made.computed() - before, made.computed()
        # What is left of the image's last block, the question, and the answer but for its last token; steps that
        # overlap compute one token more.
        assert number == 0 or computed - int(overlap) <= 33 % 4 + 4 + 3
    assert made.runner.num_encoded == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_continues_the_answer(overlap: bool) -> None:
    """The newest state at the end of a block of the answer is kept, and those before it are not."""
    made = bench(overlap=overlap)
    first = fake_request("1", range(10, 31), max_tokens=30)
    made.run(first)
    talk = (*first.token_ids, *made.tokens("1"))
    # The answer's last token is never computed.
    assert right(made, "2", talk, (5, 6, 7)) == (len(talk) - 1) // 4 * 4
    assert made.scheduler.stats().num_cached_blocks[1] <= 4


def test_states_of_long_answers_are_kept_every_so_often() -> None:
    made = bench(every=16, max_model_len=512)
    first = fake_request("1", range(10, 15), max_tokens=90)
    made.run(first)
    talk = (*first.token_ids, *made.tokens("1"))
    assert right(made, "2", talk[:43], (95, 96)) == 32
    assert right(made, "3", talk[:70], (95, 96)) == 64


def test_a_sequence_alone_needs_two_blocks_however_long_it_grows() -> None:
    """One of its own; one more where it continues from a state of others."""
    made = bench((512, 3), max_num_batched_tokens=16)
    for number in range(3):
        right(made, str(number), range(10, 80), max_tokens=60)
    assert made.scheduler.stats().num_preemptions == 0


def test_running_sequences_are_not_preempted_for_states() -> None:
    """Each keeps its own block; checkpoints take what is spare."""
    made = bench((512, 1 + 8), max_num_batched_tokens=64)
    requests = [fake_request(str(n), range(10, 30), (n + 40,), range(50, 60), max_tokens=30) for n in range(20)]
    made.run(*requests)
    for request in requests:
        assert made.tokens(request.id) == expected_tokens(request, made.config.max_model_len)[0]
    assert made.scheduler.stats().num_preemptions == 0


def test_the_least_recently_used_checkpoints_go_first() -> None:
    made = bench((512, 1 + 12))
    prompts = {name: fake_item(name, 22) for name in "abcdefgh"}
    for name in "ab":
        right(made, name, SYSTEM, prompts[name], (50, 51, 52))
    assert right(made, "a again", SYSTEM, prompts["a"], (60, 61, 62)) > 22
    for name in "cdef":
        right(made, name, (70,), prompts[name], (50, 51, 52))
        assert right(made, f"a after {name}", SYSTEM, prompts["a"], (80, ord(name) - 60)) > 22
    assert right(made, "b again", SYSTEM, prompts["b"], (60, 61, 62)) <= 9


def test_without_prefix_caching_nothing_is_kept() -> None:
    made = bench(prefix_caching=False)
    request = fake_request("1", SYSTEM, IMAGE, range(30, 60), max_tokens=20)
    made.add(request)
    while made.scheduler.has_work:
        made.step()
        if made.scheduler.num_running:
            stats = made.scheduler.stats()
            assert stats.num_blocks[1] - stats.num_free_blocks[1] == 1
    assert all(sum(block != NULL_BLOCK for block in piece.new_blocks[1]) <= 1 for p in made.plans for piece in p.slices)


def redone(made: Bench, steps: int, *requests: str) -> None:
    """In the next step, these requests' states are lost amid the pass."""
    plan = made.scheduler.schedule()
    assert plan is not None
    rows = {row for row, request_id in made.scheduler.request_ids(plan).items() if request_id in requests}
    made.runner.launch(plan)
    later = None
    if steps == 2:
        later = made.scheduler.schedule()
        if later is not None:
            made.runner.launch(later)
    result = made.runner.collect(plan)
    kept, told = (
        {row: given for row, given in each.items() if row not in rows}
        for each in (result.tokens, result.prompt_logprobs)
    )
    lost = StepResult(plan.id, kept, prompt_logprobs=told, redone=dict.fromkeys(rows, "out of memory"))
    made.take(made.scheduler.update(plan, lost))
    made.scheduler.check()
    if later is not None:
        made.take(made.scheduler.update(later, made.runner.collect(later)))
    made.scheduler.check()


@pytest.mark.parametrize("flights", [1, 2])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_sequence_whose_states_were_lost_is_computed_again(flights: int, after: int) -> None:
    """With a step in flight, what that makes of the lost states is not looked at."""
    made = bench(max_num_batched_tokens=20)
    requests = [fake_request(str(n), range(10, 40), (n + 40,), max_tokens=12, prompt_logprobs=1) for n in range(3)]
    made.add(*requests)
    for _ in range(after):
        made.step()
    redone(made, flights, "0", "2")
    made.run()
    for request in requests:
        assert made.tokens(request.id) == expected_tokens(request, made.config.max_model_len)[0]
        told = [one.token_id for one in made.events[request.id][0].prompt_logprobs or ()]
        assert told == list(request.token_ids[1:])


def test_it_is_not_computed_again_for_ever() -> None:
    made = bench()
    made.add(fake_request("1", range(10, 20), max_tokens=12))
    for _ in range(3):
        redone(made, 1, "1")
    assert "out of memory" in str(made.last("1").error)
    assert not made.scheduler.has_work
