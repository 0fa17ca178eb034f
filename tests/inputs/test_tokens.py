"""Text to ids: as a call of the tokenizer gives them, whatever calls of others have left in it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import AutoTokenizer

from beheld.core.errors import ModelError
from beheld.core.media import MediaItem
from beheld.inputs.prompt import expand, tokenizer
from beheld.inputs.prompt.tokenizer import PromptTokenizer
from beheld.utils.gil import in_turn, take_turns
from tests import tiny

TEXTS = (
    "Hi",
    "",
    "What is  in this picture?\n",
    "naïve 你好 — 3.14 <|im_end|></s>",
    "a " * 300,
    "naïve 你好 </s> " * 40,
)


def of(family: str) -> PromptTokenizer:
    return PromptTokenizer(AutoTokenizer.from_pretrained(tiny.checkpoint(family)), {})


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "gemma3", "mistral3", "llava"])
def test_short_texts_have_the_ids_of_a_call(family: str, special: bool) -> None:
    made = of(family)
    assert tokenizer._usual(made.inner)
    for text in TEXTS:
        ids = made.inner(text, add_special_tokens=special, truncation=False)["input_ids"]
        assert made.encode(text, add_special_tokens=special) == ids


@pytest.mark.parametrize("left", [{"truncation": True, "max_length": 2}, {"padding": "max_length", "max_length": 400}])
def test_what_a_user_s_call_left_behind_changes_nothing(left: dict[str, object]) -> None:
    made = of("qwen2_5_vl")
    wanted = [made.encode(text, add_special_tokens=True) for text in TEXTS]
    made.inner("some text of theirs", **left)
    assert not tokenizer._unset(made.inner.backend_tokenizer)
    assert [made.encode(text, add_special_tokens=True) for text in TEXTS] == wanted


def test_one_that_splits_special_tokens_does_so() -> None:
    made = of("qwen2_5_vl")
    whole = made.encode("<|im_end|>", add_special_tokens=False)
    made.inner.split_special_tokens = True
    assert len(whole) == 1
    assert len(made.encode("<|im_end|>", add_special_tokens=False)) > 1
    made.inner.split_special_tokens = False
    assert made.encode("<|im_end|>", add_special_tokens=False) == whole


CALLS: list[dict[str, Any]] = [
    {"truncation": True, "max_length": 2},
    {"padding": "max_length", "max_length": 200},
    {"split_special_tokens": True},
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: next(iter(call)))
@pytest.mark.parametrize("undone", [False, True])
def test_a_user_s_call_in_between_changes_nothing(
    call: dict[str, Any], undone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another thread, just before a text is tokenized; afterwards the tokenizer may be as it came."""
    made = of("qwen2_5_vl")
    made.inner.pad_token = made.inner.pad_token or made.inner.eos_token
    wanted = [made.encode(text, add_special_tokens=True) for text in TEXTS]
    encoded = tokenizer._encoded

    def late(backend: Any, text: str, add_special_tokens: bool) -> list[int]:
        theirs = made.share()
        theirs("some text of theirs", **call)
        found = encoded(backend, text, add_special_tokens)
        if undone:
            theirs("another")
        return found

    monkeypatch.setattr(tokenizer, "_encoded", late)
    assert [made.encode(text, add_special_tokens=True) for text in TEXTS] == wanted


@pytest.mark.parametrize("call", CALLS, ids=lambda call: next(iter(call)))
def test_a_user_s_threads_change_nothing(call: dict[str, Any]) -> None:
    made = of("qwen2_5_vl")
    theirs = made.share()
    theirs.pad_token = theirs.pad_token or theirs.eos_token
    wanted, done = [made.encode(text, add_special_tokens=True) for text in TEXTS], threading.Event()

    def user() -> None:
        while not done.is_set():
            theirs("some text of theirs that is longer than that", **call)
            theirs("another")

    threads = [threading.Thread(target=user) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        found = {tuple(made.encode(text, add_special_tokens=True)) for _ in range(300) for text in TEXTS}
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert found == {tuple(ids) for ids in wanted}


def test_tokens_that_a_user_adds_are_known() -> None:
    made = of("qwen2_5_vl")
    before = made.encode("a<mine>b", add_special_tokens=False)
    made.share().add_tokens(["<mine>"])
    after = made.encode("a<mine>b", add_special_tokens=False)
    assert len(after) == 3 < len(before)
    assert after == made.inner("a<mine>b", add_special_tokens=False)["input_ids"]


def test_waiting_for_the_lock_holds_up_nobody_s_turn() -> None:
    """A tokenizer that must be called goes through its lock, whose holder has no turn."""
    made = of("qwen2_5_vl")
    made.inner.split_special_tokens = True
    with ThreadPoolExecutor(8, initializer=take_turns) as threads:

        def work(number: int) -> list[int]:
            with in_turn():
                return made.encode(TEXTS[number % len(TEXTS)] * 3, add_special_tokens=True)

        found = [future.result(60) for future in [threads.submit(work, number) for number in range(200)]]
    assert found == [made.encode(TEXTS[n % len(TEXTS)] * 3, add_special_tokens=True) for n in range(200)]


def item(*ids: int) -> MediaItem:
    return MediaItem("image", b"", {}, {}, ids, None, len(ids), lead="a", tail="b")


PLACES = {"image": (1, 2, 3), "video": (4,)}


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_place_may_be_several_ids_in_a_row(kind: Any) -> None:
    """Its ids alone, or in another order, are text."""
    ids = kind([1, 2, 1, 2, 3, 3, 4, 2, 1, 1, 2, 3, 1])
    assert expand.find_places(ids, PLACES) == [("image", 2, 5), ("video", 6, 7), ("image", 9, 12)]
    assert expand.count_placeholders(ids, PLACES) == {"image": 2, "video": 1}
    assert expand.count_placeholders([1, 2, 4, 3, 1], PLACES) == {"video": 1}
    made, spans = expand.expand(ids, {"image": [item(7, 8), item(9)], "video": [item(5, 5)]}, PLACES)
    assert made == (1, 2, 7, 8, 3, 5, 5, 2, 1, 9, 1)
    assert [(span.start, span.stop) for span in spans] == [(2, 4), (5, 7), (9, 10)]
    edged = expand.edged_ids(ids[:6], {"image": [item(7)], "video": []}, PLACES, lambda text: [ord(text)])
    assert edged == [1, 2, 97, 1, 2, 3, 98, 3]


def test_places_without_a_tokenizer() -> None:
    """The checkpoint's files say which ids they are; one token that they do not know leaves the placeholder's."""
    known = {"<a>": 5, "<b>": 6}
    places = {"image": ("<a>", "<b>"), "video": "<c>"}
    made = PromptTokenizer(None, {"image": 1, "video": 2}, places, added=known)
    assert made.places == {"image": (5, 6), "video": (2,)}
    assert made.placeholder("image") == "token 5 6"
    with pytest.raises(ModelError, match="lacks one of <a> <b>"):
        PromptTokenizer(None, {"image": 1}, places, added={"<a>": 5})
