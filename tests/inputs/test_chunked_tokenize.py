"""Long texts: the ids of the whole, no lock held, and no further than what can be of use."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import beheld
from beheld.core.errors import PromptError, PromptTooLongError
from beheld.inputs.prompt.chunked_tokenize import ChunkedTokenizer
from beheld.inputs.prompt.special_tokens import PlainEncoder
from beheld.inputs.prompt.tokenizer import SHORT_TEXT, PromptTokenizer
from tests import tiny

MOTE = Path(beheld.__file__).parent / "mote"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GROUPS = r"\d{1,3}(?=(?:\d{3})*\b)"
WORDS = [
    *(
        "the",
        "quick",
        "den's",
        "don't",
        "caf\u00e9",
        "e\u0301t\u00e9",
        "12345678",
        "3.14",
        "a,b",
        "x.y",
        "$5",
        "--",
        "...",
    ),
    *("\u4f60\u597d\uff0c\u4e16\u754c\u3002\u6d4b", "\U0001f600", "\u200b\u200b", "\u0410\u0431\u0432", "\u305d"),
    *("\u1112\u1161\u11ab", "\u0e01\u0e34", "A", "B", "Cc", "dD", "Zq", "<eos>", "\u2581"),
]
GAPS = ["", " ", " ", " ", "  ", "\n", "\n\n", "\t", ", ", ".", "   \n"]


def text_of(rng: random.Random, words: int) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(GAPS) for _ in range(words))


def trained(normalizer: Any, split: Any, **model: Any) -> Any:
    """A tokenizer with merges of its own, so that ids depend on where words end."""
    found = Tokenizer(models.BPE(**model))
    if normalizer is not None:
        found.normalizer = normalizer
    if split is not None:
        found.pre_tokenizer = split
    alphabet = pre_tokenizers.ByteLevel.alphabet() if model == {} else ["\u2581"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False, special_tokens=["<eos>", "<unk>"]
    )
    rng = random.Random(1)
    found.train_from_iterator([text_of(rng, 12) for _ in range(200)], trainer)
    found.decoder = decoders.ByteLevel()
    return found


def split_by(*patterns: str) -> Any:
    from tokenizers import Regex

    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def no_word_inside(backend: Any) -> Any:
    """The tokenizer without tokens and merges that have a blank behind a letter, as Gemma's has none."""
    described = json.loads(backend.to_str())
    model = described["model"]
    bad = {token for token in model["vocab"] if "\u2581" in token.lstrip("\u2581")}
    kept = [token for token in model["vocab"] if token not in bad]
    model["vocab"] = {token: number for number, token in enumerate(kept)}
    model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)}.isdisjoint(bad)]
    return Tokenizer.from_str(json.dumps(described))


def unsplit() -> Any:
    return trained(normalizers.Replace(" ", "\u2581"), None, unk_token="<unk>", fuse_unk=True)


