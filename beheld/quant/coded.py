"""Weights stored as codes of few bits with scales and dequantized in each product, made at load on a CPU: NF4, FP8.

They save memory and no time. Activations are not rounded: a product is that of the dequantized weights.

    nf4   4 bits that number 16 values, quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E), and
          one scale for each group of inputs
    fp8   float8_e4m3fn, and one scale for each output

Shapes: T rows of x, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from beheld.quant.at_load import RoundedAtLoad
from beheld.quant.float8 import FP8, MOST
from beheld.quant.grouped import check_greatest
from beheld.quant.grouped_linear import fitting_group
from beheld.quant.linear import StoredLinear, bias_of, joined_bias
from beheld.quant.listed_experts import ListedExperts
from beheld.quant.method import StorageTarget

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_GROUP = 64
# Numbers that are dequantized at a time.
_CHUNK = 1 << 21
# A group of zeros has this scale.
_LEAST = 1e-30


class CodedLinear(StoredLinear):
    """A linear layer whose weights are codes, which each product dequantizes, some outputs at a time.

    Attributes:
        codes_NX: what is stored of each output.
        scale_NG: float32.
    """

    def __init__(self, codes_NX: Tensor, scale_NG: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__((codes_NX.shape[0], self.inputs_of(codes_NX)), bias_N, dtype)
        self.codes_NX = nn.Parameter(codes_NX, requires_grad=False)
        self.scale_NG = nn.Parameter(scale_NG, requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """Round the weights of a plain linear layer.

        Raises:
            ModelError: a weight is NaN or infinity, or comes near it.
        """
        weight_NK = linear.weight.data
        rows = max(1, _CHUNK // weight_NK.shape[1])
        parts = []
        for exact_MK in weight_NK.split(rows):
            check_greatest(exact_MK.abs())
            parts.append(cls.rounded(exact_MK.float()))
        codes_NX, scale_NG = (torch.cat(each) for each in zip(*parts, strict=True))
        return cls(codes_NX, scale_NG, bias_of(linear), weight_NK.dtype)

    @staticmethod
    @abstractmethod
    def rounded(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of weights in float32."""

    @staticmethod
    @abstractmethod
    def inputs_of(codes_NX: Tensor) -> int:
        """Return K."""

    @staticmethod
    @abstractmethod
    def decoded(codes_NX: Tensor, scale_NG: Tensor) -> Tensor:
        """Return weights in float32, (N, K)."""

    @classmethod
    def joined(cls, layers: Sequence[Self]) -> Self:
        """Join several layers with the same input into one; exact, because each output keeps its scales."""
        codes_NX, scale_NG = (torch.cat([getattr(layer, name).data for layer in layers]) for name in _FIELDS)
        return cls(codes_NX, scale_NG, joined_bias(layers), layers[0].weight.dtype)

    def joins(self, other: StoredLinear) -> bool:
        """Return whether the other layer has as many groups."""
        return isinstance(other, type(self)) and other.scale_NG.shape[1] == self.scale_NG.shape[1]

    def part(self, outputs: slice) -> Self:
        """Return a layer of these outputs alone, sharing memory."""
        codes_NX, scale_NG = self.codes_NX.data[outputs], self.scale_NG.data[outputs]
        return type(self)(codes_NX, scale_NG, bias_of(self, outputs), self.weight.dtype)

    def dequantized(self) -> Tensor:
        """Return the weights, (N, K)."""
        return torch.cat(list(self._weights()))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""
        parts = [nn.functional.linear(x, weight_MK.to(x.dtype)) for weight_MK in self._weights()]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if self.bias is None else y + self.bias

    def _weights(self) -> Any:
        """Yield the dequantized weights of some outputs after the other, in the type of the activations."""
        rows = max(1, _CHUNK // self.in_features)
        for codes_MX, scale_MG in zip(self.codes_NX.split(rows), self.scale_NG.split(rows), strict=True):
            yield self.decoded(codes_MX, scale_MG).to(self.weight.dtype)


_FIELDS = ("codes_NX", "scale_NG")


class NF4Linear(CodedLinear):
    """Two codes to a byte, the earlier input in the lower half."""

    # A byte's two values. int32 indexes fastest.
    _pairs: ClassVar[Tensor] = torch.tensor([[NF4_VALUES[byte & 15], NF4_VALUES[byte >> 4]] for byte in range(256)])
    _borders: ClassVar[Tensor] = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(NF4_VALUES)])

    @staticmethod
    def inputs_of(codes_NX: Tensor) -> int:
        """Return K."""
        return 2 * codes_NX.shape[1]

    @classmethod
    def rounded(cls, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales; each group's largest weight keeps its size."""
        group = fitting_group(weight_NK.shape[1], _GROUP)
        assert group is not None, "what does not fit is not rounded"
        exact = weight_NK.unflatten(1, (-1, group))
        scale_NG = exact.abs().amax(-1).clamp_(min=_LEAST)
        codes = torch.bucketize(exact / scale_NG.unsqueeze(-1), cls._borders, out_int32=True).to(torch.uint8).flatten(1)
        return codes[:, ::2] | (codes[:, 1::2] << 4), scale_NG

    @classmethod
    def decoded(cls, codes_NX: Tensor, scale_NG: Tensor) -> Tensor:
        """Return weights in float32, (N, K)."""
        values = nn.functional.embedding(codes_NX.int(), cls._pairs).flatten(1)
        return (values.unflatten(1, (scale_NG.shape[1], -1)) * scale_NG.unsqueeze(-1)).flatten(1)


class FP8Linear(CodedLinear):
    """float8_e4m3fn with one scale for each output."""

    @staticmethod
    def inputs_of(codes_NX: Tensor) -> int:
        """Return K."""
        return codes_NX.shape[1]

    @staticmethod
    def rounded(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales; each output's largest weight becomes 448."""
        scale_N1 = weight_NK.abs().amax(1, keepdim=True).clamp_(min=_LEAST).div_(MOST)
        return (weight_NK / scale_N1).clamp_(-MOST, MOST).to(FP8), scale_N1

    @staticmethod
    def decoded(codes_NX: Tensor, scale_NG: Tensor) -> Tensor:
        """Return weights in float32, (N, K)."""
        return codes_NX.float().mul_(scale_NG)


class CodedRounding:
    """See Rounding: linear layers and experts of the text model, without the head."""

    takes_head, takes_experts = False, True
    at_once = 1

    def __init__(self, name: str, kind: type[CodedLinear], words: str, bits: Callable[[int], float | None]) -> None:
        """Make the rounding.

        Args:
            bits: returns the bits of a weight with that many inputs; None if it cannot be rounded.
        """
        self.name, self.words = name, f"{words}, and dequantized in each product; activations are not rounded"
        self._kind, self._bits = kind, bits

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether the inputs can be divided into groups."""
        return self._bits(inputs) is not None

    def group(self, inputs: int) -> int | None:
        """Return how many inputs share a scale; None if all do."""
        return fitting_group(inputs, _GROUP) if self._kind is NF4Linear else None

    def linear(self, linear: nn.Linear, head: bool, alone: bool = True) -> StoredLinear:
        """Round the weights of a linear layer."""
        return self._kind.of(linear)

    def experts(self, experts: Any) -> ListedExperts:
        """Round the weights of experts, which lose them."""
        return ListedExperts.made(experts, self._kind.of)

    def kept_bytes(self, outputs: int, inputs: int, head: bool) -> int:
        """Return the bytes of a rounded weight."""
        bits = self._bits(inputs)
        assert bits is not None, "what does not fit is not rounded"
        return int(outputs * inputs * bits / 8)


def _nf4_bits(inputs: int) -> float | None:
    group = fitting_group(inputs, _GROUP)
    return None if group is None else 4 + 32 / group


def make_nf4(stated: Mapping[str, Any], target: StorageTarget) -> RoundedAtLoad:
    """Return the method; see quant/method.py."""
    words = f"NF4 in groups of up to {_GROUP} inputs with a scale each"
    return RoundedAtLoad(CodedRounding("nf4", NF4Linear, words, _nf4_bits), target.dtype)


def make_fp8(stated: Mapping[str, Any], target: StorageTarget) -> RoundedAtLoad:
    """Return the method; see quant/method.py."""
    words = "FP8 with a scale for each output"
    return RoundedAtLoad(CodedRounding("fp8", FP8Linear, words, lambda inputs: 8 + 32 / inputs), target.dtype)
