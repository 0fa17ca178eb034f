"""What single families make of a prompt's text."""

from __future__ import annotations

import pytest

from beheld.core.errors import PromptError
from tests import tiny
from tests.inputs import pipes


def test_a_bare_marker_of_hunyuan_is_refused_with_the_whole_one() -> None:
    bare = tiny.wrap("hunyuan_vl", "<｜hy_place▁holder▁no▁102｜>What is it?")
    data = {"image": tiny.picture(84, 56, 1)}
    with pytest.raises(PromptError) as caught:
        pipes.shared("hunyuan_vl").prepare({"prompt": bare, "multi_modal_data": data}, pipes.ONE_TOKEN, request_id="0")
    assert tiny.markers("hunyuan_vl", 1) in str(caught.value)
