"""The entries of a GGUF file with a checkpoint's tokenizer: the other way than tokenizer.py.

Whether a file says all of a tokenizer is found by reading it back: `differences` compares ids of many texts.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from beheld.checkpoint.gguf.config import END_ENTRIES
from beheld.checkpoint.gguf.tokenizer import (
    BYTE,
    BYTE_LEVEL,
    CONTROL,
    NORMAL,
    PREFIX,
    ROLES,
    SENTENCEPIECE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORDS,
    WordRule,
    cutting,
)
from beheld.core.errors import ModelError

_REMEDY = "Convert the checkpoint with llama.cpp's convert_hf_to_gguf.py."
_TEMPLATE = "tokenizer.chat_template"
# Texts at which rules for cutting words differ.
_TEXTS = (
    "Hello  world,   12345 and 6.7!\n\n\tdon't WE'RE they'LL I'm   ",
    " leading and trailing \n \n\n x\r\n\r\ny\t\tz",
    "3 30 303 3030 1234567890 ٣٤ १२ ⅷ½²",
    "naïve café Ωμέγα Привет мир שלום مرحبا नमस्ते 漢字かな交じり 한국어 ไทย ∞ ﬁ",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",
    "camelCase HTMLParser snake_case __init__ a.b(c)[d]{e} // 'x' \"y\" ...!!! --flag=/usr/bin $€£ #tag @me",
    "e\u0301 a\u0308\u0323 \u00e9 \u1112\u1161\u11ab",
    "x",
    "",
    " ",
)
# Characters of a text that messages show.
_SHOWN = 40
# Pairs of tokens whose joined texts are read.
_PAIRS = 4000


class Difference(NamedTuple):
    """A text that is read otherwise.

    Attributes:
        text: it.
        meant, found: ids of the checkpoint's tokenizer and the file's.
        edge: whether it holds a token that is read whole, or begins with a space and the tokenizer is sentencepiece's:
            there the libraries differ by themselves. Tokens that are read whole are the same.
    """

    text: str
    meant: list[int]
    found: list[int]
    edge: bool

    def __str__(self) -> str:
        """Return what is read, from the first token that differs."""
        pairs = itertools.zip_longest(self.meant, self.found)
        same = next(place for place, (one, other) in enumerate(pairs) if one != other)
        meant, found = (_few(ids[same:]) for ids in (self.meant, self.found))
        return f"after {same} tokens of {self.text[:_SHOWN]!r} come {found}, not {meant}"


def tokenizer_entries(tokenizer: Any, rows: int, ends: Collection[int]) -> dict[str, Any]:
    """Return the entries of a tokenizer of transformers.

    Args:
        tokenizer: of the checkpoint.
        rows: of the embeddings; the file names a token for each.
        ends: ids of the tokens that end an answer.

    Raises:
        ModelError: files do not hold such a tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("Only tokenizers of the library tokenizers are written into GGUF files.", _REMEDY)
    raw = json.loads(backend.to_str())
    model = raw["model"]
    if model["type"] != "BPE":
        raise ModelError(
            f"A tokenizer of the kind {model['type']!r} is not written into a GGUF file, only BPE.", _REMEDY
        )
    added = {token["content"]: token for token in raw["added_tokens"]}
    ids = {**model["vocab"], **{content: token["id"] for content, token in added.items()}}
    # A token without a row stands for an embedding of a vision part.
    tokens = {index: token for token, index in ids.items() if index < rows}
    unknown = model.get("unk_token")
    kinds = {index: _kind(token, added, unknown, bool(model.get("byte_fallback"))) for index, token in tokens.items()}
    said: dict[str, Any] = {
        "tokens": [tokens.get(index, f"[PAD{index}]") for index in range(rows)],
        "token_type": [kinds.get(index, UNUSED) for index in range(rows)],
    }
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        said |= {
            "model": SENTENCEPIECE,
            "scores": _scores(said["tokens"], merges),
            "add_space_prefix": _begins_with_space(raw),
        }
    else:
        said |= {"model": BYTE_LEVEL, "pre": rule_name(backend, bool(model.get("ignore_merges")))}
        said["merges"] = [" ".join(merge) for merge in merges]
    said |= _ends(tokenizer, rows, ends)
    return {PREFIX + name: value for name, value in said.items()} | _templates(tokenizer)


