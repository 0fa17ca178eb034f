"""The tokenizer of a GGUF file's metadata, as the files that transformers reads.

Two kinds are read: byte-level BPE ("gpt2"), whose rule for cutting a text into words has a name, and sentencepiece's
BPE ("llama"), whose merges follow from scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from beheld.checkpoint.gguf.header import Header
from beheld.core.errors import ModelError

PREFIX = "tokenizer.ggml."
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_REMEDY = "Name another tokenizer (tokenizer='FOLDER'), or convert the model again with a current llama.cpp."
# The longest piece of sentencepiece whose merges are looked for.
_LONGEST_PIECE = 512
_MOST_LETTERS = 1 << 26


class WordRule(NamedTuple):
    """How byte-level BPE cuts a text into words.

    Attributes:
        pattern: of words; None for GPT-2's own.
        digits: whether each digit is a word.
        whole: whether a word that is in the vocabulary is not cut, whatever merges say.
        composed: whether text is normalized to NFC first, as the models' publishers do.
        begins: whether the token of the beginning is added unless the file says otherwise.
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    composed: bool = False
    begins: bool = False


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = WordRule(_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST, whole=True, begins=True)
_QWEN2 = WordRule(_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST, composed=True)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = WordRule(
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole=True,
    begins=True,
)
# The file's name of a rule -> the rule.
WORDS: dict[str, WordRule] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), WordRule(digits=True)),
    **dict.fromkeys(("gpt-2", "gpt2"), WordRule()),
    "tekken": _TEKKEN,
}


def tokenizer_files(header: Header, file: Path, added: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of tokenizer.json (a text) and tokenizer_config.json (an object), by name of the file.

    Args:
        header: of the file.
        file: where it is.
        added: tokens that are read whole whether or not the file has them; those that it lacks come after its own.

    Raises:
        ModelError: the file has no tokenizer, or one that cannot be read.
    """
    vocabulary = _Vocabulary(header, file)
    try:
        backend, begins = _backend(vocabulary)
    except ModelError:
        raise
    except Exception as error:
        raise vocabulary.refused(f"its tokenizer cannot be built: {error}") from error
    named = {role: vocabulary.token(name) for role, name in ROLES.items()}
    _frame(backend, vocabulary, begins, named, added)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{role: token for role, token in named.items() if token is not None},
    }
    return {"tokenizer.json": backend.to_str(), "tokenizer_config.json": config}


def templates(header: Header, file: Path) -> dict[str, str]:
    """Return the chat templates by name; the usual one is "default"."""
    said = header.metadata
    names = said.get("tokenizer.chat_templates") or []
    keys = {"default": "tokenizer.chat_template"} | {
        name: f"tokenizer.chat_template.{name}" for name in names if isinstance(name, str) and name.isidentifier()
    }
    found = {name: said[key] for name, key in keys.items() if said.get(key)}
    for name, template in found.items():
        if not isinstance(template, str):
            raise ModelError(f"{file.name}: {keys[name]} is no text.", "Give another chat_template.")
    return found


ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class _Vocabulary:
    """What a file says of its tokenizer, checked.

    Attributes:
        tokens, kinds: by id.
        ids: of tokens.
    """

    def __init__(self, header: Header, file: Path) -> None:
        self._said: Mapping[str, Any] = header.metadata
        self._file = file
        if not self.get("model") or not self.get("tokens"):
            raise self.refused("it has no tokenizer")
        self.tokens: list[str] = self._texts("tokens")
        rows = header.tensors["token_embd.weight"].shape[0]
        if len(self.tokens) > rows:
            raise self.refused(f"its tokenizer has {len(self.tokens)} tokens, and the model {rows}")
        self.kinds: list[int] = self.get("token_type") or [NORMAL] * len(self.tokens)
        if not isinstance(self.kinds, list) or len(self.kinds) != len(self.tokens):
            raise self.refused("its tokens do not all have a type")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise self.refused(f"{len(self.tokens) - len(self.ids)} of its tokens occur twice")

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry of the tokenizer."""
        return self._said.get(PREFIX + name, default)

    def refused(self, why: str) -> ModelError:
        """Return the error about this file's tokenizer."""
        return ModelError(f"{self._file.name} cannot be run: {why}.", _REMEDY)

    def token(self, name: str) -> str | None:
        """Return the token whose id an entry gives; None if there is no such entry."""
        index = self.get(name)
        if index is None:
            return None
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise self.refused(f"{PREFIX}{name} is {index!r}, and it has {len(self.tokens)} tokens")
        return self.tokens[index]

    def flag(self, name: str, default: bool) -> bool:
        """Return an entry that is true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refused(f"{PREFIX}{name} is {value!r}, and must be true or false")
        return value

    def words(self) -> WordRule:
        """Return how byte-level BPE cuts a text into words."""
        name = self.get("pre")
        if name not in WORDS:
            said = "does not say how text is cut into words" if name is None else f"cuts text into words as {name!r}"
            raise self.refused(f"its tokenizer {said} (tokenizer.ggml.pre); known are {', '.join(sorted(WORDS))}")
        return WORDS[name]

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges that the file lists."""
        pairs = [tuple(merge.split(" ")) for merge in self._texts("merges")]
        wrong = next((pair for pair in pairs if len(pair) != 2), None)
        if wrong is not None:
            raise self.refused(f"its merge {' '.join(wrong)!r} is not two tokens")
        return pairs  # type: ignore[return-value]

    def merges_of_scores(self) -> list[tuple[str, str]]:
        """Return the merges of sentencepiece's pieces: those with the highest score come first."""
        scores = self.get("scores")
        if not isinstance(scores, list) or len(scores) != len(self.tokens):
            raise self.refused("its tokens do not all have a score")
        if not all(isinstance(score, float) and not math.isnan(score) for score in scores):
            raise self.refused("its scores are not numbers")
        joins = (NORMAL, USER_DEFINED)
        scored = {
            token: score for token, score, kind in zip(self.tokens, scores, self.kinds, strict=True) if kind in joins
        }
        found = []
        for token, score in scored.items():
            if len(token) > _LONGEST_PIECE:
                continue
            parts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            found += [(-score, self.ids[a], self.ids[b], a, b) for a, b in parts if a in scored and b in scored]
        return [(a, b) for *_, a, b in sorted(found)]

    def _texts(self, name: str) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.refused(f"{PREFIX}{name} is no list of texts")
        if sum(map(len, value)) > _MOST_LETTERS:
            raise self.refused(f"{PREFIX}{name} is too long")
        return value


def _backend(vocabulary: _Vocabulary) -> tuple[Any, bool]:
    """Return the tokenizer without added tokens' frame, and whether the beginning's token is added by default."""
    kind = vocabulary.get("model")
    if kind == BYTE_LEVEL:
        words = vocabulary.words()
        return _byte_level(vocabulary, words), words.begins
    if kind == SENTENCEPIECE:
        return _sentencepiece(vocabulary), True
    raise vocabulary.refused(f"its tokenizer is of the kind {kind!r}; known are {BYTE_LEVEL!r} and {SENTENCEPIECE!r}")


def _byte_level(vocabulary: _Vocabulary, words: WordRule) -> Any:
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=words.whole))
    made.normalizer, made.pre_tokenizer = cutting(words)
    made.decoder = decoders.ByteLevel()
    return made


