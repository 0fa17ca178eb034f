"""int8 weights made at load, multiplied by activations in 8 bits, on a CPU.

A product: x = step_T q_x and W = scale_N q_W with q in int8 from -127 to 127, one step per row of x and one scale per
output of W. Then x W^T = (q_x q_W^T) scale_N step_T, where the sums are of whole numbers and exact. So a row's result
has the same bits alone and among others, whatever the kernel.

oneDNN multiplies unsigned activations: q_x + 128, with the zero point 128.

Shapes: T rows of x, S rows of experts (a token and one of its experts), G experts, C choices per token, K inputs,
N outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from beheld.core.errors import ModelError
from beheld.quant.linear import ShardUnits, StoredExperts, StoredLinear, joined_bias, plain
from beheld.quant.method import Replace, TextOf
from beheld.quant.row_counts import padded_rows
from beheld.utils.log import get_logger

logger = get_logger(__name__)

NAME = "int8"
MOST = 127.0
_ZERO = 128
# A row of zeros has this step, and so has a weight's output of zeros.
_LEAST = 1e-30
# Greater weights are NaN or infinity, or come near it.
_GREATEST = 1e18
# Smaller layers decide more than they compute: routers, gates of shared experts.
_FEWEST_OUTPUTS = 16
# Numbers that are rounded at a time, so that the largest weight takes little memory beyond its own.
_CHUNK = 1 << 22
_EXPERTS = ("gate_up_proj", "down_proj")


def rounded_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers plus 128 in uint8 (T, K), and steps in float32 (T, 1); each row's largest becomes 127."""
    exact_TK = x_TK.float()
    step_T1 = exact_TK.abs().amax(-1, keepdim=True).clamp_(min=_LEAST).div_(MOST)
    # Conversions to int8 are vectorized, those to uint8 are not.
    whole_TK = (exact_TK / step_T1).round_().to(torch.int8)
    # The highest bit turned over adds 128.
    return whole_TK.view(torch.uint8).bitwise_xor_(_ZERO), step_T1


