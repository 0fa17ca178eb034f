"""Experts that keep MXFP4 numbers on a GPU: the products of the dequantized weights, read in a quarter of the bytes.

Activations are not rounded, except numbers far below their row's largest one (mxfp4_kernel.py).

Shapes: T tokens, S slots (see slots.py), E experts, K inputs, N outputs, G groups of 32 inputs, X of 128, J bytes
of an output, C choices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from beheld.platform import operators
from beheld.platform.registry import platform_of
from beheld.quant import slots as _slots  # noqa: F401 (defines operators)
from beheld.quant.float8 import FP8
from beheld.quant.linear import OneRowExperts

GROUP = 32
# The greatest exponent, 2^64, that the kernel of a single row takes.
MOST_EXPONENT = 191
# Inputs whose exponents are one word.
STEP = 128
# From this many slots per expert on, weights are dequantized for a call.
_MANY = 256
# The numbers of four bits: a sign, two bits of an exponent and one of a fraction.
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127


def fits(outputs: int, inputs: int) -> bool:
    """Return whether the kernel multiplies weights of this shape."""
    return outputs % 16 == 0 and inputs % GROUP == 0


def padded(inputs: int) -> int:
    """Return the number of inputs that are stored, the last ones as zeros."""
    return inputs + -inputs % STEP


def repacked(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return bytes (E, N, K / 2) and exponents (E, K / 128, N) in the kernel's order, with K padded to 128.

    Args:
        blocks: (E, N, G, 16), see mxfp4.py.
        scales: (E, N, G).
    """
    more = -scales.shape[2] % (STEP // GROUP)
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    numbers, scales = nn.functional.pad(numbers, (0, 0, 0, more)), nn.functional.pad(scales, (0, more))
    early, late = numbers.unflatten(2, (-1, 2)).unbind(3)
    words = scales.contiguous().view(torch.int32)
    return (early | (late << 4)).flatten(2), words.transpose(1, 2).contiguous()


def unpacked(weight: Tensor, exponents: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return `repacked`'s arguments, of this many groups."""
    bytes_ = weight.unflatten(2, (-1, GROUP))
    numbers = torch.stack([bytes_ & 15, bytes_ >> 4], 3).flatten(2, 3)
    scales = exponents.transpose(1, 2).contiguous().view(torch.uint8)
    return (numbers[..., ::2] | (numbers[..., 1::2] << 4))[:, :, :groups], scales[..., :groups]


def parted(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 terms (T, 2, K), with K padded to 128, and scales (T,) in float32: x = (first + second) * scale."""
    size = padded(x_TK.shape[1])
    if platform_of(x_TK.device).has_triton:
        from beheld.quant import mxfp4_kernel

        x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
        terms_T2K = torch.empty((x_TK.shape[0], 2, size), dtype=FP8, device=x_TK.device)
        scale_T = torch.empty(x_TK.shape[0], dtype=torch.float32, device=x_TK.device)
        mxfp4_kernel.parted_rows(x_TK, terms_T2K, scale_T)
        return terms_T2K, scale_T
    exact_TK = nn.functional.pad(x_TK.float(), (0, size - x_TK.shape[1]))
    exponent_T = exact_TK.abs().amax(-1).frexp().exponent - 8
    scale_T = torch.ldexp(torch.ones_like(exact_TK[:, 0]), exponent_T.clamp(-126, 126))
    exact_TK = exact_TK / scale_T.unsqueeze(-1)
    high_TK = exact_TK.to(FP8).float()
    return torch.stack([high_TK, exact_TK - high_TK], 1).to(FP8), scale_T


def dequantized(blocks_EOGB: Tensor, scales_EOG: Tensor) -> Tensor:
    """Return the numbers (E, I, O) of a checkpoint's blocks and scales, in bfloat16, which holds each of them."""
    device = blocks_EOGB.device
    values = torch.tensor(FOUR_BITS, dtype=torch.bfloat16, device=device)
    # A byte's two numbers at once: there are only 256 pairs.
    byte = torch.arange(256, device=device)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
    experts, outputs = scales_EOG.shape[:2]
    found = torch.empty(experts, 2 * blocks_EOGB[0, 0].numel(), outputs, dtype=torch.bfloat16, device=device)
    # One expert at a time: indices take eight bytes for each of the two numbers that a byte holds.
    for own_OGB, exponents_OG, out_IO in zip(blocks_EOGB, scales_EOG, found, strict=True):
        ones_OG = torch.ones(exponents_OG.shape, device=device)
        factors_OG1 = torch.ldexp(ones_OG, exponents_OG.int() - _BIAS).unsqueeze(-1)
        numbers_OGB2 = pairs[own_OGB.int()]
        out_IO.copy_((numbers_OGB2.flatten(2) * factors_OG1).flatten(1).t())
    return found


def _grouped(
    x_TK: Tensor,
    weight_ENJ: Tensor,
    exponent_EXN: Tensor,
    bias_EN: Tensor | None,
    order_S: Tensor,
    starts_E1: Tensor,
    share: int,
) -> Tensor:
    """Return (S, N): slot s is row s // share of x times its expert's matrix; slots without one are undefined."""
    slots, (experts, outputs, _) = order_S.shape[0], weight_ENJ.shape
    y_SN = x_TK.new_empty((slots, outputs))
    platform = platform_of(x_TK.device)
    if not platform.has_triton:
        weight_EKN = dequantized(*unpacked(weight_ENJ, exponent_EXN, x_TK.shape[1] // GROUP)).float()
        for expert, (start, stop) in enumerate(itertools.pairwise(starts_E1.tolist())):
            slots_M = order_S[start:stop]
            y_MN = x_TK[slots_M // share].float() @ weight_EKN[expert]
            y_SN[slots_M] = (y_MN if bias_EN is None else y_MN + bias_EN[expert]).to(x_TK.dtype)
        return y_SN
    from beheld.quant import mxfp4_kernel

    if slots > _MANY * experts and platform.grouped_products:
        weight_ENK = x_TK.new_empty((experts, outputs, x_TK.shape[1]))
        mxfp4_kernel.dequantized(weight_ENJ, exponent_EXN, weight_ENK)
        rows_SK = x_TK.index_select(0, order_S // share)
        found_SN = nn.functional.grouped_mm(rows_SK, weight_ENK.transpose(1, 2), offs=starts_E1[1:])
        if bias_EN is not None:
            place_S = torch.arange(slots, device=x_TK.device, dtype=torch.int32)
            own_S = torch.searchsorted(starts_E1[1:], place_S, right=True).clamp_(max=experts - 1)
            found_SN += bias_EN.index_select(0, own_S)
        return y_SN.index_copy_(0, order_S, found_SN)
    count = platform.kernel_facts(x_TK.device).multiprocessors
    mxfp4_kernel.grouped_product(
        *parted(x_TK), weight_ENJ, exponent_EXN, bias_EN, order_S, starts_E1, y_SN, share, count
    )
    return y_SN


def _grouped_shape(
    x_TK: Tensor,
    weight_ENJ: Tensor,
    exponent_EXN: Tensor,
    bias_EN: Tensor | None,
    order_S: Tensor,
    starts_E1: Tensor,
    share: int,
) -> Tensor:
    """Describe the result for torch.compile."""
    return x_TK.new_empty((order_S.shape[0], weight_ENJ.shape[1]))


# A registered operator, so that torch.compile sees an opaque call.
operators.register(
    "mxfp4_grouped(Tensor x, Tensor weight, Tensor exponent, Tensor? bias, Tensor order, Tensor starts, int share)"
    " -> Tensor",
    _grouped,
    _grouped_shape,
)


def _row(
    x_CK: Tensor,
    weight_ENJ: Tensor,
    exponent_EXN: Tensor,
    bias_EN: Tensor | None,
    choices_1C: Tensor,
    shares_1C: Tensor | None,
) -> Tensor:
    """Return (C, N): a row times each chosen expert's matrix; or with shares the sum (1, N) of each row's."""
    from beheld.quant import mxfp4_row_kernel

    choice_C = choices_1C.reshape(-1).contiguous()
    share_C = None if shares_1C is None else shares_1C.reshape(-1).contiguous()
    early = platform_of(x_CK.device).kernel_facts(x_CK.device).early_launch
    y: Tensor = mxfp4_row_kernel.row(
        x_CK.contiguous(), weight_ENJ, exponent_EXN, bias_EN, choice_C, share_C, early=early
    )
    return y if share_C is None else y.unsqueeze(0)


def _row_shape(
    x_CK: Tensor,
    weight_ENJ: Tensor,
    exponent_EXN: Tensor,
    bias_EN: Tensor | None,
    choices_1C: Tensor,
    shares_1C: Tensor | None,
) -> Tensor:
    """Describe the result for torch.compile."""
    rows = choices_1C.shape[1] if shares_1C is None else 1
    return x_CK.new_empty((rows, weight_ENJ.shape[1]))


operators.register(
    "mxfp4_row(Tensor x, Tensor weight, Tensor exponent, Tensor? bias, Tensor choices, Tensor? shares) -> Tensor",
    _row,
    _row_shape,
)


class MXFP4Experts(OneRowExperts):
    """MXFP4 experts in place of transformers' experts; gate and up are one matrix.

    The experts' own method computes what happens between the two products.

    Args:
        shell: the module that this one replaces; it has the biases, and its weights are gone.
        gate_up, down: see `repacked`.
        groups: of inputs of gate and up, and of down, without padding.
    """

    _names: ClassVar[tuple[str, ...]] = ("gate_up", "down")

    def __init__(
        self, shell: nn.Module, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], groups: Sequence[int]
    ) -> None:
        super().__init__()
        self.shell = shell
        self._groups = tuple(groups)
        for name, (weight_ENJ, exponent_EXN) in zip(self._names, (gate_up, down), strict=True):
            self.register_parameter(f"{name}_bytes", nn.Parameter(weight_ENJ, requires_grad=False))
            self.register_parameter(f"{name}_exponent", nn.Parameter(exponent_EXN, requires_grad=False))
            bias_EN = getattr(shell, f"{name}_proj_bias", None)
            self.register_parameter(f"{name}_bias", bias_EN)
            setattr(shell, f"{name}_proj_bias", None)
        self.num_experts: int = gate_up[0].shape[0]

    def part(self, experts: slice) -> MXFP4Experts:
        """Return a module of these experts alone, sharing memory."""
        for name in self._names:
            bias_EN = getattr(self, f"{name}_bias")
            own_EN = None if bias_EN is None else nn.Parameter(bias_EN.data[experts], requires_grad=False)
            setattr(self.shell, f"{name}_proj_bias", own_EN)
        parts = ("bytes", "exponent")
        gate_up, down = ([getattr(self, f"{name}_{part}").data[experts] for part in parts] for name in self._names)
        return MXFP4Experts(self.shell, (gate_up[0], gate_up[1]), (down[0], down[1]), self._groups)

    def restored(self) -> nn.Module:
        """Return transformers' module with the dequantized weights, in bfloat16."""
        for name, groups in zip(self._names, self._groups, strict=True):
            stored = getattr(self, f"{name}_bytes").data, getattr(self, f"{name}_exponent").data
            entries = unpacked(*stored, groups)
            setattr(self.shell, f"{name}_proj", nn.Parameter(dequantized(*entries), requires_grad=False))
            setattr(self.shell, f"{name}_proj_bias", getattr(self, f"{name}_bias"))
        return self.shell

    @property
    def inputs(self) -> int:
        """Return the number of inputs, without padding."""
        return self._groups[0] * GROUP

    @property
    def dtype(self) -> torch.dtype:
        """Return the biases' type, or bfloat16 without biases."""
        bias_EN = self.down_bias
        return bias_EN.dtype if isinstance(bias_EN, Tensor) else torch.bfloat16

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts: hidden_states (T, K), choices (T, C) and their weights -> (T, K)."""
        # Under torch.compile one row and several rows compile separately anyway.
        if self.one_row and hidden_states.shape[0] == 1:
            return self._row(hidden_states, top_k_index, top_k_weights)
        choices = top_k_index.shape[-1]
        order_S, starts_E1 = torch.ops.beheld.expert_slots(top_k_index, self.num_experts)
        grouped = torch.ops.beheld.mxfp4_grouped
        inner_SN = grouped(
            hidden_states, self.gate_up_bytes, self.gate_up_exponent, self.gate_up_bias, order_S, starts_E1, choices
        )
        gated_SK = self.shell._apply_gate(inner_SN)  # type: ignore[operator]
        out_SK = grouped(gated_SK, self.down_bytes, self.down_exponent, self.down_bias, order_S, starts_E1, 1)
        return self._summed(out_SK, top_k_index, top_k_weights).to(hidden_states.dtype)

    def _row(self, x_1K: Tensor, choices_1C: Tensor, shares_1C: Tensor) -> Tensor:
        row = torch.ops.beheld.mxfp4_row
        inner_CN = row(x_1K, self.gate_up_bytes, self.gate_up_exponent, self.gate_up_bias, choices_1C, None)
        gated_CK = self.shell._apply_gate(inner_CN)  # type: ignore[operator]
        out_1K: Tensor = row(gated_CK, self.down_bytes, self.down_exponent, self.down_bias, choices_1C, shares_1C)
        return out_1K.to(x_1K.dtype)
