"""Several passes over the same tokens of which the layers run once, and only the head anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def layers_once(model: Any) -> Iterator[None]:
    """Within the block, the decoder of a transformers model answers every call with its answer to the first.

    So passes that differ in the wanted logits alone give them one after the other: all that a model does behind its
    layers is done by its own code.
    """
    decoder = model.get_decoder()
    # Some families call so what has a head of its own.
    for name in ("model", "decoder"):
        decoder = getattr(decoder, name, decoder)
    forward = decoder.forward
    answers: list[Any] = []

    def remembering(*given: Any, **options: Any) -> Any:
        if not answers:
            answers.append(forward(*given, **options))
        return answers[0]

    own = "forward" in vars(decoder)
    decoder.forward = remembering
    try:
        yield
    finally:
        if own:
            decoder.forward = forward
        else:
            del decoder.forward
