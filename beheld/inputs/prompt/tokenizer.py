"""Tokenizes text: prompts as the tokenizer reads them, and untrusted text as plain text only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from beheld.checkpoint.convert import own_config
from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.info import added_tokens
from beheld.checkpoint.remote_code import own_first
from beheld.checkpoint.resolve import resolve_tokenizer
from beheld.core.config import EngineArgs, ModelInfo
from beheld.core.errors import ModelError, PromptError, PromptTooLongError, first_line
from beheld.families import registry
from beheld.families.inputs import FamilyInputs, ItemPlace
from beheld.inputs.prompt.chunked_tokenize import REDUCE, ChunkedTokenizer
from beheld.inputs.prompt.special_tokens import ControlTokens, PlainEncoder, StandIns, private_letters
from beheld.utils.gil import out_of_turn

# In characters. Shorter texts are always tokenized, which is quick, so that the error can name their length.
SHORT_TEXT = 1 << 16
# Shorter texts take less time than reacquiring the GIL, and are tokenized without releasing it.
_BRIEF_TEXT = 500
# Where a text is cut before it is tokenized, up to this many ids next to the cut may differ from the whole text's.
SPARE_IDS = 16
# How many characters are read ahead at once, and how many texts' ids wait to be asked for.
_MOST_AHEAD = 1 << 20
_MOST_KEPT = 2048


# The steps of transformers' tokenizers from a text to ids.
_CALLS = ("__call__", "_encode_plus", "_convert_encoding", "set_truncation_and_padding")


class PromptTokenizer:
    """The checkpoint's tokenizer, safe to use from several threads.

    Calls of transformers' fast tokenizers change their state, so they run under one lock. Where a call equals its
    backend's result, any number of threads call the backend instead; for long texts, and once the tokenizer was handed
    out to the user, they call a copy of the backend.

    Args:
        tokenizer: transformers' tokenizer, or None if the engine runs without one.
        placeholder_ids: modality -> the placeholder id of an embedding.
        places: modality -> the tokens, in a row, that an item replaces in a prompt, if they are others.
        pieces: ordinary vocabulary pieces that users' text must not become.
        added: token -> id, where there is no tokenizer to ask.
        longer: what the operator can do about a text that is too long; see BeheldError's `or_engine`.

    Attributes:
        within: token id -> modality, for tokens that stand for embeddings and are never written in a prompt.

    Raises:
        ModelError: of several tokens in a row one has no id.
    """

    def __init__(
        self,
        tokenizer: Any,
        placeholder_ids: Mapping[str, int],
        places: Mapping[str, str | tuple[str, ...]] | None = None,
        pieces: Sequence[str] = (),
        added: Mapping[str, int] | None = None,
        longer: str = "",
    ) -> None:
        self.inner = tokenizer
        self.longer = longer
        self._lock = threading.Lock()
        self._pieces = tuple(pieces)
        self._embeds = dict(placeholder_ids)
        self._places: dict[str, tuple[int, ...]] = {kind: (token,) for kind, token in placeholder_ids.items()}
        id_of: Any = (added or {}).get if tokenizer is None else tokenizer.convert_tokens_to_ids
        for modality, given in (places or {}).items():
            tokens = (given,) if isinstance(given, str) else given
            found = [id_of(token) for token in tokens]
            if all(isinstance(token, int) for token in found):
                self._places[modality] = tuple(found)
            elif len(tokens) > 1:
                raise ModelError(
                    f"The tokenizer lacks one of {' '.join(tokens)}, which mark the place of an item in a prompt.",
                    "Fetch the checkpoint's tokenizer files again.",
                )
        placed = {token for ids in self._places.values() for token in ids}
        plain = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")}
        self.within: dict[int, str] = {}
        for modality, token in placeholder_ids.items():
            if tokenizer is not None and token not in placed | plain:
                # Where modalities share it, the first one's place is named.
                self.within.setdefault(token, modality)
        self._control: ControlTokens | None = None
        self._plain: PlainEncoder | None = None
        self._ends: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._runs: dict[str, int] = {}
        self._longest = 0
        self._chunked: ChunkedTokenizer | None = None
        self._shared = False
        self._copied: tuple[int, Any] | None = None
        self._pairs: Any = None
        # Ids of texts that will be encoded next, with the tokenizer's special tokens around them.
        self._ahead: dict[str, list[int]] = {}

    @classmethod
    def of(cls, tokenizer: Any, info: ModelInfo, family: FamilyInputs, longer: str = "") -> PromptTokenizer:
        """Make that of a model; where there is no tokenizer, the checkpoint's files give the ids of places."""
        added = added_tokens(Path(info.path)) if tokenizer is None and family.places else {}
        return cls(tokenizer, info.placeholder_ids, family.places, family.pieces, added, longer)

    @property
    def places(self) -> Mapping[str, tuple[int, ...]]:
        """Return the ids, in a row, that an item replaces in a prompt, by modality."""
        return self._places

    def _require(self) -> Any:
        if self.inner is None:
            raise PromptError(
                "Text prompts are not available: the engine runs without a tokenizer (`skip_tokenizer_init=True`).",
                "Send the prompt as token ids.",
                or_engine="start without skip_tokenizer_init",
            )
        return self.inner

    def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Return token ids of trusted text, where the spelling of a special token is that token.

        Args:
            text: any text.
            add_special_tokens: whether to add the tokenizer's special tokens around it.
            most: the number of ids needed; a long text is read no further. None for all.

        Raises:
            PromptError: there is no tokenizer, the text contains a lone surrogate, or the library fails on it.
            PromptTooLongError: the text is long and has more than `most`.
        """
        tokenizer = self._require()
        if add_special_tokens and (known := self.known(text)) is not None:
            return known
        _check_letters(text)
        with _panics_as_errors():
            return self._read(tokenizer, text, add_special_tokens, most)

    def _read(self, tokenizer: Any, text: str, add_special_tokens: bool, most: int | None) -> list[int]:
        usual = _usual(tokenizer)
        if usual and len(text) < _BRIEF_TEXT:
            return self._encoded(text, add_special_tokens, most)
        with out_of_turn():
            if usual:
                return self._encoded(text, add_special_tokens, most)
            with self._lock:
                ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, truncation=False)["input_ids"]
            return ids

    def read_ahead(self, texts: Sequence[str], *, first: bool) -> None:
        """Encode texts together in the library's threads, so that the next calls of `encode` find their ids.

        Texts that are long or wrong, and those that are too much at once, are left to `encode`.

        Args:
            first: they are the first of a call; what an earlier call left is dropped.
        """
        if first:
            self._ahead.clear()
        if len(self._ahead) > _MOST_KEPT:
            self._ahead.clear()
        taken = list(dict.fromkeys(texts))
        found = self.encode_together(taken)
        self._ahead.update((text, ids) for text, ids in zip(taken, found, strict=True) if ids is not None)

    def encode_together(self, texts: Sequence[str]) -> list[list[int] | None]:
        """Return the ids of texts, with special tokens around each, that the library's threads encode together.

        None stands for a text that is long or wrong, and for those that are too much at once: `encode` takes them.
        """
        found: list[list[int] | None] = [None] * len(texts)
        if self.inner is None or not _usual(self.inner):
            return found
        taken, room = [], _MOST_AHEAD
        for place, text in enumerate(texts):
            if len(text) > min(room, SHORT_TEXT) or (not text.isascii() and _has_surrogate(text)):
                continue
            room -= len(text)
            taken.append(place)
        given = texts if len(taken) == len(texts) else [texts[place] for place in taken]
        for place, each in zip(taken, self._batch(given), strict=False):
            found[place] = each.ids
        return found

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], int | None] | None]:
        """Return what `encode_pair` does of pairs without a cut, encoded together; None as `encode_together`."""
        found: list[tuple[list[int], int | None] | None] = [None] * len(pairs)
        if self.inner is None or not _usual(self.inner):
            return found
        taken, room = [], _MOST_AHEAD
        for place, (first, second) in enumerate(pairs):
            size = len(first) + len(second)
            if size > min(room, SHORT_TEXT) or _has_surrogate(first) or _has_surrogate(second):
                continue
            room -= size
            taken.append(place)
        typed = "token_type_ids" in self.inner.model_input_names
        for place, each in zip(taken, self._batch([pairs[place] for place in taken]), strict=False):
            types = each.type_ids if typed else ()
            found[place] = each.ids, types.index(1) if 1 in types else None
        return found

    def _batch(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Encode texts or pairs in one call; nothing is returned if one of them makes the library fail."""
        backend = self.inner.backend_tokenizer
        if self._shared or not _unset(backend):
            backend = self._own(backend)
        try:
            return backend.encode_batch_fast(inputs, add_special_tokens=True)
        except BaseException as error:
            # The text at fault has its own error later.
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            return ()

    def known(self, text: str) -> list[int] | None:
        """Return the ids of a text that was read ahead, once; None of another."""
        return self._ahead.pop(text, None)

    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], int | None]:
        """Return the ids of two trusted texts as the tokenizer joins them, and where those of the second type start.

        Args:
            most: cut the longer text, then both in turn, to this many ids in all; None for no cut.

        Raises:
            PromptError: there is no tokenizer, it has no pairs, a text contains a lone surrogate, or the library fails.
        """
        tokenizer = self._require()
        if not getattr(tokenizer, "is_fast", False):
            raise PromptError("This tokenizer cannot join two texts.", "Use a checkpoint with a tokenizer.json.")
        _check_letters(first)
        _check_letters(second)
        with self._lock:
            if self._pairs is None:
                self._pairs = _copy(tokenizer.backend_tokenizer)
            if most is None:
                self._pairs.no_truncation()
            else:
                self._pairs.enable_truncation(most, strategy="longest_first")
            with _panics_as_errors():
                found = self._pairs.encode(first, second)
        # Tokenizers of models without types may have them in their templates, and transformers leaves them out.
        types = found.type_ids if "token_type_ids" in tokenizer.model_input_names else ()
        return list(found.ids), types.index(1) if 1 in types else None

    def cut(self, text: str, most: int, *, end: bool = False, plain: bool = False) -> str:
        """Return the beginning of a text that its first `most` ids spell; the text itself if it has no more.

        Args:
            text: any text.
            most: at least 1.
            end: return the end, which its last ids spell.
            plain: the text is untrusted: no spelling in it is a control token.

        Raises:
            PromptError: there is no tokenizer, it does not say where its tokens stand, or the text contains a lone
                surrogate.
        """
        tokenizer = self._require()
        if not getattr(tokenizer, "is_fast", False):
            raise PromptError("This tokenizer cannot cut a text.", "Use a checkpoint with a tokenizer.json.")
        _check_letters(text)
        backend = self.plain().backend if plain else self._own(tokenizer.backend_tokenizer)
        size = SHORT_TEXT
        while True:
            # No more is read of a long text than is needed: a cut within a word changes only ids next to it.
            read = text[-size:] if end else text[:size]
            with out_of_turn():
                # Of this library's calls, only those for batches release the GIL.
                found = backend.encode_batch([read], add_special_tokens=False)[0]
            if len(read) == len(text) or len(found) > most + SPARE_IDS:
                break
            size *= 4
        if len(found) <= most:
            return text
        # A list of all places would take longer than the ids.
        start, stop = found.token_to_chars(len(found) - most if end else most - 1)
        return read[start:] if end else read[:stop]

    def token_places(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and from where to where in it each token stands; (0, 0) for special tokens.

        Raises:
            PromptError: there is no tokenizer, it does not say where its tokens stand, the text contains a lone
                surrogate, or the library fails.
        """
        tokenizer = self._require()
        if not getattr(tokenizer, "is_fast", False):
            raise PromptError("This tokenizer does not say where tokens stand.", "Use one with a tokenizer.json.")
        _check_letters(text)
        with out_of_turn(), _panics_as_errors():
            found = self._own(tokenizer.backend_tokenizer).encode_batch([text], add_special_tokens=add_special_tokens)
        return found[0].ids, found[0].offsets

    def _encoded(self, text: str, add_special_tokens: bool, most: int | None) -> list[int]:
        """Return token ids from the tokenizer's backend."""
        if len(text) > SHORT_TEXT:
            before, after = self.ends() if add_special_tokens else ((), ())
            return [*before, *self._long().encode(text, most), *after]
        backend = self.inner.backend_tokenizer
        if not self._shared and _unset(backend):
            found = _encoded(backend, text, add_special_tokens)
            # Otherwise it was handed out meanwhile, and its user may have called it.
            if not self._shared:
                return found
        return _encoded(self._own(backend), text, add_special_tokens)

    def share(self) -> Any:
        """Return the tokenizer itself, for callers that may then use it in other threads and ways."""
        self._shared = True
        return self.inner

    def _own(self, backend: Any) -> Any:
        """Return a copy of the backend without callers' truncation, padding or splitting.

        It is renewed when tokens are added.
        """
        size = backend.get_vocab_size(with_added_tokens=True)
        copied = self._copied
        if copied is None or copied[0] != size:
            with self._lock:
                self._copied = copied = (size, _copy(backend))
        return copied[1]

    def _long(self) -> ChunkedTokenizer:
        with self._lock:
            if self._chunked is None:
                self._chunked = ChunkedTokenizer(self._require().backend_tokenizer, longer=self.longer)
            return self._chunked

    def tail(self, text: str, size: int) -> str | None:
        """Return the last characters of a text, at least `size`, whose ids are the last ids of the text.

        Read alone, their first few ids may differ. None if the text is shorter or cannot be cut.
        """
        if size >= len(text) or self.inner is None or not _usual(self.inner):
            return None
        place = self._long().last_place(text, len(text) - size)
        return None if place is None else text[place:]

    def check_length(self, num_letters: int, max_tokens: int) -> None:
        """Refuse a text of so many characters if no tokenization brings it below `max_tokens`.

        It is not tokenized, which takes about a second per MiB.

        Raises:
            PromptTooLongError: it has more characters than `max_tokens` of the longest tokens.
        """
        if num_letters > SHORT_TEXT and self.inner is not None and num_letters > max_tokens * self.longest():
            raise PromptTooLongError(
                f"This model's maximum context length is {max_tokens} tokens; the prompt has {num_letters} characters, "
                "more than so many tokens can spell.",
                REDUCE,
                or_engine=self.longer,
            )

    def longest(self) -> int:
        """Return how many characters the longest token has."""
        with self._lock:
            if not self._longest:
                self._longest = max(map(len, self._require().get_vocab()), default=1)
            return self._longest

    def encode_pieces(self, pieces: Sequence[str | ItemPlace], encode: Callable[[str], list[int]]) -> list[int]:
        """Return token ids of text segments, each encoded separately, and of placeholders.

        Args:
            pieces: segments of text, and places of items.
            encode: a segment -> its ids.
        """
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, str):
                ids += encode(piece)
            else:
                ids += self._places[piece.modality]
        return ids

    def replacement(self, text: str) -> tuple[int, ...]:
        """Return token ids of the text that replaces a placeholder, as inside a prompt."""
        token = self._repeated(text)
        if token is not None:
            return (self._runs[token],) * (len(text) // len(token))
        return tuple(self.encode(text, add_special_tokens=False))

    def edges(self, text: str) -> tuple[str, str, str]:
        """Split an item's text: ordinary text, control tokens with everything between them, ordinary text."""
        if self._repeated(text) is not None:
            return "", text, ""
        control = self.control()
        first = control.pattern.search(text) if control.pattern is not None else None
        if first is None:
            return "", text, ""
        stop = max(text.rfind(spelling) + len(spelling) for spelling in control.ids if spelling in text)
        return text[: first.start()], text[first.start() : stop], text[stop:]

    def _repeated(self, text: str) -> str | None:
        """Return the placeholder that makes up all of `text`, repeated, which is the usual case."""
        if not self._runs:
            self._runs = dict(self._texts(self._embeds).values())
        for token in self._runs:
            if text.startswith(token) and text == token * (len(text) // len(token)):
                return token
        return None

    def _texts(self, ids: Mapping[str, int]) -> dict[str, tuple[str, int]]:
        """Return (text, id) by modality, of placeholders that are added tokens."""
        tokenizer = self._require()
        known = tokenizer.get_added_vocab()
        texts: dict[str, tuple[str, int]] = {}
        for modality, token in ids.items():
            text = tokenizer.convert_ids_to_tokens(token)
            if isinstance(text, str) and known.get(text) == token:
                texts[modality] = (text, token)
        return texts

    def spelled(self, token: int) -> str:
        """Return a token's spelling, for messages."""
        return str(self._require().convert_ids_to_tokens(token))

    def placeholder(self, modality: str) -> str:
        """Return the placeholder's text, for messages."""
        place = self._places.get(modality)
        if self.inner is None or place is None:
            return f"token {' '.join(map(str, place or (None,)))}"
        return "".join(str(self.inner.convert_ids_to_tokens(token)) for token in place)

    # ------------------------------------------------------------------ untrusted text

    def control(self) -> ControlTokens:
        """Return the spellings that user text may not use as tokens."""
        with self._lock:
            if self._control is None:
                marks = frozenset((*self._embeds.values(), *(token for ids in self._places.values() for token in ids)))
                self._control = ControlTokens.of(self._require(), marks, self._pieces)
            return self._control

    def plain(self) -> PlainEncoder:
        """Return the encoder that knows no control tokens."""
        control = self.control()
        with self._lock:
            if self._plain is None:
                self._plain = PlainEncoder(self._require(), control, self.longer)
            return self._plain

    def plain_ids(self, text: str) -> list[int]:
        """Return the ids of untrusted text within a prompt."""
        control, stand_ins = self.control(), StandIns(private_letters(text))
        return self.plain().encode(stand_ins.parts(stand_ins.replace(text, control)), first=False)

    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the tokenizer adds before and after a text."""
        if self._ends is None:
            bare = self.encode("a", add_special_tokens=False)
            full = self.encode("a", add_special_tokens=True)
            start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
            self._ends = tuple(full[:start]), tuple(full[start + len(bare) :])
        return self._ends


def _usual(tokenizer: Any) -> bool:
    """Return whether a call of transformers' tokenizer equals its backend's result."""
    if not getattr(tokenizer, "is_fast", False) or tokenizer.split_special_tokens:
        return False
    return _calls_as_usual(tokenizer.__class__)


@cache
def _calls_as_usual(kind: type) -> bool:
    """Return whether a class of tokenizers has transformers' own steps."""
    from transformers import PreTrainedTokenizerFast

    return all(getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in _CALLS)


def _check_letters(text: str) -> None:
    """Raise PromptError if a text contains a lone surrogate."""
    if not text.isascii() and _has_surrogate(text):
        raise PromptError("The text contains a lone surrogate, which is not a character.", "Decode it as UTF-8 again.")


def _is_panic(error: BaseException) -> bool:
    """Return whether the tokenizers' library has panicked, which is no exception of the usual kind."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise PromptError where the library panics on a text."""
    try:
        yield
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise PromptError(
            "The tokenizer fails on this text.",
            "Leave out unusual characters, or fetch the checkpoint's tokenizer files again.",
            detail=first_line(error),
        ) from error


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _unset(backend: Any) -> bool:
    """Return whether calls of the tokenizer leave its state unchanged."""
    return backend.truncation is None and backend.padding is None and not backend.encode_special_tokens


def _encoded(backend: Any, text: str, add_special_tokens: bool) -> list[int]:
    found: list[int]
    if len(text) < _BRIEF_TEXT:
        found = backend.encode(text, add_special_tokens=add_special_tokens).ids
    else:
        # Of this library's calls, only those for batches release the GIL.
        found = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return found


def _copy(backend: Any) -> Any:
    """Return a tokenizer that shares the unchanging parts: copying a large vocabulary would take half a second."""
    own = type(backend)(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        setattr(own, part, getattr(backend, part))
    added = backend.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (own.add_special_tokens if token.special else own.add_tokens)([token])
    if {id_: str(token) for id_, token in own.get_added_tokens_decoder().items()} != {
        id_: str(token) for id_, token in added.items()
    }:
        own = type(backend).from_str(backend.to_str())
        own.no_truncation()
        own.no_padding()
        own.encode_special_tokens = False
    return own


def load_tokenizer(info: ModelInfo, args: EngineArgs) -> Any:
    """Load transformers' tokenizer for a checkpoint.

    Raises:
        ModelError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    folder = resolve_tokenizer(args, Path(info.path))
    options: dict[str, Any] = {"use_fast": False} if args.tokenizer_mode == "slow" else {}
    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
        # Loaded by transformers itself, even if mistral-common is installed, which supports no placeholders.
        options["mistral_format"] = False
    family = registry.inputs(info.family)
    try:
        found = family.read_tokenizer(folder) if family.read_tokenizer is not None else None
        if found is None:
            options |= own_config(read_json(folder / CONFIG))
            found = own_first(
                lambda trust: AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust, **options),
                trusted=args.trust_remote_code,
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"The tokenizer of {info.name!r} cannot be loaded: {first_line(error)}.",
            "Check the folder's tokenizer files, or name another with `tokenizer`.",
        ) from error
    return extended(found, family.added)


def extended(tokenizer: Any, added: Sequence[str]) -> Any:
    """Return the tokenizer with the special tokens `added` after its own, where they are missing."""
    missing = [token for token in added if token not in tokenizer.get_added_vocab()]
    if missing:
        from tokenizers import AddedToken

        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
    return tokenizer


def for_workers(info: ModelInfo, args: EngineArgs) -> EngineArgs:
    """Return only the options that select tokenizer and processor: others may not be picklable."""
    # With the folder's path: if the model is a folder, a repository's name would mean another one.
    tokenizer = args.tokenizer if args.skip_tokenizer_init else str(resolve_tokenizer(args, Path(info.path)))
    return EngineArgs(
        model=info.path,
        tokenizer=tokenizer,
        tokenizer_mode=args.tokenizer_mode,
        skip_tokenizer_init=args.skip_tokenizer_init,
        trust_remote_code=args.trust_remote_code,
        tokenizer_revision=args.tokenizer_revision,
        download_dir=args.download_dir,
        hf_token=args.hf_token,
    )
