"""Attention of decoding sequences on a CPU in one call: one query each, to keys and values in the paged cache.

Nothing is gathered or copied, and each sequence is computed alone: its result has the same bits in any batch. Scores,
their exponentials and sums are float32. Compiled by LLVM, see platform/jit.py.

Shapes: B sequences, H query heads, K key-value heads, G = H / K, C head size, N blocks of a table.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from beheld.attention.backend import Further, LayerKV
from beheld.attention.paged_ir import head_place
from beheld.platform import host, jit
from beheld.platform.registry import platform_of
from beheld.platform.vector_ir import EXP, TYPES, float_bits, float_text, load, parts, spread, stored, words

_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16"}
# `row` is the numbers of a row of q; with `store`, the row's keys and values follow its queries.
_JOB = (
    "q", "keys", "values", "tables", "first", "stop", "y", "scores", "slots", "bias", "sums", "more",
    "heads", "group", "shift", "mask", "width", "scale", "most", "row", "bias.step", "sums.step",
    *jit.SHARED_WORDS,
)  # fmt: skip
_POINTERS = ("q", "keys", "values", "tables", "first", "stop", "y", "scores", "slots", "bias", "sums", "more")
_LANES, _LARGEST = 16, 256
# Numbers of keys that one thread reads before others are worth being woken.
_FEW_NUMBERS = 1 << 14
_V = "<16 x float>"
_PLACES = {name: place for place, name in enumerate(_JOB)}
_KEYS, _VALUES = _PLACES["keys"], _PLACES["values"]


def has_steps(size: int, softcap: float | None, device: torch.device) -> bool:
    """Return whether `steps` can be made for heads of this size."""
    return softcap is None and size % _LANES == 0 and size <= _LARGEST and _vectors(device)


def attends(q_BHC: Tensor, kv: LayerKV, block_size: int) -> bool:
    """Return whether `attend` computes this layer."""
    size = q_BHC.shape[2]
    fits = size % _LANES == 0 and size <= _LARGEST and kv.values.shape[3] == size
    stored_as_is = type(kv) is LayerKV and kv.keys.dtype == kv.values.dtype == q_BHC.dtype and q_BHC.dtype in _KINDS
    whole = kv.keys.is_contiguous() and kv.values.is_contiguous()
    return fits and stored_as_is and whole and block_size & (block_size - 1) == 0 and _vectors(q_BHC.device)


def _vectors(device: torch.device) -> bool:
    return platform_of(device).shares_host_memory and jit.available() and host.byte_products() is not None


class DecodeForm(NamedTuple):
    """What attention adds to the scores and values of positions.

    Attributes:
        bias: a number is added to each score, by head and distance.
        sums: the softmax also covers entries whose values are zero (sinks).
        more: the softmax also covers entries whose values are given.
    """

    bias: bool = False
    sums: bool = False
    more: bool = False


_PLAIN = DecodeForm()


def bias_rows(bias_HD: Tensor, most: int) -> Tensor:
    """Return biases by distance (H, D) as rows for up to `most` positions, the newest last."""
    back_L = torch.arange(most - 1, -1, -1).clamp_(max=bias_HD.shape[1] - 1)
    return bias_HD[:, back_L].float().contiguous()


def attend(
    q_BHC: Tensor,
    kv: LayerKV,
    tables_BN: Tensor,
    seen_BL: Sequence[tuple[int, int]],
    scale: float,
    bias_HL: Tensor | None = None,
    sinks_H: Tensor | None = None,
    further: Further | None = None,
) -> Tensor:
    """Attend to the positions `seen_BL`, a first and a stop for each sequence; returns (B, H, C).

    Args:
        bias_HL: see `bias_rows`; with as many positions as any sequence sees.
        sinks_H: each head's logit of one more position, whose value is zero; not with `further`.
        further: what the queries also attend to.
    """
    sequences, heads, size = q_BHC.shape
    block_size, key_heads = kv.keys.shape[1:3]
    q_BHC, tables_BN = q_BHC.contiguous(), tables_BN[:sequences].to(torch.int32).contiguous()
    y_BHC = torch.empty_like(q_BHC)
    most = max(stop - first for first, stop in seen_BL)
    most += -most % _LANES
    parts, few = sequences * key_heads, sequences * most * heads * size < _FEW_NUMBERS
    threads = 1 if few else min(torch.get_num_threads(), parts)
    # A row for each thread.
    scores = torch.empty(threads * most)
    places = (ctypes.c_int64 * (2 * sequences))(*(f for f, _ in seen_BL), *(s for _, s in seen_BL))
    start = ctypes.addressof(places)
    values = {
        "q": q_BHC.data_ptr(), "keys": kv.keys.data_ptr(), "values": kv.values.data_ptr(),
        "tables": tables_BN.data_ptr(), "first": start, "stop": start + 8 * sequences, "y": y_BHC.data_ptr(),
        "scores": scores.data_ptr(), "heads": key_heads, "group": heads // key_heads,
        "shift": block_size.bit_length() - 1, "mask": block_size - 1, "width": tables_BN.shape[1],
        "scale": float_bits(scale), "most": most, "row": heads * size,
    }  # fmt: skip
    kept: list[Tensor] = []
    if bias_HL is not None:
        values |= {"bias": bias_HL.data_ptr(), "bias.step": bias_HL.shape[1]}
    sums = sinks_H if further is None else further.sums_TH
    if sums is not None:
        kept.append(sums.float().contiguous())
        values |= {"sums": kept[0].data_ptr(), "sums.step": 0 if further is None else heads}
    if further is not None:
        kept.append(further.values_THC.contiguous())
        values["more"] = kept[1].data_ptr()
    form = DecodeForm(bias_HL is not None, sums is not None, further is not None)
    job = (ctypes.c_int64 * len(_JOB))()
    for name, value in values.items():
        job[_PLACES[name]] = value
    _compiled(_KINDS[q_BHC.dtype], size, form).run("decode", job, parts, threads)
    return y_BHC


class SequenceWords:
    """The words of jobs that are the same in all layers of a group in a step of decoding sequences alone.

    Args:
        seen_BL: the positions that each sequence sees, a first and a stop.
        slots_B: int64, where each sequence's newest key and value are stored.
    """

    def __init__(self, tables_BN: Tensor, seen_BL: Sequence[tuple[int, int]], slots_B: Tensor, block_size: int) -> None:
        sequences = len(seen_BL)
        self._tables_BN, self._slots_B = tables_BN[:sequences].to(torch.int32).contiguous(), slots_B.long().contiguous()
        most = max(stop - first for first, stop in seen_BL)
        most += -most % _LANES
        # A row for each thread.
        self._scores = torch.empty(torch.get_num_threads() * most)
        self._places = (ctypes.c_int64 * (2 * sequences))(*(f for f, _ in seen_BL), *(s for _, s in seen_BL))
        start = ctypes.addressof(self._places)
        values = {
            "tables": self._tables_BN.data_ptr(), "first": start, "stop": start + 8 * sequences,
            "scores": self._scores.data_ptr(), "slots": self._slots_B.data_ptr(), "most": most,
            "shift": block_size.bit_length() - 1, "mask": block_size - 1, "width": self._tables_BN.shape[1],
        }  # fmt: skip
        self._words = [(_PLACES[name], value) for name, value in values.items()]

    def set(self, job: Any, kv: LayerKV) -> None:
        """Let a job of `steps` compute a layer of this step."""
        job[_KEYS], job[_VALUES] = kv.keys.data_ptr(), kv.values.data_ptr()
        for place, value in self._words:
            job[place] = value


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
    job = (ctypes.c_int64 * len(_JOB))(q)
    values = {"y": y, "heads": heads[1], "group": heads[0] // heads[1], "scale": float_bits(scale)}
    for name, value in (values | {"row": (heads[0] + 2 * heads[1]) * size}).items():
        job[_PLACES[name]] = value
    functions = _compiled(kind, size, _PLAIN)
    stores = jit.ProgramStep(functions.address("store"), job, None, True)
    return job, [stores, jit.ProgramStep(functions.address("decode"), job, None, True, per_row=heads[1])]


@jit.made_once
def _compiled(kind: str, size: int, form: DecodeForm) -> jit.CompiledModule:
    products = host.byte_products()
    assert products is not None, "see `attends`"
    text = functools.partial(_module, kind, size, form, products.bfloat16)
    return jit.CompiledModule((text,), ("decode", "store"), _JOB)


def _module(kind: str, size: int, form: DecodeForm, in_hardware: bool, triple: str) -> str:
    """Return the IR: parts are pairs of a sequence and a key-value head; each query head passes keys, then values."""
    vectors, type_ = range(size // _LANES), TYPES[kind]
    queries = "".join(
        load(f"q{i}.raw", kind, "%q.head", str(i * _LANES)) + f"  %q{i} = fmul {_V} %q{i}.raw, %scale.all\n"
        for i in vectors
    )
    fma = f"call {_V} @llvm.fmuladd.v16f32"
    dots = "".join(
        load(f"k{i}", kind, "%k.row", str(i * _LANES))
        + (f"  %dot{i} = {fma}({_V} %k{i}, {_V} %q{i}, {_V} %dot{i - 1})\n" if i else f"  %dot0 = fmul {_V} %k0, %q0\n")
        for i in vectors
    )
    begun = [f"%more{i}" if form.more else "zeroinitializer" for i in vectors]
    sums = "".join(f"  %a{i} = phi {_V} [{begun[i]}, %mix], [%a{i}.next, %value]\n" for i in vectors)
    adds = "".join(
        load(f"v{i}", kind, "%v.row", str(i * _LANES)) + f"  %a{i}.next = {fma}({_V} %v{i}, {_V} %p.all, {_V} %a{i})\n"
        for i in vectors
    )
    ends = "".join(
        f"  %o{i} = fmul {_V} %a{i}.next, %inverse.all\n"
        + stored(kind, in_hardware, f"%o{i}", "%y.head", str(i * _LANES), f"out{i}")
        for i in vectors
    )

    # What else is attended to, in three places: before the keys, with the largest score, and with the sum.
    opened, compared, counted = "", "", ""
    if form.bias:
        opened += """
  %bias.off = mul i64 %own.head, %bias.step
  %bias.end = add i64 %bias.off, %bias.step
  %bias.from = sub i64 %bias.end, %count
  %bias.head = getelementptr float, ptr %bias, i64 %bias.from