def rounded_weight(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers in int8 (N, K) and scales in float32 (N,); each output's largest becomes 127.

    Raises:
        ModelError: a weight is NaN or infinity, or comes near it.
    """
    rows_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    scale_N = torch.empty(weight_NK.shape[0])
    step = max(1, _CHUNK // weight_NK.shape[1])
    for start in range(0, weight_NK.shape[0], step):
        exact_MK = weight_NK[start : start + step].float()
        largest_M = exact_MK.abs().amax(1)
        if not float(largest_M.amax()) < _GREATEST:
            raise ModelError(
                "Weights hold NaN or infinity, or come near it.",
                "Fetch the checkpoint again, or ask its publisher: no answer could be computed with them.",
            )
        scale_M = largest_M.clamp_(min=_LEAST).div_(MOST)
        rows_NK[start : start + step] = (exact_MK / scale_M.unsqueeze(1)).round_().to(torch.int8)
        scale_N[start : start + step] = scale_M
    return rows_NK, scale_N


class Int8Linear(StoredLinear):
    """A linear layer with int8 weights in oneDNN's order, which rounds its input to 8 bits by row.

    Attributes:
        scale_N: each output's scale.
        weight: empty; gives type and device to models that ask for them.
        packed_bytes: the bytes of the weights.
    """

    cuts_in_place: ClassVar[bool] = False

    def __init__(self, rows_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = rows_NK.shape
        self.scale_N = nn.Parameter(scale_N, requires_grad=False)
        self.bias = None if bias_N is None else nn.Parameter(bias_N, requires_grad=False)
        self.weight = torch.empty(0, dtype=dtype)
        self.packed_bytes = rows_NK.numel()
        self._packed = torch.ops.onednn.qlinear_prepack(rows_NK.contiguous(), None)
        self._zero_N = torch.zeros(self.out_features, dtype=torch.int32)

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """Round the weights of a plain linear layer."""
        rows_NK, scale_N = rounded_weight(linear.weight.data)
        return cls(rows_NK, scale_N, None if linear.bias is None else linear.bias.data, linear.weight.dtype)

    @property
    def rows_NK(self) -> Tensor:
        """Return the whole numbers, copied from oneDNN's order."""
        return self._packed.to_dense().t()

    @property
    def units(self) -> ShardUnits:
        """Return 1: any layer can be cut anywhere."""
        return ShardUnits()

    @classmethod
    def joined(cls, layers: Sequence[Int8Linear]) -> Int8Linear:
        """Join several layers with the same input into one; exact, because each output keeps its scale."""
        rows_NK = torch.cat([layer.rows_NK for layer in layers])
        scale_N = torch.cat([layer.scale_N.data for layer in layers])
        return cls(rows_NK, scale_N, joined_bias(layers), layers[0].weight.dtype)

    def part(self, outputs: slice) -> Int8Linear:
        """Return a layer of these outputs alone."""
        bias = None if self.bias is None else self.bias.data[outputs]
        return Int8Linear(self.rows_NK[outputs], self.scale_N.data[outputs], bias, self.weight.dtype)

    def input_part(self, inputs: slice) -> Int8Linear:
        """Return a layer of these inputs alone; activations are then rounded by this part alone."""
        return Int8Linear(self.rows_NK[:, inputs], self.scale_N.data, None, self.weight.dtype)

    def restored(self) -> nn.Module:
        """Return a plain linear layer with the dequantized weights."""
        weight_NK = self.rows_NK.float() * self.scale_N.data.unsqueeze(1)
        return plain(weight_NK.to(self.weight.dtype), None if self.bias is None else self.bias.data)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""
        rows = x.numel() // self.in_features
        x_TK = x.reshape(rows, self.in_features)
        padded = padded_rows(rows)
        if padded != rows:
            x_TK = nn.functional.pad(x_TK, (0, 0, 0, padded - rows))
        whole_TK, step_T1 = rounded_rows(x_TK)
        y_TN = torch.ops.onednn.qlinear_pointwise(
            whole_TK, 1.0, _ZERO, self._packed, self.scale_N, self._zero_N, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y_TN = y_TN.mul_(step_T1) if self.bias is None else torch.addcmul(self.bias.float(), y_TN, step_T1)
        y_TN = y_TN if padded == rows else y_TN[:rows]
        return y_TN.to(x.dtype).view(*x.shape[:-1], self.out_features)


class Int8Experts(StoredExperts):
    """int8 experts in place of transformers' experts: two products for each chosen expert, gate and up as one.

    The experts' own method computes what happens between the two products.

    Args:
        shell: the module that this one replaces; its weights are gone.
        gate_up, down: each expert's layers.
    """

    def __init__(self, shell: nn.Module, gate_up: Sequence[Int8Linear], down: Sequence[Int8Linear]) -> None:
        super().__init__()
        self.shell = shell
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)
        self.num_experts = len(gate_up)

    @classmethod
    def of(cls, experts: Any) -> Int8Experts:
        """Round the weights of transformers' experts, one expert at a time; `experts` loses them."""
        made: list[list[Int8Linear]] = []
        for name in _EXPERTS:
            weight_GNK = getattr(experts, name).data
            weight_GNK = weight_GNK.transpose(1, 2) if experts.is_transposed else weight_GNK
            made.append([Int8Linear.of(plain(weight_NK, None)) for weight_NK in weight_GNK])
            setattr(experts, name, None)
        return cls(experts, *made)

    def part(self, experts: slice) -> Int8Experts:
        """Return a module of these experts alone, sharing memory."""
        return Int8Experts(self.shell, list(self.gate_up)[experts], list(self.down)[experts])  # type: ignore[arg-type]

    def restored(self) -> nn.Module:
        """Return transformers' module with the dequantized weights."""
        for name, layers in zip(_EXPERTS, (self.gate_up, self.down), strict=True):
            weight_GNK = torch.stack([layer.restored().weight for layer in layers])  # type: ignore[operator]
            weight_GNK = weight_GNK.transpose(1, 2).contiguous() if self.shell.is_transposed else weight_GNK
            setattr(self.shell, name, nn.Parameter(weight_GNK, requires_grad=False))
        return self.shell

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts: hidden_states (T, K), choices (T, C) and their weights -> (T, K); choice G means none."""
        choices_S = top_k_index.reshape(-1)
        counts = torch.bincount(choices_S, minlength=self.num_experts).tolist()[: self.num_experts]
        # Rows in the order of their experts; rows without one come last, and are zero.
        order_S = choices_S.argsort(stable=True)
        x_SK = hidden_states.index_select(0, order_S[: sum(counts)] // top_k_index.shape[1])
        inner = self.shell._apply_gate(_by_expert(self.gate_up, x_SK, counts))  # type: ignore[operator]
        y_SK = hidden_states.new_zeros((len(choices_S), hidden_states.shape[1]))
        y_SK.index_copy_(0, order_S[: sum(counts)], _by_expert(self.down, inner, counts))
        # A token's terms are added in the order of its choices, whatever other tokens chose.
        y_TCK = y_SK.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return y_TCK.sum(1).to(hidden_states.dtype)


def _by_expert(layers: nn.ModuleList, x_SK: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply each expert's layer to its rows, `counts` of them in order."""
    chosen = [(layer, count) for layer, count in zip(layers, counts, strict=True) if count]
    if not chosen:
        return x_SK.new_empty((0, layers[0].out_features))  # type: ignore[arg-type]
    parts = x_SK.split([count for _, count in chosen])
    return torch.cat([layer(part) for (layer, _), part in zip(chosen, parts, strict=True)])


class Int8:
    """See QuantMethod: the text model's linear layers and experts, and the head; towers and embeddings stay."""

    name = NAME
    converted = ""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def config(self, hf_config: Any) -> Any:
        """Return the configuration unchanged."""
        return hf_config

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return None: the loader reads the files itself, and on a CPU maps them into memory."""
        return None

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return the class unchanged."""
        return model_class

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Replace layers one by one, so that only one layer's weights are ever held twice."""
        linears = experts = size = 0
        for parent, name, child in _covered(model, text_of(model), self._dtype):
            made: Any = Int8Linear.of(child) if isinstance(child, nn.Linear) else Int8Experts.of(child)
            linears, experts = linears + isinstance(made, Int8Linear), experts + isinstance(made, Int8Experts)
            size += sum(getattr(module, "packed_bytes", 0) for module in made.modules())
            if _tied(model, child):
                replace(parent, name, made, lambda module: _tied_again(model, module))
            else:
                replace(parent, name, made, lambda module: module.restored())  # type: ignore[operator]
            # The loop's own reference would keep the old weights during the next layer.
            del child, made
        logger.info(
            "quantization='int8': %d linear layers and %d blocks of experts of the text model and the head are int8, "
            "%.2f GiB; activations are rounded to 8 bits by row. Embeddings and towers keep their type.",
            linears,
            experts,
            size / 2**30,
        )
        left = [name for name, parameter in text_of(model).named_parameters() if parameter.dim() > 2]
        if left:
            logger.warning(
                "%d weights of the text model's experts or convolutions are not made int8 because of their form, for "
                "example %r: they keep their type.",
                len(left),
                left[0],
            )

    def stored_bytes(self, path: Path, model: Any, text_of: TextOf) -> int | None:
        """Return the bytes of a model on the meta device with these layers in one byte per number."""
        total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        for _, _, child in _covered(model, text_of(model), self._dtype):
            for weight in child.parameters():
                if weight.dim() > 1:
                    total += weight.numel() + 4 * math.prod(weight.shape[:-1])
                    total -= 0 if _tied(model, child) else weight.numel() * weight.element_size()
        return total


def make(stated: Mapping[str, Any], device: str, dtype: torch.dtype) -> Int8:
    """Return the method; see quant/method.py."""
    return Int8(dtype)


def _covered(model: Any, text: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """List what becomes int8, lazily, so that replaced layers are let go: parent, name and module."""
    for module in text.modules():
        routes = any("experts" in name for name, _ in module.named_children())
        for name in [name for name, _ in module.named_children()]:
            if not (routes and name in ("gate", "router")) and _takes(module.get_submodule(name), dtype):
                yield module, name, module.get_submodule(name)
    head = model.get_output_embeddings()
    inside = any(module is head for module in text.modules())
    if not inside and _takes(head, dtype):
        path = next(name for name, module in model.named_modules() if module is head)
        yield model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], head


def _takes(module: Any, dtype: torch.dtype) -> bool:
    if type(module) is nn.Linear:
        return bool(module.weight.dtype == dtype and module.weight.numel() and module.out_features >= _FEWEST_OUTPUTS)
    return _are_experts(module, dtype)


def _are_experts(module: Any, dtype: torch.dtype) -> bool:
    """Return whether a module declares gated experts without biases and norms."""
    if not getattr(module, "has_gate", False) or getattr(module, "has_bias", True):
        return False
    if getattr(module, "has_post_expert_norm", False) or not hasattr(module, "is_transposed"):
        return False
    weights = [getattr(module, name, None) for name in _EXPERTS]
    whole = all(isinstance(w, Tensor) and w.dim() == 3 and w.dtype == dtype and bool(w.numel()) for w in weights)
    return whole and hasattr(module, "_apply_gate")


def _tied(model: Any, module: nn.Module) -> bool:
    """Return whether this is a head that shares the embeddings' weights."""
    return module is model.get_output_embeddings() and module.weight is model.get_input_embeddings().weight


def _tied_again(model: Any, module: Any) -> nn.Module:
    """Return the head that an int8 head replaced, which shares the embeddings' weights."""
    linear: nn.Module = module.restored()
    linear.weight = model.get_input_embeddings().weight
    return linear
