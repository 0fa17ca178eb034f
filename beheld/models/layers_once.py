"""Several passes over the same tokens that run the layers once and only the head again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def layers_once(model: Any) -> Iterator[None]:
    """Within the block, a transformers model's decoder answers every call with its first output.

    Passes that differ only in the needed logits can then run one after another, with the model's code for everything
    after the layers.
    """
    decoder = model.get_decoder()
    # Some families call a module with a head by this name.
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
