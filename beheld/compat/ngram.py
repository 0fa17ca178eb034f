"""The logits processor of DeepSeek-OCR: forbids repeated n-grams within a window, except for whitelisted tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from beheld.core.errors import ParamsError
from beheld.core.params import SamplingParams
from beheld.core.value_checks import nearest, whole

_DEFAULT_WINDOW = 100
_NAMES = ("ngram_size", "whitelist_token_ids", "window_size")


class NGramPerReqLogitsProcessor:
    """For `LLM(logits_processors=[...])`; each request sets its options in `SamplingParams.extra_args`.

    `ngram_size`: length of the n-grams that must not repeat; without it the processor does nothing. `window_size`: how
    many of the newest output tokens are searched (default 100). `whitelist_token_ids`: tokens that are never forbidden.
    """

    def __init__(self, *_: Any) -> None:
        """Ignore vLLM's constructor arguments: this processor keeps no state between requests."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Check the extra arguments.

        Raises:
            ParamsError: an argument has the wrong type; the message names it.
        """
        extra = params.extra_args or {}
        for name in extra:
            if name not in _NAMES:
                remedy = nearest(name, _NAMES) or f"Known: {', '.join(_NAMES)}."
                raise ParamsError(f"extra_args holds the unknown {name!r}.", remedy, param="extra_args")
        if extra.get("ngram_size") is None:
            for name in _NAMES:
                if extra.get(name) is not None:
                    raise ParamsError(f"{name} means nothing without ngram_size.", param="extra_args")
            return
        whole("ngram_size", extra["ngram_size"], 1)
        whole("window_size", extra.get("window_size", _DEFAULT_WINDOW), 1)
        allowed = extra.get("whitelist_token_ids")
        if isinstance(allowed, str | bytes) or not hasattr(allowed or (), "__iter__"):
            raise ParamsError(f"whitelist_token_ids must hold token ids, got {allowed!r}.", param="extra_args")
        for token in allowed or ():
            whole("whitelist_token_ids", token, 0)

    def is_argmax_invariant(self) -> bool:
        """False: the processor can change which token is the most likely."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[Sequence[int], Any], Any] | None:
        """Return the function (output_ids, logits_V) -> logits_V of one request; None if `ngram_size` is not set.

        Raises:
            ParamsError: an extra argument has the wrong type.
        """
        self.validate_params(params)
        extra = params.extra_args or {}
        if extra.get("ngram_size") is None:
            return None
        size, window = extra["ngram_size"], extra.get("window_size", _DEFAULT_WINDOW)
        allowed = frozenset(extra.get("whitelist_token_ids") or ())

        def bar(output_ids: Sequence[int], logits_V: Any) -> Any:
            barred = sorted(repeating(output_ids, size, window) - allowed)
            if barred:
                logits_V[barred] = float("-inf")
            return logits_V

        return bar


def repeating(output_ids: Sequence[int], size: int, window: int) -> frozenset[int]:
    """Return the tokens that would repeat an n-gram of length `size` that lies within the last `window` tokens."""
    recent = list(output_ids[-window:])
    if len(output_ids) < size:
        return frozenset()
    # For 1-grams every token in the window is forbidden.
    last = list(output_ids[len(output_ids) - (size - 1) :])
    starts = range(len(recent) - size + 1)
    return frozenset(recent[start + size - 1] for start in starts if recent[start : start + size - 1] == last)
