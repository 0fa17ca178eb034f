"""Attention of decoding sequences on a CPU in one call: one query each, to keys and values in the paged cache.

Nothing is gathered or copied, and each sequence is computed alone: its result has the same bits in any batch. Scores,
their exponentials and sums are float32. Compiled by LLVM, see platform/jit.py.

Shapes: B sequences, H query heads, K key-value heads, G = H / K, C head size, N blocks of a table.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.attention import cpu_decode_ir as ir
from beheld.attention.backend import Further, LayerKV
from beheld.platform import host, jit
from beheld.platform.registry import platform_of
from beheld.platform.vector_ir import float_bits

_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}
# The largest head.
_LARGEST = 256
# Numbers of keys that one thread reads before others are worth being woken.
_FEW_NUMBERS = 1 << 14
_PLACES = {name: place for place, name in enumerate(ir.JOB)}
_KEYS, _VALUES, _SCORES = (_PLACES[name] for name in ("keys", "values", "scores"))
_HEADS, _GROUP, _AT_ONCE = (_PLACES[name] for name in ("heads", "group", "at.once"))
# Numbers of a thread's lines, if one head's are not more: they stay in the second cache while values are read.
_NUMBERS_AT_ONCE = 1 << 16


def has_steps(size: int, softcap: float | None, device: torch.device) -> bool:
    """Return whether `steps` can be made for heads of this size."""
    return softcap is None and size % ir.LANES == 0 and size <= _LARGEST and _vectors(device)


def attends(q_BHC: Tensor, kv: LayerKV, block_size: int) -> bool:
    """Return whether `attend` computes this layer."""
    size = q_BHC.shape[2]
    fits = size % ir.LANES == 0 and size <= _LARGEST and kv.values.shape[3] == size
    stored_as_is = type(kv) is LayerKV and kv.keys.dtype == kv.values.dtype == q_BHC.dtype and q_BHC.dtype in _KINDS
    whole = kv.keys.is_contiguous() and kv.values.is_contiguous()
    return fits and stored_as_is and whole and block_size & (block_size - 1) == 0 and _vectors(q_BHC.device)


def _vectors(device: torch.device) -> bool:
    return platform_of(device).shares_host_memory and jit.available() and host.byte_products() is not None


_PLAIN = ir.DecodeForm()


def bias_rows(bias_HD: Tensor, most: int) -> Tensor:
    """Return biases by distance (H, D) as rows for up to `most` positions, the newest last."""
    back_L = torch.arange(most - 1, -1, -1).clamp_(max=bias_HD.shape[1] - 1)
    return bias_HD[:, back_L].float().contiguous()


class SequenceWords:
    """The words of jobs that are the same in all layers of a group in a step.

    Args:
        seen_BL: the positions that each decoding sequence sees, a first and a stop.
        slots_B: int64, where each sequence's newest key and value are stored; None if jobs only attend.
    """

    def __init__(
        self,
        tables_BN: Tensor,
        seen_BL: Sequence[tuple[int, int]],
        block_size: int,
        slots_B: Tensor | None = None,
    ) -> None:
        sequences = self.sequences = len(seen_BL)
        # Kept, as jobs have their addresses.
        self._tables_BN = tables_BN[:sequences].to(torch.int32).contiguous()
        self._slots_B = None if slots_B is None else slots_B.long().contiguous()
        most = max([stop - first for first, stop in seen_BL])
        self.most = most + -most % ir.LANES
        self.threads = torch.get_num_threads()
        # Each thread's lines; a job may still have the address of shorter ones.
        self._lines = [torch.empty(0)]
        self._places = (ctypes.c_int64 * (2 * sequences))(*(f for f, _ in seen_BL), *(s for _, s in seen_BL))
        start = ctypes.addressof(self._places)
        values = {
            "tables": self._tables_BN.data_ptr(), "first": start, "stop": start + 8 * sequences,
            "most": self.most, "shift": block_size.bit_length() - 1,
            "mask": block_size - 1, "width": self._tables_BN.shape[1],
        }  # fmt: skip
        if self._slots_B is not None:
            values["slots"] = self._slots_B.data_ptr()
        self._words = [(_PLACES[name], value) for name, value in values.items()]

    def set(self, job: Any, kv: LayerKV) -> None:
        """Let a job of `steps` or `attend` compute a layer of this step; it knows its heads."""
        job[_KEYS], job[_VALUES] = kv.keys.data_ptr(), kv.values.data_ptr()
        group, line = job[_GROUP], self.most + ir.LANES + kv.keys.shape[3]
        at_once = job[_AT_ONCE] = max(1, min(job[_HEADS], _NUMBERS_AT_ONCE // (group * line)))
        numbers = self.threads * at_once * group * line
        if numbers > len(self._lines[-1]):
            self._lines.append(torch.empty(numbers))
        job[_SCORES] = self._lines[-1].data_ptr()
        for place, value in self._words:
            job[place] = value


def attend(
    q_BHC: Tensor,
    kv: LayerKV,
    words: SequenceWords,
    scale: float,
    bias_HL: Tensor | None = None,
    sinks_H: Tensor | None = None,
    further: Further | None = None,
) -> Tensor:
    """Attend to the positions that each of the sequences sees; returns (B, H, C).

    Args:
        bias_HL: see `bias_rows`; with as many positions as any sequence sees.
        sinks_H: each head's logit of one more position, whose value is zero; not with `further`.
        further: what the queries also attend to.
    """
    sequences, heads, size = q_BHC.shape
    assert sequences == words.sequences, "a query for each sequence"
    key_heads = kv.keys.shape[2]
    q_BHC = q_BHC.contiguous()
    y_BHC = torch.empty_like(q_BHC)
    job = (ctypes.c_int64 * len(ir.JOB))(q_BHC.data_ptr())
    job[_HEADS], job[_GROUP] = key_heads, heads // key_heads
    words.set(job, kv)
    job[_PLACES["y"]] = y_BHC.data_ptr()
    job[_PLACES["scale"]], job[_PLACES["row"]] = float_bits(scale), heads * size
    kept: list[Tensor] = []
    if bias_HL is not None:
        job[_PLACES["bias"]], job[_PLACES["bias.step"]] = bias_HL.data_ptr(), bias_HL.shape[1]
    sums = sinks_H if further is None else further.sums_TH
    if sums is not None:
        kept.append(sums.float().contiguous())
        job[_PLACES["sums"]], job[_PLACES["sums.step"]] = kept[0].data_ptr(), 0 if further is None else heads
    if further is not None:
        kept.append(further.values_THC.contiguous())
        job[_PLACES["more"]] = kept[1].data_ptr()
    parts, few = sequences * key_heads, sequences * words.most * heads * size < _FEW_NUMBERS
    threads = 1 if few else min(words.threads, parts)
    form = ir.DecodeForm(bias_HL is not None, sums is not None, further is not None)
    _compiled(_KINDS[q_BHC.dtype], size, form).run("decode", job, parts, threads)
    return y_BHC


def steps(
    q: int, y: int, kind: str, heads: tuple[int, int], size: int, scale: float
) -> tuple[Any, list[jit.ProgramStep]]:
    """Return a job and a program's steps that store each row's key and value and attend; see SequenceWords.

    Args:
        q: the address of rows of queries, keys and values, (B, H + 2 K, C).
        y: the address of the result, (B, H, C).
        kind: their type, "f32" or "bf16".
        heads: H and K.
    """
    job = (ctypes.c_int64 * len(ir.JOB))(q)
    values = {"y": y, "heads": heads[1], "group": heads[0] // heads[1], "scale": float_bits(scale)}
    for name, value in (values | {"row": (heads[0] + 2 * heads[1]) * size}).items():
        job[_PLACES[name]] = value
    functions = _compiled(kind, size, _PLAIN)
    stores = jit.ProgramStep(functions.address("store"), job, None, True)
    return job, [stores, jit.ProgramStep(functions.address("decode"), job, None, True, per_row=heads[1])]


@jit.made_once
def _compiled(kind: str, size: int, form: ir.DecodeForm) -> jit.CompiledModule:
    products = host.byte_products()
    assert products is not None, "see `attends`"
    text = functools.partial(ir.module, kind, size, form, products.bfloat16)
    return jit.CompiledModule((text,), ("decode", "store"), ir.JOB)
