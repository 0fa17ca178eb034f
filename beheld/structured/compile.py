"""Compiles a grammar's text to a state machine over token ids, within limits, and caches the result."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from beheld.core.errors import ParamsError, first_line
from beheld.core.structured_outputs import Grammar, ReasoningFormat, StructuredOutputs
from beheld.structured import structural_tag
from beheld.structured.calls import lark_of, leaves_room
from beheld.structured.closed import check, closed
from beheld.structured.marks import Tokens
from beheld.structured.reasoning import with_reasoning
from beheld.utils.bounded_json import exceeds
from beheld.utils.lru import LRU

MAX_TEXT = 128 << 10
# A compiled grammar takes about a hundred times the bytes of its text (measured with schemas of 0.3 to 10 KB).
_KEPT_BYTES = 256 << 20
_KEPT_FACTOR = 100
_KEPT_LEAST = 64 << 10
# The library's error if nothing can come next.
_STUCK = "NoExtensionBias"
# A rule in GBNF.
_GBNF = re.compile(r"^\s*[\w-]+[ \t]*::=", re.MULTILINE)
# Ends a grammar that was turned.
_TURNED = "\n// turned from GBNF\n"
# The library's converter is slow for long chains of rules.
_MAX_GBNF = 4 << 10
_AS_LARK = 'Write it as Lark, not as GBNF: start: "yes" | "no" in place of root ::= "yes" | "no".'
# At most one space between JSON tokens: without a limit, some models write spaces until they run out of tokens.
_JSON: Any = {"whitespace_pattern": " ?"}


def grammar_of(asked: StructuredOutputs, reasoning: ReasoningFormat | None = None) -> Grammar:
    """The grammar that a user asks for, as kind and text, to follow the optional reasoning.

    Raises:
        ParamsError: there is not exactly one, or it is too large.
    """
    # A script's own class holds further options.
    found = {field.name: getattr(asked, field.name) for field in fields(StructuredOutputs)}
    given = {name: value for name, value in found.items() if value not in (None, False)}
    if len(given) != 1:
        raise ParamsError(
            "Give exactly one of json, json_object, regex, choice, grammar and structural_tag.",
            param="structured_outputs",
        )
    ((kind, value),) = given.items()
    if kind == "json_object":
        if value is not True:
            raise ParamsError("json_object must be True, or left out.", param="structured_outputs")
        kind, value = "json", {"type": "object"}
    if exceeds(value, MAX_TEXT, MAX_TEXT):
        # It has as many characters at least, and is not written.
        raise _too_long()
    if kind in ("json", "structural_tag") and not isinstance(value, str):
        try:
            value = json.dumps(value)
        except RecursionError as error:
            raise _invalid("it is nested too deep") from error
    if kind == "choice":
        if not value or not all(isinstance(entry, str) and entry for entry in value):
            raise ParamsError("choice must hold texts that are not empty.", param="structured_outputs")
        kind, value = "grammar", "start: " + " | ".join(map(json.dumps, value))
    if not isinstance(value, str):
        raise ParamsError(f"The {kind} grammar must be a text.", param="structured_outputs")
    if kind == "grammar" and len(value) <= _MAX_GBNF and _GBNF.search(value):
        value = _as_lark(value)
    if len(value) > MAX_TEXT:
        raise _too_long()
    return Grammar(kind, value, reasoning)


def _too_long() -> ParamsError:
    return ParamsError(f"The grammar has more than {MAX_TEXT} characters.", param="structured_outputs")


def _as_lark(gbnf: str) -> str:
    """The grammar in Lark; one that the library cannot turn stays as it is, and is refused when it is compiled."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return f"{gbnf_to_lark(gbnf)}{_TURNED}"
    except Exception:
        return gbnf