"""
    if form.sums:
        opened += """
  %sums.off = mul i64 %b, %sums.step
  %sums.own = add i64 %sums.off, %own.head
  %sums.at = getelementptr float, ptr %sums, i64 %sums.own
  %sums.one = load float, ptr %sums.at
"""
        compared = """
  %sums.above = fcmp ogt float %sums.one, %largest.next
  %largest.one = select i1 %sums.above, float %sums.one, float %largest.next
"""
        counted = "  %sums.less = fsub float %sums.one, %largest.one\n" + spread(
            "sums.less.all", "%sums.less", "float", _V
        )
        counted += f"  %sums.power = call {_V} @exp16({_V} %sums.less.all)\n"
        counted += f"  %sums.share = extractelement {_V} %sums.power, i64 0\n"
        if form.more:
            counted += f"  %more.head = getelementptr {type_}, ptr %more, i64 %y.off\n"
            for i in vectors:
                counted += load(f"more{i}.raw", kind, "%more.head", str(i * _LANES))
                counted += f"  %more{i} = fmul {_V} %more{i}.raw, %sums.power\n"
    scored = ""
    if form.bias:
        scored = """
  %bias.at = getelementptr float, ptr %bias.head, i64 %l
  %bias.here = load float, ptr %bias.at
  %score = fadd float %dot.sum, %bias.here
