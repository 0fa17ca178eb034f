"""Surgery on a loaded model for speed; the results stay those of the model as it came, to rounding.

Shapes: M rows of activations, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from beheld.core.errors import first_line
from beheld.models.early import compile_options
from beheld.models.one_row import OneRowLinear, StandIn
from beheld.utils.gc_tuning import count_as_old
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Up to this many rows a library's matrix product, which tiles over rows, leaves most of the CPU idle.
_SMALL_ROWS = 64
# From so many rows on a product takes long.
_MANY_ROWS = 512


class SmallBatchLinear(StandIn):
    """A linear layer on a CPU that computes (W x^T)^T for few rows: the tiles then run along the many outputs.

    Measured on two AVX-512 cores, float32, 16 rows, 4096 x 1024: 170 GFLOP/s against 118 of `F.linear`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
        rows = x.numel() // self.in_features
        if not 1 < rows <= _SMALL_ROWS:
            return nn.functional.linear(x, self.weight, self.bias)
        x_MI = x.reshape(rows, self.in_features)
        if self.bias is None:
            y_OM = torch.mm(self.weight, x_MI.t())
        else:
            y_OM = torch.addmm(self.bias.unsqueeze(1), self.weight, x_MI.t())
        # Some models call .view on what a layer gives.
        return y_OM.t().contiguous().view(*x.shape[:-1], self.out_features)


class PackedLinear(nn.Module):
    """A linear layer on a CPU whose weights lie in oneDNN's own blocked order, so that they are read in one stream.

    Measured on two AVX-512 cores, float32, 65536 x 1024: at 1, 16 and 832 rows 20, 243 and 363 GFLOP/s against 11, 65
    and 181 of `F.linear`; the error is float32's own. The order serves any number of rows.

    Attributes:
        weight: empty; it only tells type and device to models that ask for them.
        packed_bytes: what the weights take.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.weight = linear.weight.data.new_empty(0)
        self.packed_bytes = linear.weight.numel() * linear.weight.element_size()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
        rows = x.numel() // self.in_features
        padded = padded_rows(rows)
        if padded == rows:
            return self._product(x)
        if rows >= _MANY_ROWS and self.out_features < self.in_features:
            y_MO = self._in_two(x.reshape(rows, self.in_features), rows - rows % _step(rows))
        else:
            y_MO = self._product(_padded(x, rows, padded))[:rows]
        return y_MO.view(*x.shape[:-1], self.out_features)

    def _in_two(self, x_MI: Tensor, whole: int) -> Tensor:
        """The first `whole` rows as they lie, then the others: what comes out is less to copy than what goes in."""
        return torch.cat([self._product(x_MI[:whole]), self(x_MI[whole:])])

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


class PaddedLinear(StandIn):
    """A linear layer on a CPU in bfloat16 or float16, whose product has few numbers of rows; see padded_rows.

    The weights stay in their order: in oneDNN's a product of one row is not always the same to the last bit.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
        rows = x.numel() // self.in_features
        padded = padded_rows(rows)
        if padded == rows:
            return nn.functional.linear(x, self.weight, self.bias)
        y_MO = nn.functional.linear(_padded(x, rows, padded), self.weight, self.bias)
        return y_MO[:rows].view(*x.shape[:-1], self.out_features)


def padded_rows(rows: int) -> int:
    """With how many rows oneDNN computes the product of `rows`: the same up to 16, then one of 8 sizes per doubling,
    and of 16 from `_MANY_ROWS` on, where a product takes long.

    It compiles a product for every number of rows that it meets, and PyTorch and it keep a thousand of them: with torch
    2.15 0.6 MiB each, which would be half a gigabyte after prompts of two hundred lengths.
    """
    if rows <= 16:
        return rows
    return rows + -rows % _step(rows)


def _step(rows: int) -> int:
    """Sizes of products follow each other by so many rows there."""
    return 1 << (rows.bit_length() - (4 if rows < _MANY_ROWS else 5))


def _padded(x: Tensor, rows: int, padded: int) -> Tensor:
    """x (..., I) of so many rows as (padded, I), with zeros behind it."""
    return nn.functional.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, padded - rows))


def linear_of(weight_OI: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with this weight and bias, which it shares; `weight_OI` may be strided."""
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def can_pack() -> bool:
    """True if this PyTorch can keep weights in oneDNN's order."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def replace_linears(
    model: Any, kind: type[PackedLinear | PaddedLinear | SmallBatchLinear | OneRowLinear], dtype: torch.dtype
) -> int:
    """Replace the linear layers of this type; returns how many.

    Layers are replaced one by one, so that never more than one layer's weights are held twice.
    """

    def made(child: Any) -> nn.Module | None:
        wanted = type(child) is nn.Linear and child.weight.dtype == dtype and child.weight.numel()
        return kind(child) if wanted else None

    return replace_children(model, made)


def replace_children(model: nn.Module, made: Callable[[nn.Module], nn.Module | None]) -> int:
    """Put what `made` gives of a module in its place, unless that is None; returns how many were replaced.

    The old module is held by nobody here once the new one stands: a list of all modules would keep every old weight
    until its end. So the walk is as lazy as `modules` is, which looks at children after their parent was yielded, and
    goes on with the new ones.
    """
    replaced = 0
    for module in model.modules():
        for name in [name for name, _ in module.named_children()]:
            new = made(module.get_submodule(name))
            if new is not None:
                setattr(module, name, new)
                replaced += 1
    return replaced


