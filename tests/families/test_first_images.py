"""Families whose processors write the image's place themselves: what is made of a prompt's text."""

from __future__ import annotations

import pytest

from beheld.core.errors import PlaceholderError
from beheld.families.git.inputs import rewrite as git
from beheld.families.idefics.inputs import rewrite as idefics
from beheld.families.kosmos2.inputs import rewrite as kosmos2

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


def test_an_image_before_an_end_is_refused() -> None:
    """Transformers hides it from what follows the end."""
    with pytest.raises(PlaceholderError, match="does not see after that token"):
        idefics("<image>a dog</s>a cat", ONE)
    assert idefics("a dog</s>a cat", {}) == "<s>a dog</s>a cat"
