"""Increments add up to the full text, for every kind of tokenizer and any tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beheld.text.detokenize import Detokenizer, token_bytes, token_text
from tests.text import tokenizers_small as small

KINDS = [small.byte_level, small.llama, small.metaspace, small.word_pieces, small.cleaned_word_pieces]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(list("ab .,'!?nt0123456789\n\t")),
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(["é", "e\u0301", "絵", "👩\u200d👩\u200d👧", "🇩🇪", "\ufffd", "\u200b", "ß"]),
    ),
    max_size=40,
).map("".join)


def increments(tokenizer: Any, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def in_groups(tokenizer: Any, ids: list[int], size: int, *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    groups = [ids[first : first + size] for first in range(0, len(ids), size)]
    return [*(detokenizer.push(*group) for group in groups), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_encoded_text_comes_back_in_pieces(kind: Callable[[], Any], text: str) -> None:
    tokenizer = kind()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(increments(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_come_back_in_pieces(kind: Callable[[], Any], skip: bool, data: st.DataObject) -> None:
    """Models may write anything: halves of characters, specials in the middle, bytes that are no text."""
    tokenizer = kind()
    anything = st.integers(0, len(tokenizer) - 1)
    specials = st.sampled_from(tokenizer.convert_tokens_to_ids([*small.SPECIALS, "<tool>"]))
    ids = data.draw(st.lists(st.one_of(anything, anything, specials), max_size=30))
    want = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(increments(tokenizer, ids, skip=skip)) == want
    assert "".join(in_groups(tokenizer, ids, data.draw(st.integers(1, 9)), skip=skip)) == want


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.sampled_from([*" ab'.ntv", " n't", " 've", " 're", " 's", " ' ", " ,", "'t"]), max_size=20).map(
        "".join
    ),
    data=st.data(),
)
def test_cleaning_in_pieces_is_cleaning_at_once(text: str, data: st.DataObject) -> None:
    from beheld.text.detokenize import _Cleaner

    clean = small.cleaned_word_pieces().clean_up_tokenization
    cleaner = _Cleaner(clean)
    pieces = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(cleaner.push(rest[:size]))
        rest = rest[size:]
    assert "".join([*pieces, cleaner.finish()]) == clean(text)


@pytest.mark.parametrize("kind", [small.byte_level, small.llama, small.metaspace], ids=lambda kind: kind.__name__)
def test_a_character_is_shown_only_when_whole(kind: Callable[[], Any]) -> None:
    tokenizer = kind()
    text = "A 👩\u200d👧 and 絵 é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = increments(tokenizer, ids)
    assert len(ids) > len(text) / 2
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    tokenizer = small.byte_level()
    ids = tokenizer.encode("The first image shows", add_special_tokens=False)
    pieces = increments(tokenizer, ids)
    assert pieces == [*(tokenizer.decode([token_id]) for token_id in ids), ""]


def test_endless_broken_bytes_do_not_hold_the_text_back() -> None:
    tokenizer = small.byte_level()
    lone = tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(tokenizer.encode("é"))[1][-1])
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push(lone) for _ in range(20))
    assert len(shown) == 16
    assert len(shown + detokenizer.finish()) == 20


@pytest.mark.parametrize("kind", [small.byte_level, small.llama, small.metaspace], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("text", ["10. The tenth image", "The content of each image:\n9. A cat.\n10. The tenth image"])
def test_numbers_and_full_stops_keep_together(kind: Callable[[], Any], text: str) -> None:
    """Not "1 0 . The tenth image": no spaces between tokens that have none."""
    tokenizer = kind()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(increments(tokenizer, ids, skip=False)) == tokenizer.decode(ids) == text


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = small.llama()
    ids = tokenizer.encode("red circle", add_special_tokens=False)
    eos = tokenizer.eos_token_id
    assert "".join(increments(tokenizer, [*ids, eos, *ids])) == "red circle red circle"
    assert "".join(increments(tokenizer, [*ids, eos], skip=False)) == "red circle</s>"
    assert "".join(increments(tokenizer, [eos, *ids, eos])) == "red circle"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_marks_are_shown_where_they_come_first(kind: Callable[[], Any], data: st.DataObject) -> None:
    """They are special tokens like the others, which are skipped: later ones are, too."""
    tokenizer = kind()
    specials = tokenizer.convert_tokens_to_ids(list(small.SPECIALS))
    ids = data.draw(st.lists(st.one_of(st.integers(0, len(tokenizer) - 1), st.sampled_from(specials)), max_size=30))
    mark = data.draw(st.sampled_from(specials))
    detokenizer = Detokenizer(tokenizer, marks=[tokenizer.convert_ids_to_tokens(mark), "unknown"])
    found = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
    first = ids.index(mark) if mark in ids else len(ids)
    skipped = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    left = [token for place, token in enumerate(ids) if token not in skipped or place == first]
    assert found == tokenizer.decode(left, skip_special_tokens=False)


def test_text_of_one_token() -> None:
    tokenizer = small.byte_level()
    (token_id,) = tokenizer.encode(" image", add_special_tokens=False)
    assert token_text(tokenizer, token_id) == " image"
    assert token_text(tokenizer, tokenizer.eos_token_id) == "</s>"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_text_of_each_token_is_what_the_tokenizer_says(kind: Callable[[], Any]) -> None:
    tokenizer = kind()
    for token_id in range(len(tokenizer)):
        assert token_text(tokenizer, token_id) == tokenizer.decode([token_id], clean_up_tokenization_spaces=False)


class StrippingTokenizer:
    """Decodes as slow sentencepiece tokenizers do: spaces at both ends are lost, and so are the ids that it skips."""

    texts = ("<pad>", "red", " ", " blue", "\n", "green")

    def get_vocab(self) -> dict[str, int]:
        return {text: token_id for token_id, text in enumerate(self.texts)}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.texts[i] for i in ids if i or not skip_special_tokens).strip()


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 5), max_size=12), skip=st.booleans())
def test_a_decoder_that_strips_its_ends(ids: list[int], skip: bool) -> None:
    tokenizer = StrippingTokenizer()
    assert "".join(increments(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", [small.byte_level, small.llama], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("text", ["絵", "👩", "é\u0301", "\x80", "a"])
def test_bytes_of_tokens_are_their_own(kind: Callable[[], Any], text: str) -> None:
    tokenizer = kind()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(token_bytes(tokenizer, token_id) for token_id in ids).strip() == text.encode()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_ids_beyond_the_vocabulary_have_no_text_and_cost_nothing(
    kind: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's vocabulary is often padded; each such id, kept, would be decoded again with every later token."""
    tokenizer = kind()
    ids = tokenizer.encode("two words", add_special_tokens=False)
    beyond = [max(tokenizer.get_vocab().values()) + 1, 1 << 20]
    detokenizer = Detokenizer(tokenizer)
    shown = detokenizer.push(*ids[:1], *beyond * 500)
    decoded: list[int] = []
    decode = detokenizer._decode
    monkeypatch.setattr(detokenizer, "_decode", lambda window: decoded.append(len(window)) or decode(window))
    shown += "".join(detokenizer.push(token_id) for token_id in [*beyond * 500, *ids[1:]])
    assert shown + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=True)
    assert max(decoded, default=0) <= len(ids)
