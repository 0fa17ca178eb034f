"""The compiler's settings hold within passes, of several threads too, and are as before after them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch._dynamo

from beheld.models.surgery.compiled import _MAX_KINDS, _Settings


def limit() -> int:
    return torch._dynamo.config.recompile_limit


def test_passes_of_two_engines_in_threads_may_overlap() -> None:
    """The first pass begins and ends first; the second begins within it."""
    settings, before = _Settings(), limit()
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> tuple[int, int]:
        with settings():
            first_in.set()
            assert second_in.wait(10)
            within = limit()
        first_out.set()
        return within, limit()

    def second() -> tuple[int, int]:
        assert first_in.wait(10)
        with settings():
            second_in.set()
            assert first_out.wait(10)
            within = limit()
        return within, limit()

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.submit(first), threads.submit(second)
        assert other.result(20) == (_MAX_KINDS, before)
        assert one.result(20)[0] == _MAX_KINDS
    assert limit() == before


def test_where_settings_are_the_process_s_the_last_pass_takes_them_back() -> None:
    settings, before = _Settings(), limit()
    settings._per_thread = False
    with settings():
        with settings():
            assert limit() == _MAX_KINDS
        assert limit() == _MAX_KINDS
    assert limit() == before
