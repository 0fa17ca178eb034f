"""Decoder layers of few bits or bfloat16 on a CPU, each computed in two calls, before attention and after it.

    norm | q, k, v | rotation        o + residual | norm | gate, up | gate x up | down + residual

PyTorch computes such a layer of one row by some forty small operations, each of which wakes the threads and costs more
than its work. Here each half is one program of compiled functions (platform/jit.py), during which threads stay awake,
and in a step of decoding sequences alone both are one, with attention in the middle. Any number of rows is computed so,
_ROWS at a time, and each row alone: a row's result has the same bits alone and among others. Numbers are float32 within
a layer, whatever their type outside; products round what they get.

Where ranks share a layer, its calls end where they add up: after o, and after down.

Which layers have this form is found out as for a single row on a GPU: see one_row_layer.py.

Shapes: T rows, H hidden size, C head size, N heads of q, k and v.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from beheld.attention import cpu_decode
from beheld.attention.op import attend_layer, decodes_alone
from beheld.core.errors import first_line
from beheld.models import cpu_layer_ir as ir
from beheld.models.surgery.one_row_layer import Norm, OneRowLayer, one_row_layers
from beheld.models.surgery.operation import Changes, Target
from beheld.models.surgery.parts import text_model
from beheld.models.surgery.rank_trial import RankTrial
from beheld.models.surgery.sharded import SummedOverRanks
from beheld.models.surgery.vector_linear import VectorLinear
from beheld.parallel.group import RankGroup
from beheld.platform import host, jit
from beheld.quant.byte_products import KINDS
from beheld.quant.grouped_linear import GroupedLinear
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Rows that are computed at a time: their numbers stay in the caches while the weights pass.
_ROWS = 256
_LANES = 16
# Words whose addresses differ from call to call.
_X, _SUM, _Y, _COS, _SIN = (ir.JOB.index(name) for name in ("x", "sum", "y", "cos", "sin"))


@jit.made_once
def compiled_layers(kind: str) -> jit.CompiledModule:
    """Return the functions of layers whose activations have a type, of KINDS."""
    products = host.byte_products()
    assert products is not None, "see CpuLayer.computes"
    names = [*ir.NAMES, *(f"{name}_{kind}" for name in ir.NAMES_BY_KIND)]
    return jit.CompiledModule((functools.partial(ir.module, kind, products.bfloat16),), names, ir.JOB)


class LayerBuffers:
    """The memory that layers of one shape share: what they hold between steps, for up to _ROWS rows."""

    def __init__(self, hidden: int, qkv: int, inner: int, work: int, attended: int, dtype: torch.dtype) -> None:
        self.hidden_TH = torch.empty(_ROWS, hidden)
        self.given_TH = torch.empty(_ROWS, hidden)
        self.added_TH = torch.empty(_ROWS, hidden)
        self.qkv_TN = torch.empty(_ROWS, qkv)
        self.both_TI = torch.empty(_ROWS, 2 * inner)
        self.inner_TI = torch.empty(_ROWS, inner)
        self.work = torch.empty(work, dtype=torch.uint8)
        self.turned_TN = torch.empty(_ROWS, qkv, dtype=dtype)
        self.attended_TN = torch.empty(_ROWS, attended, dtype=dtype)
        self._queries: tuple[tuple[int, int, int], Tensor] | None = None

    def queries(self, rows: int, heads: tuple[int, int]) -> Tensor:
        """Return the memory of rows' queries, (T, H, C), of H and K heads."""
        key = rows, *heads
        if self._queries is None or self._queries[0] != key:
            turned_TNC = self.turned_TN[:rows].view(rows, heads[0] + 2 * heads[1], -1)
            self._queries = key, turned_TNC[:, : heads[0]]
        return self._queries[1]


@dataclass(eq=False)
class _Part:
    """A program, and the jobs whose addresses differ from call to call."""

    program: jit.Program
    jobs: dict[str, Any]

    def run(self, rows: int) -> None:
        """Compute this many rows."""
        self.program.run(rows, torch.get_num_threads())


@dataclass(eq=False)
class _Parts:
    """Programs that run one after the other, and between which ranks add up `added_TH`.

    Attributes:
        product: the job of the product after attention.
        jobs: of all of them.
    """

    parts: list[_Part]
    product: Any
    jobs: dict[str, Any]
    added_TH: Tensor
    group: RankGroup | None

    def run(self, rows: int) -> None:
        """Compute this many rows."""
        for number, part in enumerate(self.parts):
            if number:
                assert self.group is not None
                self.group.sum_(self.added_TH[:rows])
            part.run(rows)