def cutting(words: WordRule) -> tuple[Any, Any]:
    """Return the normalizer, if any, and the part of a tokenizer that cuts a text into words."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words.digits else []
    if words.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(words.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None))
    return normalizers.NFC() if words.composed else None, pre_tokenizers.Sequence(steps)


def _sentencepiece(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = vocabulary.token("unknown_token_id")
    if unknown is None:
        kinds = zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        unknown = next((token for token, kind in kinds if kind == UNKNOWN), None)
    merges = vocabulary.merges() if vocabulary.get("merges") else vocabulary.merges_of_scores()
    made = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    before = [normalizers.Prepend("\u2581")] if prefix else []
    made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "\u2581")])
    after = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return made


def _frame(
    backend: Any, vocabulary: _Vocabulary, begins: bool, named: Mapping[str, str | None], added: Sequence[str]
) -> None:
    """Add the tokens that are read whole, and those at the ends of a text."""
    from tokenizers import AddedToken, processors

    kinds = list(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == CONTROL])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED])
    first = named["bos_token"] if vocabulary.flag("add_bos_token", begins) else None
    last = named["eos_token"] if vocabulary.flag("add_eos_token", False) else None
    if first is None and last is None:
        return
    ends = [token for token in (first, last) if token is not None]
    one, two = ([*([first] if first else []), f"${part}", *([last] if last else [])] for part in "AB")
    backend.post_processor = processors.TemplateProcessing(
        single=one,
        pair=[*one, *(f"{piece}:1" for piece in two)],
        special_tokens=[(token, vocabulary.ids[token]) for token in dict.fromkeys(ends)],
    )