"""

    part, part_end = parts("%begin", "%end")
    lowest, last = float_text(-3.0e38), f"%dot{vectors[-1]}"
    largest, total = ("largest.one", "scores.sum") if form.sums else ("largest.next", "sum")
    return f"""
target triple = "{triple}"
declare {_V} @llvm.fmuladd.v16f32({_V}, {_V}, {_V})
declare {_V} @llvm.roundeven.v16f32({_V})
declare float @llvm.vector.reduce.fadd.v16f32(float, {_V})
{EXP}
{jit.sharing(_JOB)}
define void @decode(ptr %job, i64 %begin, i64 %end) {{
entry:
{words(_JOB, _POINTERS, *_JOB[: -len(jit.SHARED_WORDS)])}
  %scale.short = trunc i64 %scale to i32
  %scale.float = bitcast i32 %scale.short to float
{spread("scale.all", "%scale.float", "float", _V)}
  %thread = call i32 @omp_get_thread_num()
  %thread.wide = zext i32 %thread to i64
  %scores.off = mul i64 %thread.wide, %most
  %own = getelementptr float, ptr %scores, i64 %scores.off
{part}
  %b = udiv i64 %p, %heads
  %head = urem i64 %p, %heads
  %first.at = getelementptr i64, ptr %first, i64 %b
  %from = load i64, ptr %first.at
  %stop.at = getelementptr i64, ptr %stop, i64 %b
  %to = load i64, ptr %stop.at
  %count = sub i64 %to, %from
  %table.off = mul i64 %b, %width
  %table = getelementptr i32, ptr %tables, i64 %table.off
  %first.query = mul i64 %p, %group
  %own.query = mul i64 %head, %group
  %q.row = mul i64 %b, %row
  br label %query
query:
  %g = phi i64 [0, %part], [%g.next, %query.end]
  %h = add i64 %first.query, %g
  %y.off = mul i64 %h, {size}
  %own.head = add i64 %own.query, %g
  %own.off = mul i64 %own.head, {size}
  %q.off = add i64 %q.row, %own.off
  %q.head = getelementptr {type_}, ptr %q, i64 %q.off
  %y.head = getelementptr {type_}, ptr %y, i64 %y.off
{queries}{opened}
  br label %key
key:
  %l = phi i64 [0, %query], [%l.next, %key]
  %largest = phi float [{lowest}, %query], [%largest.next, %key]
  %l.at = add i64 %from, %l
{head_place("k", "%l.at", size)}
  %k.row = getelementptr {type_}, ptr %keys, i64 %k.off
{dots}
  %{"dot.sum" if form.bias else "score"} = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {_V} {last})
{scored}  %score.at = getelementptr float, ptr %own, i64 %l
  store float %score, ptr %score.at
  %above = fcmp ogt float %score, %largest
  %largest.next = select i1 %above, float %score, float %largest
  %l.next = add i64 %l, 1
  %l.more = icmp ult i64 %l.next, %count
  br i1 %l.more, label %key, label %pad
pad:
  %d = phi i64 [%count, %key], [%d.next, %padding]
  %d.low = and i64 %d, 15
  %d.done = icmp eq i64 %d.low, 0
  br i1 %d.done, label %weigh, label %padding
padding:
  %d.at = getelementptr float, ptr %own, i64 %d
  store float {lowest}, ptr %d.at
  %d.next = add i64 %d, 1
  br label %pad
weigh:
{compared}{spread("largest.all", f"%{largest}", "float", _V)}
  br label %weighing
weighing:
  %w = phi i64 [0, %weigh], [%w.next, %weighing]
  %total = phi {_V} [zeroinitializer, %weigh], [%total.next, %weighing]
{load("s", "f32", "%own", "%w")}
  %less = fsub {_V} %s, %largest.all
  %power = call {_V} @exp16({_V} %less)
  store {_V} %power, ptr %s.at, align 4
  %total.next = fadd {_V} %total, %power
  %w.next = add i64 %w, 16
  %w.more = icmp ult i64 %w.next, %count
  br i1 %w.more, label %weighing, label %mix
mix:
  %{total} = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {_V} %total.next)
{counted}{"  %sum = fadd float %scores.sum, %sums.share" if form.sums else ""}
  %inverse = fdiv float 1.0, %sum
{spread("inverse.all", "%inverse", "float", _V)}
  br label %value
