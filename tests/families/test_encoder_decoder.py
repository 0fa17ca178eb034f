"""What encoder-decoders of all families share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld.core.errors import StepError
from beheld.families._shared.encoder_decoder import EncoderDecoder


class Encoder(nn.Module):
    """Doubles what it gets, and records how many items it gets at once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Any:
        """Double (I, E, S)."""
        self.calls.append(len(x))
        return SimpleNamespace(last_hidden_state=2 * x)


@pytest.fixture
def reader() -> tuple[EncoderDecoder, Encoder]:
    encoder = Encoder()
    decoder = SimpleNamespace(layers=[])
    inner = SimpleNamespace(encoder=encoder, decoder=decoder)
    model = SimpleNamespace(model=inner, get_input_embeddings=lambda: nn.Embedding(2, 3))
    return EncoderDecoder(model), encoder


def item(value: float, length: int, count: int | None = None) -> Any:
    return SimpleNamespace(features={"x": torch.full((1, length, 3), value)}, num_embeds=count or length)


def test_items_of_the_same_shape_are_computed_together(reader: tuple[EncoderDecoder, Encoder]) -> None:
    cross, encoder = reader
    states = cross.states([item(1, 4), item(2, 5), item(3, 4, 2), item(4, 5)])
    assert [tuple(each.shape) for each in states] == [(4, 3), (5, 3), (2, 3), (5, 3)]
    assert [each.unique().tolist() for each in states] == [[2], [4], [6], [8]]
    assert encoder.calls == [2, 2]


def test_an_item_without_enough_states_fails(reader: tuple[EncoderDecoder, Encoder]) -> None:
    with pytest.raises(StepError, match="the encoder makes 4 states of it; 6 were expected"):
        reader[0].states([item(1, 4, 6)])