class PatchProduct(nn.Module):
    """A convolution that sees each patch once, as the matrix product that it is.

    On an H200 the library's own for Qwen2.5-VL's took 1.9 ms for sixteen 448 x 448 pictures.
    """

    def __init__(self, conv: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.weight = conv.weight
        self.bias = conv.bias
        self.__dict__["_conv"] = conv

    def forward(self, x: Tensor) -> Tensor:
        """x (P, channels, ...) -> (P, O, 1 ...) where x is one patch wide; else as the convolution."""
        if x.shape[1:] != self.weight.shape[1:]:
            out: Tensor = self.__dict__["_conv"](x)
            return out
        y_PO = nn.functional.linear(x.flatten(1), self.weight.flatten(1), self.bias)
        return y_PO.view(*y_PO.shape, *[1] * (x.dim() - 2))


def replace_patch_convolutions(model: nn.Module) -> int:
    """Replace the convolutions over time and space whose steps are as large as what they see; returns how many."""

    def made(child: Any) -> nn.Module | None:
        wanted = type(child) is nn.Conv3d and child.kernel_size == child.stride and child.groups == 1
        return PatchProduct(child) if wanted else None

    return replace_children(model, made)


# What 16-bit matrix products want sizes to be a multiple of: otherwise a library takes kernels of an older kind.
_ALIGNED = 8
_PADDED = 64


def pad_mlps(model: nn.Module, spared: nn.Module | None = None) -> int:
    """Give gated MLPs of an odd inner size some inner units of zero weight, which change nothing; returns how many.

    Qwen2.5-VL's tower has 3420 of them. What lies in `spared` keeps its sizes: adapters were made for those.
    """
    padded = 0
    left = set() if spared is None else set(spared.modules())
    for module in model.modules():
        if module in left:
            continue
        found = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        linears = [linear for linear in found if type(linear) is nn.Linear]
        if len(linears) < 3:
            continue
        gate, up, down = linears
        inner = gate.out_features
        if inner % _ALIGNED == 0 or up.out_features != inner or down.in_features != inner:
            continue
        extra = -inner % _PADDED
        for wide in (gate, up):
            wide.weight.data = nn.functional.pad(wide.weight.data, (0, 0, 0, extra))
            if wide.bias is not None:
                wide.bias.data = nn.functional.pad(wide.bias.data, (0, extra))
            wide.out_features += extra
        down.weight.data = nn.functional.pad(down.weight.data, (0, extra))
        down.in_features += extra
        padded += 1
    return padded


# The compiler stops at eight forms of a function by default. Gemma 3n's layers are of eight kinds (with a window or
# without, sparse or not, writing a shared cache or reading it), each compiled for one token and for more.
_MAX_KINDS = 64


def compile_layers(layers: Sequence[Any], *, for_many: bool = True, level: int = logging.WARNING) -> None:
    """Compile one layer of a stack; the others, being of the same shape, reuse it.

    A layer that the compiler cannot take runs as it came, and that is said once.

    Args:
        for_many: False: only for passes of a single row.
        level: of the log, where it is said.
    """
    import torch._dynamo

    # Products in float32 are exact here on purpose; the compiler advises against it.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MAX_KINDS)
    # Numbers like attention's scale would be traced as inputs first, found to be none, and all be traced anew.
    config.specialize_float = True
    # The compiler collects young garbage each time. All that was imported would be young, and take it 0.3 s.
    count_as_old()
    refused: list[str] = []
    options = [_ROUNDED, _ROUNDED | compile_options(layers[0])] if layers else []

    @functools.cache
    def compiled(function: Callable[..., Any]) -> list[Callable[..., Any]]:
        # Once for all layers of a class: each call takes 4 ms (under a profiler), whatever it gives.
        return [torch.compile(function, dynamic=True, fullgraph=True, options=each) for each in options]

    for layer in layers:
        plain = layer.forward
        own = inspect.ismethod(plain) and plain.__self__ is layer
        many, one = [functools.partial(call, layer) for call in compiled(plain.__func__)] if own else compiled(plain)
        layer.forward = _compiled(layer, many if for_many else plain, one, refused, level)


# A compiler that joins operations keeps what is between them in float32. In 16 bits an answer would then leave the
# model's own sooner than other kernels make it: what each operation gives is rounded as where it runs alone.
_ROUNDED: dict[str, Any] = {"emulate_precision_casts": True}


def _compiled(
    layer: nn.Module, many: Callable[..., Any], one: Callable[..., Any], refused: list[str], level: int
) -> Callable[..., Any]:
    """A layer's forward, compiled until the compiler refuses one of the stack, which is then noted in `refused`.

    A single row takes `one`, others `many`. It stays in place when the compiler refuses: by then others may have put
    theirs around it (models/last_layer.py).
    """
    plain = layer.forward
    hooked = [layer]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if refused:
            return plain(*args, **kwargs)
        if hooked:
            _forget_recorders(hooked.pop())
        x = args[0] if args else kwargs.get("hidden_states")
        call = one if isinstance(x, Tensor) and x.numel() == x.shape[-1] else many
        try:
            return call(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            refused.append(type(layer).__name__)
            logger.log(level, "%s could not be compiled and runs as it is: %s", refused[0], first_line(error))
            return plain(*args, **kwargs)

    forward.plain = plain  # type: ignore[attr-defined]
    return forward


_RECORDERS = "transformers.utils.output_capturing"


def _forget_recorders(layer: nn.Module) -> None:
    """Take off the hooks by which transformers records what parts of a layer give: no compiler looks through them.

    A model that takes hidden states of its tower (LLaVA) hangs them everywhere in its first pass. Those of the layer
    itself stay, since they are called outside of what is compiled; nobody asks for what its parts give.
    """
    for part in layer.modules():
        hooks = part._forward_hooks
        for key in [k for k, hook in hooks.items() if getattr(hook, "__module__", "") == _RECORDERS]:
            if part is not layer:
                del hooks[key]
