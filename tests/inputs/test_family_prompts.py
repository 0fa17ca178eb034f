"""What single families make of a prompt's text."""

from __future__ import annotations

import pytest

from beheld.core.errors import PromptError
from beheld.inputs.pipeline import RequestOrder
from tests import tiny
from tests.inputs import pipes


def test_a_bare_marker_of_hunyuan_is_refused_with_the_whole_one() -> None:
    bare = tiny.wrap("hunyuan_vl", "<｜hy_place▁holder▁no▁102｜>What is it?")
    data = {"image": tiny.picture(84, 56, 1)}
    with pytest.raises(PromptError) as caught:
        pipes.shared("hunyuan_vl").prepare(
            RequestOrder({"prompt": bare, "multi_modal_data": data}, pipes.ONE_TOKEN, request_id="0")
        )
    assert tiny.markers("hunyuan_vl", 1) in str(caught.value)


def test_ernie_reads_the_placeholders_of_its_own_code() -> None:
    data = {"image": tiny.picture(84, 56, 1)}
    written = tiny.wrap("ernie4_5_vl_moe", tiny.markers("ernie4_5_vl_moe", 1) + "Hi?")
    other = written.replace("<|IMAGE_PLACEHOLDER|>", "<|image@placeholder|>")
    assert other != written
    one, two = (
        pipes.shared("ernie4_5_vl_moe").prepare(
            RequestOrder({"prompt": prompt, "multi_modal_data": data}, pipes.ONE_TOKEN, request_id="0")
        )
        for prompt in (written, other)
    )
    assert one.token_ids == two.token_ids
    assert len(one.spans) == len(two.spans) == 1