value:
  %j = phi i64 [0, %mix], [%j.next, %value]
{sums}
  %j.at = add i64 %from, %j
{head_place("v", "%j.at", size)}
  %v.row = getelementptr {type_}, ptr %values, i64 %v.off
  %share.at = getelementptr float, ptr %own, i64 %j
  %share = load float, ptr %share.at
{spread("p.all", "%share", "float", _V)}{adds}
  %j.next = add i64 %j, 1
  %j.more = icmp ult i64 %j.next, %count
  br i1 %j.more, label %value, label %query.end
query.end:
{ends}
  %g.next = add i64 %g, 1
  %g.more = icmp ult i64 %g.next, %group
  br i1 %g.more, label %query, label %part.end
{part_end}
define void @store(ptr %job, i64 %begin, i64 %end) {{
entry:
{words(_JOB, _POINTERS, "q", "keys", "values", "slots", "heads", "group", "row")}
  %queries = mul i64 %heads, %group
  %own.numbers = mul i64 %heads, {size}
  %before.keys = mul i64 %queries, {size}
{part}
  %slot.at = getelementptr i64, ptr %slots, i64 %p
  %slot = load i64, ptr %slot.at
  %to = mul i64 %slot, %own.numbers
  %q.row = mul i64 %p, %row
  %from = add i64 %q.row, %before.keys
  br label %moving
moving:
  %c = phi i64 [0, %part], [%c.next, %moving]
  %k.from = add i64 %from, %c
  %v.from = add i64 %k.from, %own.numbers
  %k.to = add i64 %to, %c
  %k.at = getelementptr {type_}, ptr %q, i64 %k.from
  %v.at = getelementptr {type_}, ptr %q, i64 %v.from
  %key.at = getelementptr {type_}, ptr %keys, i64 %k.to
  %value.at = getelementptr {type_}, ptr %values, i64 %k.to
  %k = load <16 x {type_}>, ptr %k.at, align 2
  %v = load <16 x {type_}>, ptr %v.at, align 2
  store <16 x {type_}> %k, ptr %key.at, align 2
  store <16 x {type_}> %v, ptr %value.at, align 2
  %c.next = add i64 %c, 16
  %more = icmp ult i64 %c.next, %own.numbers
  br i1 %more, label %moving, label %part.end
{part_end}
"""
