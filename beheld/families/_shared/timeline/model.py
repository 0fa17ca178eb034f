"""Models whose every token, of the prompt and of the answer, is embedded together with what is heard at its time.

An audio is one item with a state for each position: what is added to the embedding there. It belongs to the prompt's
first token, so that every position, and what shares a prefix, depends on it. States are kept where those of
cross-attention are; a group of one layer holds a row of the hidden size as a key and a value of half the size.

Shapes: T tokens of a step, H hidden size, E states of an audio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from beheld.attention.context import current
from beheld.attention.cross import CrossView
from beheld.attention.op import states_at
from beheld.core.plan import EncodeItem, SpanView
from beheld.families._shared.encoder_decoder import alike


class HearingDecoder:
    """See CrossInputs; a family's subclass gives what it leaves open."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def rows(self, items: Sequence[EncodeItem]) -> Sequence[Tensor]:
        """Return what is added to the embedding at each position (E, H), of audios whose features have one shape."""
        raise NotImplementedError

    def layers(self, embeds_1TH: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states (1, T, H) of what enters the first layer."""
        raise NotImplementedError

    def encode(self, items: Sequence[EncodeItem]) -> list[Tensor]:
        """Return the states of each audio (E, 1, 2, 1, H / 2); audios of one length are read together."""
        dtype = self._model.get_input_embeddings().weight.dtype
        found: dict[int, Tensor] = {}
        for numbers in alike(items):
            for number, rows_EH in zip(numbers, self.rows([items[each] for each in numbers]), strict=True):
                found[number] = rows_EH[: items[number].num_embeds].to(dtype).unflatten(-1, (1, 2, 1, -1))
        return [found[number] for number in range(len(items))]

    def cross_views(self, spans: Sequence[SpanView], num_prompt: int) -> tuple[CrossView, ...]:
        """Return the view in which every position reads the audio."""
        return tuple(CrossView(0, None, span.num_states) for span in spans)

    def hidden(self, embeds_TH: Tensor, positions: Tensor) -> Tensor:
        """Return last hidden states (T, H)."""
        if current().cross is not None:
            embeds_TH = embeds_TH + states_at(0, positions.reshape(-1)).flatten(1)
        hidden_TH: Tensor = self.layers(embeds_TH.unsqueeze(0), positions)[0]
        return hidden_TH