@dataclass(eq=False)
class CpuLayer(OneRowLayer):
    """Computes the layer for any number of rows; attributes as OneRowLayer's.

    Attributes:
        group: ranks that add up what o and down give; None if this process has the whole layer.
        summed: whether they add up what o gives, and what down gives.
    """

    buffers: dict[Any, LayerBuffers] = field(default_factory=dict)
    group: RankGroup | None = None
    summed: tuple[bool, bool] = (False, False)
    _before: _Part | None = None
    _after: _Parts | None = None
    _whole: _Parts | None = None
    _buffers: LayerBuffers | None = None

    def __post_init__(self) -> None:
        """Take the products themselves from what adds up their outputs."""
        self.summed = isinstance(self.o, SummedOverRanks), isinstance(self.down, SummedOverRanks)
        for name, summed in zip(("o", "down"), self.summed, strict=True):
            if summed:
                product = getattr(self, name)
                self.group = product.__dict__["group"]
                setattr(self, name, product.inner)

    def computes(self) -> bool:
        """See OneRowLayer: products must be of few bits, and all sizes multiples of a vector's."""
        products: list[Any] = [self.qkv, self.o, self.gate_up, self.down]
        before, after, _, after_mlp = self.norms
        if not all(_has_steps(each, before.weight_H.dtype) for each in products):
            return False
        heads = self.heads[0] + 2 * self.heads[1]
        sizes = [before.weight_H.numel(), self.down.in_features, self.qkv.out_features // heads]
        fits = all(size % _LANES == 0 for size in sizes) and self.turned % (2 * _LANES) == 0
        return fits and after is None and after_mlp is None and before.weight_H.dtype in KINDS

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **unused: Any
    ) -> Tensor:
        """Compute (1, T, H) -> (1, T, H); other arguments of transformers' model concern other attention.

        Raises:
            TypeError: a tensor has another type than the norms' weights.
        """
        x_1TH = hidden_states.contiguous()
        rows, size = x_1TH.numel() // x_1TH.shape[-1], x_1TH.shape[-1]
        after = self._made()[1]
        if (
            self._whole is not None
            and rows <= _ROWS
            and self.attend is attend_layer
            and position_embeddings is not None
        ):
            decoded_1TH = self._decoded(self._whole, x_1TH, position_embeddings, rows)
            if decoded_1TH is not None:
                return decoded_1TH
        hidden_TH = self._hidden(rows, size)
        out = self._attended(x_1TH, position_embeddings, hidden_TH).contiguous()
        y_1TH = torch.empty_like(x_1TH)
        norm, ended, hidden, y = after.jobs["norm mlp"], after.jobs["ended"], hidden_TH.data_ptr(), y_1TH.data_ptr()
        attended, given = out.data_ptr(), self.o.in_features * out.element_size()
        for first in range(0, rows, _ROWS):
            after.product[0] = attended + first * given
            norm[_X] = norm[_SUM] = ended[_X] = hidden + 4 * first * size
            ended[_Y] = y + first * size * y_1TH.element_size()
            after.run(min(_ROWS, rows - first))
        return y_1TH

    def _decoded(self, whole: _Parts, x_1TH: Tensor, angles: tuple[Tensor, Tensor], rows: int) -> Tensor | None:
        """Compute the whole layer, in one call without sums, if all rows are of decoding sequences; None if not."""
        self._check_types(x_1TH, *angles)
        own = self._buffers
        assert own is not None, "made with the programs"
        if not decodes_alone(self.layer, own.queries(rows, self.heads), self.window, whole.jobs["attention"]):
            return None
        y_1TH = torch.empty_like(x_1TH)
        hidden, (cos, sin) = own.hidden_TH.data_ptr(), (each.contiguous() for each in angles)
        norm, turn, norm_mlp, ended = (whole.jobs[name] for name in ("norm", "turn", "norm mlp", "ended"))
        norm[_X], norm[_SUM] = x_1TH.data_ptr(), hidden
        turn[_Y], turn[_COS], turn[_SIN] = own.turned_TN.data_ptr(), cos.data_ptr(), sin.data_ptr()
        whole.product[0] = own.attended_TN.data_ptr()
        norm_mlp[_X] = norm_mlp[_SUM] = ended[_X] = hidden
        ended[_Y] = y_1TH.data_ptr()
        whole.run(rows)
        return y_1TH

    def stores(self, hidden_states: Tensor, position_embeddings: Any = None, **unused: Any) -> None:
        """Compute and store keys and values only; see last_layer.py."""
        x_1TH = hidden_states.contiguous()
        rows, size = x_1TH.numel() // x_1TH.shape[-1], x_1TH.shape[-1]
        self._made()
        self._attended(x_1TH, position_embeddings, self._hidden(rows, size))

    def _hidden(self, rows: int, size: int) -> Tensor:
        """Return memory for the layer's input in float32."""
        assert self._buffers is not None, "made with the programs"
        return self._buffers.hidden_TH if rows <= _ROWS else torch.empty(rows, size)

    def _attended(self, x_1TH: Tensor, angles: tuple[Tensor, Tensor] | None, hidden_TH: Tensor) -> Tensor:
        """Return attention's output, (1, T, heads, C), and write x as float32."""
        assert angles is not None, "a layer of this form rotates"
        self._check_types(x_1TH, *angles)
        queries, keys = self.heads
        size, numbers, bytes_ = x_1TH.shape[-1], self.qkv.out_features, x_1TH.element_size()
        rows, heads = x_1TH.numel() // size, queries + 2 * keys
        cos, sin = (each.contiguous() for each in angles)
        turned_TNC = x_1TH.new_empty(rows, heads, numbers // heads)
        half = self._made()[0]
        norm, turn = half.jobs["norm"], half.jobs["turn"]
        for first in range(0, rows, _ROWS):
            norm[_X] = x_1TH.data_ptr() + first * size * bytes_
            norm[_SUM] = hidden_TH.data_ptr() + 4 * first * size
            turn[_Y] = turned_TNC.data_ptr() + first * numbers * bytes_
            angle = first * self.turned * bytes_
            turn[_COS], turn[_SIN] = cos.data_ptr() + angle, sin.data_ptr() + angle
            half.run(min(_ROWS, rows - first))
        q, k, v = turned_TNC.transpose(0, 1).unsqueeze(0).split((queries, keys, keys), dim=1)
        return self.attend(self.layer, q, k, v, self.window, self.scale, self.softcap)

    def _check_types(self, *tensors: Tensor) -> None:
        """Refuse tensors of another type: functions are compiled for one and get addresses alone."""
        own = self.norms[0].weight_H.dtype
        for each in tensors:
            if each.dtype != own:
                raise TypeError(f"A tensor of {each.dtype} was given to a layer of {own}: convert it first.")

    def _shared_buffers(self) -> LayerBuffers:
        hidden, inner = self.norms[0].weight_H.numel(), self.down.in_features
        qkv, attended = self.qkv.out_features, self.o.in_features
        products: list[Any] = [self.qkv, self.o, self.gate_up, self.down]
        work = max(each.work_bytes(_ROWS) for each in products)
        key = hidden, qkv, inner, work, attended, self.norms[0].weight_H.dtype
        if key not in self.buffers:
            self.buffers[key] = LayerBuffers(*key)
        return self.buffers[key]

    def _made(self) -> tuple[_Part, _Parts]:
        """Return what runs before attention and after it, made at the first call."""
        if self._before is not None and self._after is not None:
            return self._before, self._after
        self._buffers = own = self._shared_buffers()
        before, before_mlp = self.norms[0], self.norms[2]
        kind = KINDS[before.weight_H.dtype]
        compiled = compiled_layers(kind)
        hidden, inner = before.weight_H.numel(), self.down.in_features
        self._kept: list[Tensor] = []
        steps: list[jit.ProgramStep] = []

        def step(name: str, waits: bool, **words: Any) -> Any:
            job = _job(words)
            steps.append(jit.ProgramStep(compiled.address(name), job, None, waits))
            return job

        def product(linear: Any, x: Tensor | None, y: Tensor, of: str) -> Any:
            start = 0 if x is None else x.data_ptr()
            job, made = linear.steps(start, of, y.data_ptr(), own.work.data_ptr(), _ROWS)
            steps.extend(made)
            return job

        def taken() -> list[jit.ProgramStep]:
            found = [*steps]
            steps.clear()
            return found

        shape = {"heads": self.heads[0], "key.heads": self.heads[1], "size": self.qkv.out_features // (
            self.heads[0] + 2 * self.heads[1])}  # fmt: skip
        norm = step(f"norm_{kind}", False, y=own.given_TH, inputs=hidden, **self._weight(before))
        product(self.qkv, own.given_TH, own.qkv_TN, "f32")
        if self.head_norms is not None:
            weight_2C, eps, from_one = self.head_norms
            weights = self._weight(Norm(weight_2C.reshape(-1), eps, from_one))
            step("head_norm", False, x=own.qkv_TN, **weights, **shape)
        # The thread that turns a row stores its key and value; and a program ends when all threads have.
        turn = step(f"turn_{kind}", False, x=own.qkv_TN, turned=self.turned, **shape)
        before_steps = taken()
        out = product(self.o, None, own.added_TH, kind)
        after_steps = [taken()]
        if self.summed[0]:
            after_steps.append([])
        norm_mlp = step(
            "norm_added",
            False,
            add=own.added_TH,
            y=own.given_TH,
            inputs=hidden,
            **self._weight(before_mlp),
        )
        product(self.gate_up, own.given_TH, own.both_TI, "f32")
        step(
            "gate_tanh" if self.tanh else "gate_silu",
            False,
            x=own.both_TI,
            y=own.inner_TI,
            inputs=inner,
        )
        product(self.down, own.inner_TI, own.added_TH, "f32")
        after_steps[-1] += taken()
        if self.summed[1]:
            after_steps.append([])
        ended = step(f"ended_{kind}", False, add=own.added_TH, inputs=hidden)
        after_steps[-1] += taken()
        jobs = {"norm mlp": norm_mlp, "ended": ended}

        def parts(first: list[jit.ProgramStep], jobs: dict[str, Any]) -> _Parts:
            all_steps = [[*first, *after_steps[0]], *after_steps[1:]]
            made = [_Part(jit.Program(tuple(each)), jobs) for each in all_steps]
            return _Parts(made, out, jobs, own.added_TH, self.group)

        if cpu_decode.has_steps(shape["size"], self.softcap, own.turned_TN.device):
            attention, attends = cpu_decode.steps(
                own.turned_TN.data_ptr(), own.attended_TN.data_ptr(), kind, self.heads, shape["size"], self.scale
            )
            more = {"norm": norm, "turn": turn, "attention": attention}
            self._whole = parts([*before_steps, *attends], jobs | more)
        self._before = _Part(jit.Program(tuple(before_steps)), {"norm": norm, "turn": turn})
        self._after = parts([], jobs)
        return self._before, self._after

    def _weight(self, norm: Norm) -> dict[str, Any]:
        """Return the words of a norm; its weights are held as float32."""
        weight = norm.weight_H.float() + (1.0 if norm.from_one else 0.0)
        self._kept.append(weight)
        return {"weight": weight, "eps": struct.unpack("<i", struct.pack("<f", norm.eps))[0]}


