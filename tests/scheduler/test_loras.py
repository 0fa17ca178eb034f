"""Adapters share the device's slots: never more at once than there are, and nobody waits without end."""

from __future__ import annotations

import pytest

from beheld.core.errors import LoRAError
from beheld.core.request import LoRARequest, Request
from tests.fakes import expected_tokens, fake_config, fake_info, fake_request
from tests.scheduler.drive import Bench

A, B, C = (LoRARequest(name, number) for number, name in enumerate("abc", 1))


def request(name: str, lora: LoRARequest | None, max_tokens: int = 6) -> Request:
    return fake_request(name, 5, 6, 7, lora=lora, max_tokens=max_tokens)


def bench(max_loras: int, rows: int = 4, **options: object) -> Bench:
    return Bench(fake_config(max_num_seqs=rows, max_loras=max_loras, **options), fake_info())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_loras", [1, 2, 3])
def test_every_answer_is_that_of_its_own_adapter(max_loras: int, overlap: bool) -> None:
    made = bench(max_loras, overlap=overlap)
    requests = [request(str(n), (A, None, B, A, C, None, B)[n % 7], 3 + n % 5) for n in range(30)]
    made.run(*requests)
    for each in requests:
        assert made.tokens(each.id) == expected_tokens(each, 256)[0]


def test_those_that_can_run_pass_one_that_waits_for_a_slot() -> None:
    made = bench(1)
    made.add(request("a", A), request("b", B), request("none", None), request("a2", A))
    made.step()
    assert made.scheduler.num_running == 3
    assert made.scheduler.num_waiting == 1
    assert not made.tokens("b")
    assert made.tokens("none")
    assert made.tokens("a2")
    made.run()
    assert made.tokens("b")


def test_one_that_waits_gets_its_turn_though_others_keep_coming() -> None:
    """Two rows, one slot, and a new request with the adapter that runs at every step."""
    made = bench(1, rows=2)
    made.add(request("first", A), request("patient", B))
    for step in range(200):
        made.add(request(f"a{step}", A))
        made.step()
        if made.tokens("patient"):
            break
    else:
        raise AssertionError("passed by 200 others")
    assert step < 40
    made.run()


def test_those_without_an_adapter_are_never_held_up_by_slots() -> None:
    made = bench(1, rows=2)
    made.add(request("a", A, 60), request("b", B, 2))
    for step in range(20):
        made.add(request(f"n{step}", None, 1))
        made.step()
    assert sum(bool(made.tokens(f"n{step}")) for step in range(20)) >= 19
    assert not made.tokens("b")
    made.run()
    assert made.tokens("b")


def test_what_waits_for_a_slot_can_be_aborted() -> None:
    made = bench(1)
    made.add(request("a", A), request("b", B), request("c", C))
    made.step()
    assert made.scheduler.abort("b") is not None
    made.scheduler.check()
    made.run()
    assert made.tokens("c")
    assert not made.tokens("b")


def test_an_engine_without_slots_takes_no_adapters() -> None:
    with pytest.raises(LoRAError, match="enable_lora"):
        bench(0).add(request("a", A))


def test_the_adapters_that_run_and_wait_are_told() -> None:
    made = bench(1)
    made.add(request("a", A), request("b", B), request("none", None))
    made.step()
    stats = made.scheduler.stats()
    assert (stats.running_loras, stats.waiting_loras) == ({"a"}, {"b"})
    made.run()
    stats = made.scheduler.stats()
    assert not stats.running_loras | stats.waiting_loras
