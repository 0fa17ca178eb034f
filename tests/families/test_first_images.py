"""Families whose processors write the image's place themselves: what is made of a prompt's text."""

from __future__ import annotations

from pathlib import Path

import pytest

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import PromptError
from beheld.families.git.inputs import rewrite as git
from beheld.families.idefics.inputs import rewrite as idefics
from beheld.families.kosmos2.inputs import rewrite as kosmos2
from beheld.inputs.pipeline import InputPipeline, RequestOrder
from tests import census_media, tiny
from tests.inputs import pipes

ONE, TWO = {"image": 1}, {"image": 2}
AROUND = "<fake_token_around_image>"


def test_an_image_comes_first() -> None:
    assert git("a dog", ONE) == git("[PAD]a dog", ONE) == "[PAD][CLS]a dog"
    assert git("a dog", {}) == "[CLS]a dog"
    assert kosmos2(" a dog", ONE) == kosmos2("<image></image> a dog", ONE) == "<s><image></image> a dog"
    assert kosmos2(" a dog", {}) == "<s>a dog"


def test_images_of_a_row_share_the_token_between_them() -> None:
    assert idefics("See: <image> <image> now", TWO) == f"<s>See:{AROUND}<image>{AROUND}<image>{AROUND}now"
    assert idefics(f"<s>See:{AROUND}<image>{AROUND}now", ONE) == f"<s>See:{AROUND}<image>{AROUND}now"
    assert idefics("no image", {}) == "<s>no image"


@pytest.mark.parametrize("as_ids", [False, True])
def test_an_image_before_an_end_is_refused(as_ids: bool, tmp_path: Path) -> None:
    """Transformers hides it from what follows the end."""
    census_media.make("idefics", census_media.RECIPES["idefics"], tmp_path)
    args = EngineArgs(model=str(tmp_path))
    info = read_info(tmp_path, args)
    pipe = InputPipeline(info, pipes.config(info), args)
    data = {"multi_modal_data": {"image": tiny.picture(84, 56, 1)}}
    for text, media in (("<image>a dog</s>a cat", data), ("a dog</s>a cat", {}), ("<image>a dog", data)):
        ids = pipe.tokenizer(idefics(text, {"image": len(media)}), add_special_tokens=False)["input_ids"]
        prompt = {"prompt_token_ids": ids} if as_ids else {"prompt": text}
        order = RequestOrder(prompt | media, pipes.ONE_TOKEN, request_id="0")
        if media and "</s>" in text:
            with pytest.raises(PromptError, match="cannot have the token '</s>': IDEFICS sees no image after it"):
                pipe.prepare(order)
        else:
            assert list(pipe.prepare(order).token_ids) == ids
    pipe.close()
