"""What strangers' templates wait for, nobody else's text waits for; clients have threads by turns."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from beheld.api.pools import Pools, names_remote
from beheld.core.request import ForeignTemplate
from beheld.inputs.pipeline import Chat
from beheld.utils.host_turns import HostTurns

TALK = [{"role": "user", "content": "Hello."}]
SEEN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a.test/"}}]}]


@pytest.mark.case(105)
def test_strangers_templates_have_threads_of_their_own() -> None:
    """Four that loop held plain text for 3 to 6 s."""
    pools = Pools(HostTurns())
    try:
        foreign = ForeignTemplate("{{ messages }}")
        for talk in (TALK, SEEN):
            assert pools.of_reading(Chat(talk, chat_template=foreign), None) is pools.template
            assert pools.of_reading(Chat(talk, chat_template="{{ messages }}"), None) is pools.of(Chat(talk), None)
        assert pools.of_reading("Hello.", None) is pools.text
    finally:
        pools.close()


@pytest.mark.parametrize(
    ("prompt", "remote"),
    [
        (Chat(SEEN), True),
        (Chat(TALK), False),
        (Chat([{"role": "user", "content": [{"type": "image", "image": "HTTPS://a.test/b.png"}]}]), True),
        (Chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]), False),
        ({"prompt": "", "multi_modal_data": {"image": ["a.png", "http://a.test/b.png"]}}, True),
        ({"prompt": "", "multi_modal_data": {"image": "a.png"}}, False),
        ({"prompt": "http://a.test/", "multi_modal_data": 1}, False),
        ("http://a.test/", False),
    ],
)
def test_a_prompt_says_whether_something_of_it_may_have_to_be_fetched(prompt: Any, remote: bool) -> None:
    assert names_remote(prompt) == remote


@pytest.mark.case(127)
@pytest.mark.parametrize("kind", ["text", "long", "slow", "template", "grammar"])
def test_a_client_waits_for_what_runs_and_not_for_all_that_another_sent(kind: str) -> None:
    """64 chats of 900 messages each held a short one for 2 s."""
    pools = Pools(HostTurns())
    pool: ThreadPoolExecutor = getattr(pools, kind)
    begun: list[str] = []
    ends = threading.Semaphore(0)

    def work(client: str) -> None:
        begun.append(client)
        assert ends.acquire(timeout=60)

    async def story() -> None:
        greedy = [asyncio.ensure_future(pools.run(pool, "greedy", work, "greedy")) for _ in range(30)]
        # As many as one client may have at a time: some threads of grammars are left to others.
        while len(begun) < (pool._max_workers - 2 if kind == "grammar" else pool._max_workers):
            await asyncio.sleep(0.001)
        other = asyncio.ensure_future(pools.run(pool, "other", work, "other"))
        for _ in range(10):
            await asyncio.sleep(0)
        ends.release(31)
        await other
        await asyncio.gather(*greedy)

    try:
        asyncio.run(story())
    finally:
        pools.close()
    # Those that run, and the one whose turn came before it.
    assert begun.index("other") <= pool._max_workers + 1
    assert len(begun) == 31