def _has_steps(product: Any, dtype: torch.dtype) -> bool:
    """Return whether a product can be steps of a program, in a layer of this type."""
    if isinstance(product, GroupedLinear):
        return product.plain_order
    return isinstance(product, VectorLinear) and product.weight.dtype == dtype


def _job(words: dict[str, Any]) -> Any:
    job = (ctypes.c_int64 * len(ir.JOB))()
    for name, word in words.items():
        job[ir.JOB.index(name)] = word.data_ptr() if isinstance(word, Tensor) else word
    return job


def compute_text_layers(target: Target, changes: Changes) -> None:
    """Let the layers of the target's text model that have this form compute so.

    Raises:
        EngineDeadError: as compute_layers.
    """
    text = text_model(target.model)
    found = compute_layers(text, changes, target.ranks)
    logger.debug("%d of %d layers are computed in two calls.", found, len(text.layers))


def compute_layers(text: Any, changes: Changes, group: RankGroup | None = None) -> int:
    """Let the text model's layers of this form compute so; returns how many.

    Args:
        group: ranks that share the layers, all of which compute a layer so or none.

    Raises:
        EngineDeadError: the trial failed on this rank alone, and others wait for it.
    """
    trial = RankTrial(group)
    if not trial.agreed(_can_compile(text)):
        return 0
    buffers: dict[Any, LayerBuffers] = {}
    found = one_row_layers(text, functools.partial(CpuLayer, buffers=buffers), trial)
    for layer, made in found.items():
        made._before = None
        changes.set(layer, "forward", made)
    return len(found)


def _can_compile(text: Any) -> bool:
    """Return whether layers may be computed so; compiles their functions, as errors of the trial mean another form."""
    if not jit.available() or not any(isinstance(module, GroupedLinear | VectorLinear) for module in text.modules()):
        return False
    try:
        for dtype in {each.dtype for each in text.layers.parameters() if each.dim() == 1 and each.dtype in KINDS}:
            compiled_layers(KINDS[dtype])
    except RuntimeError as error:
        logger.warning("LLVM does not compile decoder layers (%s): PyTorch computes them, slower.", first_line(error))
        return False
    return True
