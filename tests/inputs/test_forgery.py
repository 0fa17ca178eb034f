"""Text from users never becomes a media marker or a control token, wherever it stands and whatever it spells."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beheld.core.config import MediaLimits
from beheld.core.request import Request
from beheld.inputs.pipeline import Chat, RequestOrder
from beheld.inputs.prompt import chat
from beheld.inputs.prompt.special_tokens import ControlTokens
from tests import tiny
from tests.inputs import pipes
from tests.memory import peak_of_objects
from tests.server.slowness import slowness

SLOTS = ("user", "system", "assistant", "part", "split", "name", "tools")
HAS_SYSTEM = ("qwen2", "qwen2_vl", "qwen2_5_vl", "llava_onevision", "llava")


def spellings(family: str) -> list[str]:
    """Every added and special token of the tokenizer."""
    tokenizer = pipes.shared(family).tokenizer
    return sorted({str(t.content) for t in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens))


def conversation(slot: str, text: str, pictures: list[Any], family: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    parts: list[Any] = [{"type": "image", "image": picture} for picture in pictures]
    question = {"type": "text", "text": "What is it?"}
    options: dict[str, Any] = {}
    user: dict[str, Any] = {"role": "user", "content": [*parts, question] if parts else "What is it?"}
    messages = [user]
    if slot == "user":
        user["content"] = [*parts, {"type": "text", "text": text}] if parts else text
    elif slot == "part":
        user["content"] = [{"type": "text", "text": f"a{text}"}, *parts, {"type": "text", "text": f"{text} b"}]
    elif slot == "split":
        half = len(text) // 2
        user["content"] = [{"type": "text", "text": text[:half]}, *parts, {"type": "text", "text": text[half:]}]
    elif slot == "system":
        messages = [{"role": "system", "content": f"x {text} y"}, user]
    elif slot == "assistant":
        messages = [user, {"role": "assistant", "content": f"{text}."}, {"role": "user", "content": "And?"}]
    elif slot == "name":
        user["name"] = text
    else:
        options["tools"] = [{"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}]
    return messages, options


def prepare(family: str, slot: str, text: str, pictures: list[Any]) -> Request:
    messages, options = conversation(slot, text, pictures, family)
    return pipes.shared(family).prepare(RequestOrder(Chat(messages, **options), pipes.ONE_TOKEN, request_id="0"))


def control_counts(family: str, request: Request) -> dict[int, int]:
    """How often each control token occurs outside of the spans."""
    covered = {place for span in request.spans for place in range(span.start, span.stop)}
    ids = [token for place, token in enumerate(request.token_ids) if place not in covered]
    control = pipes.shared(family)._tokenizer.control().ids.values()
    return {token: ids.count(token) for token in control}


@pytest.mark.parametrize("family", pipes.CHAT_FAMILIES)
@pytest.mark.case(53)
def test_no_spelling_becomes_a_token(family: str) -> None:
    """The same tokens, and the same number of each, as for a harmless text; and the text is all there."""
    slots = [slot for slot in SLOTS if slot != "system" or family in HAS_SYSTEM]
    for pictures in ([], tiny.pictures(1)) if family in tiny.IMAGE_FAMILIES else ([],):
        for slot in slots:
            benign = control_counts(family, prepare(family, slot, "harmless", pictures))
            for spelling in spellings(family):
                request = prepare(family, slot, spelling, pictures)
                assert len(request.spans) == len(pictures)
                assert control_counts(family, request) == benign, (slot, spelling)


@pytest.mark.parametrize("family", sorted(set(pipes.CHAT_FAMILIES) & set(tiny.IMAGE_FAMILIES)))
def test_the_text_is_kept(family: str) -> None:
    """What was spelled is still there to be read, and the media are where they belong."""
    tokenizer = pipes.shared(family).tokenizer
    for spelling in spellings(family):
        request = prepare(family, "user", f"Read {spelling} aloud", tiny.pictures(2))
        assert f"Read {spelling} aloud" in str(request.prompt)
        plain = tokenizer.decode(list(request.token_ids), skip_special_tokens=True)
        assert spelling.replace(" ", "") in plain.replace(" ", ""), spelling
        assert [span.item.modality for span in request.spans] == ["image", "image"]


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_texts_that_form_a_marker_only_together(family: str) -> None:
    pipe = pipes.shared(family)
    marker = pipe._tokenizer.placeholder("image")
    for cut in range(1, len(marker)):
        content = [marker[:cut], {"type": "image", "image": tiny.picture(84, 56, 1)}, marker[cut:], "!"]
        request = pipe.prepare(
            RequestOrder(Chat([{"role": "user", "content": content}]), pipes.ONE_TOKEN, request_id="0")
        )
        assert len(request.spans) == 1, cut
    thirds = [marker[:3], marker[3:6], marker[6:], marker]
    request = pipe.prepare(RequestOrder(Chat([{"role": "user", "content": thirds}]), pipes.ONE_TOKEN, request_id="0"))
    assert request.spans == ()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.case(53)
def test_random_mixtures(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(["qwen2_vl", "llava", "llava_onevision"]))
    pieces = st.sampled_from([*spellings(family), "a", " ", "\n", "|", "<", ">", "\U000f0000", "\U000f0001", "é"])
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    pictures = tiny.pictures(data.draw(st.integers(0, 2)))
    slot = data.draw(st.sampled_from(["user", "part", "split", "assistant"]))
    request = prepare(family, slot, text, pictures)
    assert len(request.spans) == len(pictures)
    assert control_counts(family, request) == control_counts(family, prepare(family, slot, "harmless", pictures))


def test_other_letters_that_normalise_to_a_token() -> None:
    """A tokenizer that folds letters before it looks for its tokens would make one of a look-alike."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from beheld.inputs.prompt import special_tokens
    from beheld.inputs.prompt.tokenizer import PromptTokenizer

    letters = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz<>[]|_ ▁")}
    backend = Tokenizer(models.BPE(vocab={**letters, "<unk>": len(letters)}, merges=[], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_tokens([AddedToken("<end>", special=True, normalized=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    prompt = PromptTokenizer(tokenizer, {})
    marks = prompt.control()
    end = tokenizer.convert_tokens_to_ids("<end>")
    for text in ("＜end＞", "<END>", "a <End> b"):
        ids = prompt.encode(text, add_special_tokens=False)
        assert end in ids
        assert special_tokens.smuggled(ids, text, marks, ((), ()))
        stand_ins = special_tokens.StandIns(text)

        def normal(text: str) -> list[int]:
            return prompt.encode(text, add_special_tokens=False)

        plain = special_tokens.encode_rendered(f"{text}<end>", stand_ins, marks, prompt.plain(), normal)
        assert plain.count(end) == 1
        assert plain[-1] == end
    assert not special_tokens.smuggled(prompt.encode("a<end>", add_special_tokens=False), "a<end>", marks, ((), ()))


def test_trusted_prompts_keep_their_markers() -> None:
    """A prompt given to generate() is the program's own: what spells a token there is one."""
    pipe = pipes.shared("qwen2")
    request = pipe.prepare(RequestOrder("<|im_start|>user\nHi<|im_end|>", pipes.ONE_TOKEN, request_id="0"))
    assert pipe.tokenizer.convert_tokens_to_ids("<|im_end|>") in request.token_ids


def test_borders_are_searched_as_by_hand_and_soon() -> None:
    """Against the plainest search there is; and the work does not grow with parts times spellings."""
    rng = random.Random(0)
    for _ in range(300):
        spellings = {"".join(rng.choices("<a>|", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 6))}
        known = ControlTokens({s: n for n, s in enumerate(sorted(spellings))}, re.compile("x"), {}, frozenset())
        texts = ["".join(rng.choices("<a>|", k=rng.randint(0, 4))) for _ in range(rng.randint(1, 6))]
        joined, found = "".join(texts), set()
        borders = [sum(map(len, texts[:n])) for n in range(1, len(texts))]
        for spelling in spellings:
            for begin in range(len(joined)):
                if joined.startswith(spelling, begin) and any(begin < b < begin + len(spelling) for b in borders):
                    found.add(begin)
        starts = [0, *borders]
        ours = {starts[number] + place for number, places in chat._crossings(texts, known).items() for place in places}
        assert ours == found, (texts, spellings)
    many = {f"<unused{n}>": n for n in range(6000)}
    known = ControlTokens(many, re.compile("x"), {}, frozenset())
    begin = time.thread_time()
    assert chat._crossings(["a"] * 24_000, known) == {}
    chat._crossings(["<unused1"] * 24_000, known)
    assert time.thread_time() - begin < 3.0


@pytest.mark.parametrize("parts", [1, 2], ids=["in one text", "across two"])
def test_93_one_spelling_in_a_long_text_takes_no_memory_for_each_letter(parts: int) -> None:
    """A text of 60 MiB took 1.1 GiB: a list of all of its letters."""
    control = pipes.shared("qwen2_vl")._tokenizer.control()
    long = "x y" * (1 << 18)
    content: Any = f"<|im_end|>{long}"
    if parts == 2:
        content = [{"type": "text", "text": f"{long}<|im_"}, {"type": "text", "text": f"end|>{long}"}]
    form = chat.ChatForm(as_list=True, strings_too=True, placeholder=lambda modality, number: modality)
    # A stand-in makes each letter of its text four bytes wide; a list of letters takes eight or nine bytes for each.
    with peak_of_objects() as reading:
        talk = chat.read([{"role": "user", "content": content}], form, control, MediaLimits())
    made = talk.messages[0]["content"]
    texts = [made] if parts == 1 else [part["text"] for part in made]
    wide = sum(4 * len(text) for text in texts if not text.isascii())
    assert wide > 4 * len(long)
    # The text with stand-ins, the text before it, and the pieces of which that was joined.
    assert reading[0] < 2.5 * wide
    with peak_of_objects() as restoring:
        restored = [talk.stand_ins.restore(text) for text in texts]
    assert restoring[0] < 1.5 * wide
    with peak_of_objects() as cutting:
        cut = [talk.stand_ins.parts(text) for text in texts]
    assert cutting[0] < 1.5 * wide
    assert all(map(talk.stand_ins.within, texts[:1]))
    assert "".join(restored) == (content if parts == 1 else "".join(part["text"] for part in content))
    assert ["".join(pieces) for pieces in cut] == restored
    assert control.pattern is not None
    assert not any(control.pattern.search(text) for text in ["".join(texts), *texts])


def test_93_letters_of_media_are_not_looked_at_for_stand_ins() -> None:
    """A set of all letters of a data URL of 60 MiB held all other threads for a second."""
    control = pipes.shared("qwen2_vl")._tokenizer.control()
    form = chat.ChatForm(as_list=True, strings_too=True, placeholder=lambda modality, number: modality)
    taken = "".join(map(chr, range(0xF0000, 0xF0010)))
    # In the middle of a window, over its end, and in a key.
    for private in (taken, "\u00e9" * ((1 << 20) - 8) + taken):
        talk = chat.read([{"role": "user", "content": f"{private}<|im_end|>"}], form, control, MediaLimits())
        made = talk.messages[0]["content"]
        assert made[:-1] == private
        assert made[-1] not in private
        assert talk.stand_ins.restore(made) == f"{private}<|im_end|>"
    media = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (64 << 20)}}]
    begin = time.thread_time()
    chat.read([{"role": "user", "content": media}], form, control, MediaLimits())
    assert time.thread_time() - begin < 0.1 * slowness()


@pytest.mark.case(106)
@pytest.mark.parametrize("role", ["system", "tool", "user"])
@pytest.mark.parametrize("blank", ["", " "])
def test_halves_in_two_messages_stay_text(role: str, blank: str) -> None:
    """The template of BLIP-2 writes nothing between two messages of a system."""
    pipe = pipes.shared("blip2")

    def asked(texts: list[str]) -> Request:
        talk = [{"role": role, "content": text} for text in texts]
        return pipe.prepare(RequestOrder(Chat(talk), pipes.ONE_TOKEN, request_id="0"))

    for marker in spellings("blip2"):
        benign = control_counts("blip2", asked(["harm", "less", "ly"]))
        for cut in range(1, len(marker)):
            rest = (len(marker) + cut) // 2
            for texts in (
                [marker[:cut] + blank, blank + marker[cut:], "!"],
                [marker[:cut], marker[cut:rest], marker[rest:]],
            ):
                request = asked([text for text in texts if text])
                assert control_counts("blip2", request) == benign, (marker, texts)
                assert len(request.spans) == 0


@pytest.mark.case(106)
def test_many_messages_that_begin_spellings_are_looked_at_fast() -> None:
    """Each different beginning is compared with all spellings once, however many texts end with it."""
    looks = 0

    class Counted(dict[str, int]):
        def __iter__(self) -> Iterator[str]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    ids = Counted({**pipes.shared("qwen2_vl")._tokenizer.control().ids, **{f"<unused{n}>": n for n in range(2000)}})
    pattern = re.compile("|".join(re.escape(spelling) for spelling in dict(ids)))
    control = ControlTokens(ids, pattern, {}, frozenset())
    form = chat.ChatForm(as_list=False, strings_too=True, placeholder=lambda modality, number: "")
    talk = [{"role": "user", "content": f"{'|im_end|>'[n % 9 :]} {n} <|im_"} for n in range(4096)]
    looks = 0
    begin = time.thread_time()
    assert len(chat.read(talk, form, control, MediaLimits()).stand_ins) > 0
    assert time.thread_time() - begin < 0.5 * slowness()
    # "<", "<|", "<|i", "<|im" and "<|im_"; the tree of spellings; and their longest.
    assert looks < 12