def differences(tokenizer: Any, written: str) -> Iterator[Difference]:
    """Yield texts that a file's tokenizer reads otherwise than the checkpoint's.

    Args:
        tokenizer: the checkpoint's, of transformers.
        written: the tokenizer.json that is made of the file.
    """
    from tokenizers import Tokenizer

    own, back = tokenizer.backend_tokenizer, Tokenizer.from_str(written)
    known = back.get_vocab()
    added = own.get_added_tokens_decoder()
    marks = {token.content for token in added.values()}
    words = sorted(own.get_vocab().items(), key=lambda item: item[1])
    spelled = [own.decode([index], skip_special_tokens=False) for token, index in words if token not in marks]
    prefixed = bool(json.loads(written)["model"].get("byte_fallback"))
    chance = random.Random(0)
    pairs = ["".join(chance.choices(spelled, k=2)) for _ in range(_PAIRS)] if spelled else []
    # There may be thousands of these tokens, so only some are tried, each between other text.
    kept = [mark for mark in sorted(marks) if mark in known]
    marked = [
        f"{before}{mark}{after}" for mark in kept[:64] for before, after in (("a", "b"), ("a ", " b"), ("", "\n"))
    ]
    for texts, is_marked in (((*_TEXTS, *spelled, *pairs), False), (marked, True)):
        for special in (True, False):
            meant, found = (each.encode_batch(list(texts), add_special_tokens=special) for each in (own, back))
            for text, one, other in zip(texts, meant, found, strict=True):
                if one.ids != other.ids:
                    whole = [[index for index in each.ids if index in added] for each in (one, other)]
                    edge = is_marked or (prefixed and text.startswith(" "))
                    yield Difference(text, one.ids, other.ids, edge and whole[0] == whole[1])


def _few(ids: list[int]) -> str:
    shown = [*map(str, ids[:3]), *(["..."] if len(ids) > 3 else [])]
    return ", ".join(shown) or "nothing"


def _kind(token: str, added: Mapping[str, Any], unknown: str | None, has_bytes: bool) -> int:
    if token == unknown:
        return UNKNOWN
    if token in added:
        return CONTROL if added[token]["special"] else USER_DEFINED
    return BYTE if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">") else NORMAL


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """Return a score for each token: what is merged first has the highest."""
    ranks: dict[str, int] = {}
    for merge in merges:
        ranks.setdefault("".join(merge), len(ranks))
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _begins_with_space(raw: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer like sentencepiece's puts a space before a text."""
    parts = [raw.get("normalizer") or {}, raw.get("pre_tokenizer") or {}]
    steps = [step for part in parts for step in (part, *part.get("normalizers", ()), *part.get("pretokenizers", ()))]
    return any(step.get("type") == "Prepend" or step.get("prepend_scheme") in ("first", "always") for step in steps)


def rule_name(backend: Any, whole: bool) -> str:
    """Return the files' name of the rule by which byte-level BPE cuts a text into words.

    Raises:
        ModelError: files have no name for it.
    """
    distinct: dict[WordRule, str] = {}
    for name, rule in WORDS.items():
        distinct.setdefault(rule, name)
    meant = _cut(backend.normalizer, backend.pre_tokenizer)
    fitting = [rule for rule in distinct if _cut(*cutting(rule)) == meant]
    if not fitting:
        raise ModelError(
            "The checkpoint's tokenizer cuts text into words by a rule that is not written into GGUF files; known are "
            f"those of {', '.join(distinct.values())}.",
            _REMEDY,
        )
    return distinct[min(fitting, key=lambda rule: rule.whole != whole)]


def _cut(normalizer: Any, pre_tokenizer: Any) -> list[list[str]]:
    texts = _TEXTS if normalizer is None else [normalizer.normalize_str(text) for text in _TEXTS]
    if pre_tokenizer is None:
        return [[text] for text in texts]
    return [[word for word, _ in pre_tokenizer.pre_tokenize_str(text)] for text in texts]


def _ends(tokenizer: Any, rows: int, ends: Collection[int]) -> dict[str, Any]:
    """Return the entries of special tokens: roles, ends of an answer, and what stands around a text."""
    found: dict[str, Any] = {}
    for role, entry in ROLES.items():
        index = getattr(tokenizer, f"{role}_id", None)
        if isinstance(index, int) and index < rows:
            found[entry] = index
    around = tokenizer("x").input_ids, tokenizer("x", add_special_tokens=False).input_ids
    first, last = found.get("bos_token_id"), found.get("eos_token_id")
    found["add_bos_token"] = first is not None and around[0][: len(around[0]) - len(around[1])][:1] == [first]
    found["add_eos_token"] = last is not None and around[0] != around[1] and around[0][-1:] == [last]
    ordered = sorted(ends, key=lambda index: (index != last, index))
    return found | dict(zip(END_ENTRIES, ordered, strict=False))


def _templates(tokenizer: Any) -> dict[str, Any]:
    said = getattr(tokenizer, "chat_template", None)
    named: Mapping[str, str] = said if isinstance(said, Mapping) else {} if said is None else {"default": said}
    further = [name for name in named if name != "default"]
    found: dict[str, Any] = {f"{_TEMPLATE}.{name}": named[name] for name in further}
    found |= {_TEMPLATE: named["default"]} if "default" in named else {}
    return found | ({"tokenizer.chat_templates": further} if further else {})