TOKENIZERS = {
    "qwen": lambda: trained(normalizers.NFC(), split_by(QWEN)),
    "llama3": lambda: trained(None, split_by(LLAMA3)),
    "o200k": lambda: trained(None, split_by(O200K)),
    "gpt2": lambda: trained(None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gemma": lambda: no_word_inside(unsplit()),
}
WHOLE = {
    "letters are left out": lambda: no_word_inside(trained(normalizers.Replace(" ", "\u2581"), None, dropout=None)),
    "blanks inside tokens": unsplit,
    "looks around": lambda: trained(None, split_by(GROUPS, QWEN)),
    "a blank is added": lambda: trained(None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "lower case": lambda: trained(normalizers.Lowercase(), split_by(QWEN)),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_the_whole_text(name: str) -> None:
    backend = TOKENIZERS[name]()
    stretches = ChunkedTokenizer(backend, size=40)
    assert stretches.cut is not None
    rng = random.Random(5)
    cuts = 0
    for _ in range(150):
        text = text_of(rng, 60)
        cuts += len(list(stretches._pieces(text))) - 1
        assert stretches.encode(text) == backend.encode(text, add_special_tokens=False).ids, text
    assert cuts > 300


@pytest.mark.parametrize("name", WHOLE)
def test_a_tokenizer_that_may_merge_over_a_cut_reads_the_whole(name: str) -> None:
    backend = WHOLE[name]()
    stretches = ChunkedTokenizer(backend, size=40)
    assert stretches.cut is None
    text = text_of(random.Random(6), 200)
    assert stretches.encode(text) == backend.encode(text, add_special_tokens=False).ids


def test_an_added_token_is_not_cut() -> None:
    backend = TOKENIZERS["qwen"]()
    backend.add_tokens(["over the"])
    assert ChunkedTokenizer(backend).cut is None


class Counting:
    """A tokenizer that adds up the letters it is shown."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.letters = 0

    def to_str(self) -> str:
        return str(self.inner.to_str())

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.letters += sum(map(len, texts))
        return self.inner.encode_batch_fast(texts, **options)


@pytest.mark.parametrize("what", ["x y", "\u200b", "7", "\U0001f600\u200d", "\u4f60\u597d\uff0c"], ids=ascii)
def test_what_cannot_fit_is_not_read_to_its_end(what: str) -> None:
    counting = Counting(TOKENIZERS["qwen"]())
    stretches = ChunkedTokenizer(counting, counting, size=1000)
    text = what * 100_000
    before = counting.letters
    with pytest.raises(PromptTooLongError, match="more than 500 tokens"):
        stretches.encode(text, 500)
    assert counting.letters - before < 20_000


def test_what_just_fits_is_read() -> None:
    stretches = ChunkedTokenizer(TOKENIZERS["qwen"](), size=50)
    for text in ("\u200b" * 5000, "a1 " * 3000, text_of(random.Random(2), 2000)):
        ids = stretches.encode(text)
        assert stretches.encode(text, len(ids)) == ids
        with pytest.raises(PromptTooLongError):
            stretches.encode(text, len(ids) - 1)


@pytest.fixture(scope="module", params=["mote", "qwen2_vl", "llava", "gemma3_text", "llama"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return AutoTokenizer.from_pretrained(str(MOTE if request.param == "mote" else tiny.checkpoint(request.param)))


def long_texts() -> Iterator[str]:
    rng = random.Random(7)
    while True:
        text = text_of(rng, 400)
        yield text * (SHORT_TEXT // len(text) + 2)


@pytest.mark.parametrize("special", [True, False])
def test_long_prompts_have_the_ids_of_the_checkpoints_own_tokenizer(tokenizer: Any, special: bool) -> None:
    own = PromptTokenizer(tokenizer, {})
    marks = tokenizer.all_special_tokens[:2]
    text = next(long_texts()) + "".join(marks) + " a b " + "".join(marks)
    assert own.encode(text, add_special_tokens=special) == tokenizer(text, add_special_tokens=special)["input_ids"]


def test_long_text_of_users_has_the_same_ids_whatever_its_length(tokenizer: Any) -> None:
    """As text: with a spelled control token, in the middle of a prompt and at its start."""
    own = PromptTokenizer(tokenizer, {})
    plain: PlainEncoder = own.plain()
    spelled = next(iter(own.control().ids), "<none>")
    text = next(long_texts())
    for first in (True, False):
        parts = [text, spelled, " and on"]
        whole = plain.backend.encode(("" if first else "\U0010fff0") + "".join(parts), add_special_tokens=False).ids[
            0 if first else 1 :
        ]
        if plain._ids.isdisjoint(whole):
            assert plain.encode(parts, first=first) == whole


def test_a_long_text_is_read_while_others_hold_the_lock(tokenizer: Any) -> None:
    own = PromptTokenizer(tokenizer, {})
    text = next(long_texts())
    expected = own.encode(text, add_special_tokens=True)
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(own._long().encode(text)))
    with own._lock:
        stretches = own._chunked
        assert stretches is not None
        thread = threading.Thread(target=lambda: found.append(stretches.encode(text)))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert expected[-len(found[0]) - len(own.ends()[1]) :][: len(found[0])] == found[0]


@pytest.mark.parametrize("end", [False, True])
def test_a_long_text_is_cut_where_its_ids_say_without_reading_all(
    tokenizer: Any, end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = PromptTokenizer(tokenizer, {})
    text, most = next(long_texts()) * 4, 300
    whole = own._own(tokenizer.backend_tokenizer).encode(text, add_special_tokens=False)
    expected = text[whole.offsets[-most][0] :] if end else text[: whole.offsets[most - 1][1]]
    read: list[int] = []

    class Noted:
        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            read.append(len(texts[0]))
            return tokenizer.backend_tokenizer.encode_batch(texts, **options)

    monkeypatch.setattr(own, "_own", lambda backend: Noted())
    assert own.cut(text, most, end=end) == expected
    assert own.cut("a b", most, end=end) == "a b"
    assert max(read) == SHORT_TEXT
    with pytest.raises(PromptError, match="surrogate"):
        own.cut("a \ud800", most, end=end)


def test_a_class_with_its_own_way_to_ids_keeps_it() -> None:
    """Where a checkpoint's class does more than its backend, a long text goes through the class as a short one does."""

    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _encode_plus(self, *args: Any, **options: Any) -> Any:
            found = super()._encode_plus(*args, **options)
            found["input_ids"] = [7, *found["input_ids"]]
            return found

    own = PromptTokenizer(Own(tokenizer_object=TOKENIZERS["qwen"]()), {})
    assert own.encode("a " * SHORT_TEXT, add_special_tokens=False)[0] == 7
