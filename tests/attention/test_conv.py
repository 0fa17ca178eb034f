"""Short convolutions on the paged cache against PyTorch's own, sequence by sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from beheld.attention import conv
from beheld.attention.backend import AttnMetadata, GroupMetadata
from beheld.attention.context import ForwardContext, forward_context
from beheld.attention.conv import LayerInputs, convolve
from beheld.attention.torch_ref import TorchBackend
from beheld.core.errors import ModelError

CHANNELS, BLOCK = 5, 4
LAYER = SimpleNamespace(layer_idx=7)


class Paged:
    """A few sequences in one cache, computed piece by piece."""

    def __init__(self, num_sequences: int, most: int, length: int, *, bias: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = [torch.randn(most, CHANNELS, generator=generator) for _ in range(num_sequences)]
        self.weight = torch.randn(CHANNELS, length, generator=generator)
        self.bias = torch.randn(CHANNELS, generator=generator) if bias else None
        blocks = -(-most // BLOCK)
        order = torch.randperm(num_sequences * blocks, generator=generator) + 1
        self.tables = order.view(num_sequences, blocks).int()
        keys = torch.full((num_sequences * blocks + 1, BLOCK, CHANNELS), float("nan"))
        keys[0] = 0.0
        self.window = length
        self.kv = LayerInputs(keys, 0)

    def run(self, pieces: list[tuple[int, int, int]], *, padding: int = 0) -> list[torch.Tensor]:
        """Compute (sequence, start, stop) in one step; with padding, as a captured pass has its numbers."""
        counts = [stop - start for _, start, stop in pieces]
        slots = [int(self.tables[s, p // BLOCK]) * BLOCK + p % BLOCK for s, a, b in pieces for p in range(a, b)]
        bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        starts = torch.tensor([start for _, start, _ in pieces], dtype=torch.int32)
        group = GroupMetadata(torch.tensor(slots + [0] * padding), self.tables[[s for s, _, _ in pieces]], self.window)
        metadata = AttnMetadata(
            num_decodes=0,
            starts=tuple(starts.tolist()),
            lengths=tuple(stop for _, _, stop in pieces),
            lengths_B=torch.tensor([stop for _, _, stop in pieces], dtype=torch.int32),
            cu_q_B1=bounds,
            groups=(group,),
            block_size=BLOCK,
            starts_B=starts if padding else None,
        )
        x = torch.cat([self.x[s][a:b] for s, a, b in pieces] + [torch.full((padding, CHANNELS), 3.0)])
        with forward_context(ForwardContext(TorchBackend(), metadata, {7: self.kv})) as context:
            out = convolve(LAYER, x, self.weight, self.bias)
        assert context.called == {7: 1}
        return list(out[: sum(counts)].split(counts))

    def expected(self, sequence: int, start: int, stop: int) -> torch.Tensor:
        """The same by PyTorch, over the whole sequence."""
        channels, length = self.weight.shape
        x = self.x[sequence][:stop].t().unsqueeze(0)
        out = torch.nn.functional.conv1d(x, self.weight.unsqueeze(1), self.bias, padding=length - 1, groups=channels)
        return out[0, :, start:stop].t()

    def check(self, pieces: list[tuple[int, int, int]], *, padding: int = 0) -> None:
        for piece, out in zip(pieces, self.run(pieces, padding=padding), strict=True):
            torch.testing.assert_close(out, self.expected(*piece), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 3, 4, 9])
@pytest.mark.parametrize("padding", [0, 3])
def test_pieces_of_several_sequences_join(length: int, padding: int) -> None:
    paged = Paged(3, 14, length, bias=padding > 0)
    paged.check([(0, 0, 5), (1, 0, 1)], padding=padding)
    paged.check([(0, 5, 6), (1, 1, 9), (2, 0, 3)], padding=padding)
    paged.check([(0, 6, 7), (1, 9, 10), (2, 3, 14)], padding=padding)


def test_a_step_that_is_launched_again_gives_the_same() -> None:
    paged = Paged(2, 8, 3)
    paged.check([(0, 0, 4), (1, 0, 2)])
    for _ in range(2):
        paged.check([(0, 4, 6), (1, 2, 3)])


def test_the_result_lies_as_compiled_code_was_told() -> None:
    """Inputs as the model's transposed product leaves them: the compiler had been told of a result like these."""
    paged = Paged(2, 9, 3)
    paged.x = [x.t().contiguous().t() for x in paged.x]
    out_TC = torch.cat(paged.run([(0, 0, 9)]))
    told = conv._convolve_shape(paged.x[0], torch.tensor(7), paged.weight, None)
    assert out_TC.stride() == told.stride() == (CHANNELS, 1)


def test_a_cache_of_another_length_is_refused() -> None:
    paged = Paged(1, 4, 3)
    paged.window = 2
    with pytest.raises(ModelError, match="convolves 3 positions, but its cache was made for 2"):
        paged.run([(0, 0, 2)])