class Compiler:
    """Compiles grammars for one tokenizer. Thread-safe.

    Args:
        tokenizer_json: returns the tokenizer, serialized by the tokenizers library, or None if it has no such form;
            called once.
        vocab_size: width of the logits.
        eos_ids: ids that end an answer, allowed where the grammar is complete.
    """

    def __init__(self, tokenizer_json: Callable[[], str | None], vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.tokenizer_json = tokenizer_json
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._tokens: Tokens | None = None
        self._kept: LRU[Grammar, Any] = LRU(_KEPT_BYTES)

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-self.vocab_size // 32)

    def matcher(self, grammar: Grammar) -> Any:
        """A new llguidance.LLMatcher at the start of an answer.

        Raises:
            ParamsError: the grammar is invalid, or this model does not support grammars.
        """
        known = self._kept.get(grammar)
        if known is None:
            known = self.compile(grammar)
            self._kept.put(grammar, known, _KEPT_LEAST + _KEPT_FACTOR * len(grammar.text))
        return known.deep_copy()

    def is_cached(self, grammar: Grammar) -> bool:
        """True if `matcher` would return at once."""
        return self._kept.get(grammar) is not None

    def compile(self, grammar: Grammar) -> Any:
        """Compile without the cache.

        Raises:
            ParamsError: as `matcher`.
        """
        return self._compile(grammar, self.prepare())

    def prepare(self) -> Any:
        """Load the tokenizer unless it is loaded; returns the library's object.

        Raises:
            ParamsError: this model does not support grammars.
        """
        with self._lock:
            return self._ready()

    def _ready(self) -> Any:
        if self._tokenizer is None:
            try:
                from llguidance import LLTokenizer
            except ImportError as error:
                raise ParamsError(
                    "Grammars need the package llguidance.", "Install it.", param="structured_outputs"
                ) from error
            text = self.tokenizer_json()
            if text is None or not self.eos_ids:
                raise ParamsError("Grammars are not available for this tokenizer.", param="structured_outputs")
            try:
                self._tokenizer = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=sorted(self.eos_ids))
            except Exception as error:
                raise ParamsError(
                    "Grammars are not available for this tokenizer.",
                    param="structured_outputs",
                    detail=first_line(error),
                ) from error
            self._tokens = Tokens(self._tokenizer)
        return self._tokenizer

    def _compile(self, grammar: Grammar, tokenizer: Any) -> Any:
        from llguidance import LLMatcher

        assert self._tokens is not None
        tokens = self._tokens
        try:
            if grammar.kind == "json":
                text = LLMatcher.grammar_from_json_schema(_plain(grammar.text), overrides=_JSON)
            elif grammar.kind == "regex":
                text = LLMatcher.grammar_from_regex(grammar.text)
            elif grammar.kind == "calls":
                text = lark_of(grammar.text, tokens, grammar.reasoning)
            elif grammar.kind == "structural_tag":
                text = structural_tag.lark_of(grammar.text, tokens)
            else:
                text = LLMatcher.grammar_from_lark(grammar.text)
            if grammar.reasoning is not None and not (grammar.kind == "calls" and leaves_room(grammar)):
                text = with_reasoning(grammar.reasoning, text, tokens)
            made = LLMatcher(tokenizer, text, log_level=0)
        except ParamsError:
            raise
        except (ValueError, RecursionError) as error:
            # As below, the library's message is about the user's grammar.
            raise _invalid(str(error), grammar) from error
        if made.is_error():
            raise _invalid(made.get_error(), grammar)
        # The first mask reveals grammars that cannot even begin or are too complex.
        begun = made.deep_copy()
        begun.compute_bitmask()
        if begun.is_error():
            reason = begun.get_error()
            raise _invalid("no text can follow it" if reason.startswith(_STUCK) else reason, grammar)
        return made


def _plain(schema: str) -> str:
    """Check that a schema is JSON of bounded depth without external references, and return it with closed objects.

    Raises:
        ParamsError: it is not JSON.
        ValueError: see `check`.
    """
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise _invalid("it is not JSON") from error
    check(value)
    return json.dumps(closed(value))


def _invalid(reason: str, grammar: Grammar | None = None) -> ParamsError:
    """The error for a grammar; for GBNF it also shows how to write Lark."""
    first = (reason.strip().splitlines() or ["it is not valid"])[0][:200]
    text = "" if grammar is None or grammar.kind != "grammar" else grammar.text
    gbnf = text.endswith(_TURNED) or _GBNF.search(text) is not None
    return ParamsError(
        f"The grammar cannot be used: {first.rstrip('.')}.", _AS_LARK if gbnf else "", param="structured_outputs"
    )
