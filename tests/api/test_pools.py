"""What strangers' templates wait for, nobody else's text waits for."""

from __future__ import annotations

import pytest

from beheld.api.pools import Pools
from beheld.core.request import ForeignTemplate
from beheld.inputs.pipeline import Chat

TALK = [{"role": "user", "content": "Hello."}]
SEEN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a.test/"}}]}]


@pytest.mark.case(105)
def test_strangers_templates_have_threads_of_their_own() -> None:
    """Four that loop held plain text for 3 to 6 s."""
    pools = Pools()
    try:
        foreign = ForeignTemplate("{{ messages }}")
        for talk in (TALK, SEEN):
            assert pools.of_reading(Chat(talk, chat_template=foreign), None) is pools.template
            assert pools.of_reading(Chat(talk, chat_template="{{ messages }}"), None) is pools.of(Chat(talk), None)
        assert pools.of_reading("Hello.", None) is pools.text
    finally:
        pools.close()
