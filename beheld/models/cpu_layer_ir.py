"""LLVM IR of what a decoder layer computes between its products, in float32, for a CPU; see surgery/cpu_layer.py.

Each function does rows `first` to `stop` of a job, a list of 64-bit words (JOB). X is the type that tensors have
outside the layer, "f32" or "bf16":

    norm_X         sum = x;         y = sum / sqrt(mean(sum^2) + eps) weight
    norm_added     sum = x + add;   y as above, all in float32
    ended_X        y = x + add, x and add in float32
    head_norm      each head of q and k in x is normalized in place
    turn_X         y = x with q and k rotated: halves of `turned` numbers, by cosines and sines of the type X
    gate_silu, gate_tanh    y = act(first half of x) second half of x

Sizes are multiples of 16, head sizes and rotated numbers too.
"""

from __future__ import annotations

from beheld.platform.jit import SHARED_WORDS
from beheld.platform.vector_ir import EXP, float_text, load, spread, stored, words

JOB = (
    "x", "add", "sum", "weight", "y", "cos", "sin",
    "inputs", "eps", "heads", "key.heads", "size", "turned", *SHARED_WORDS,
)  # fmt: skip
POINTERS = ("x", "add", "sum", "weight", "y", "cos", "sin")
NAMES = ("norm_added", "head_norm", "gate_silu", "gate_tanh")
NAMES_BY_KIND = ("norm", "ended", "turn")
_V = "<16 x float>"


def module(kind: str, in_hardware: bool, triple: str) -> str:
    """Return the text of the module.

    Args:
        kind: the type outside the layer.
        in_hardware: whether one instruction rounds a vector to bfloat16.
    """
    return "\n".join(
        [
            f'target triple = "{triple}"',
            f"declare {_V} @llvm.fmuladd.v16f32({_V}, {_V}, {_V})",
            f"declare {_V} @llvm.roundeven.v16f32({_V})",
            f"declare float @llvm.vector.reduce.fadd.v16f32(float, {_V})",
            "declare float @llvm.sqrt.f32(float)",
            EXP,
            _norm(f"norm_{kind}", kind, added=False),
            _norm("norm_added", "f32", added=True),
            _ended(kind, in_hardware),
            _head_norm(),
            _turn(kind, in_hardware),
            _gate("silu"),
            _gate("tanh"),
        ]
    )


def _rows(name: str, *used: str) -> str:
    """The head of a function that visits rows %r."""
    return f"""
define void @{name}(ptr %job, i64 %first, i64 %stop) {{
entry:
{words(JOB, POINTERS, *used)}
  %none = icmp uge i64 %first, %stop
  br i1 %none, label %done, label %row
row:
  %r = phi i64 [%first, %entry], [%r.next, %row.end]
"""


_END = """
row.end:
  %r.next = add i64 %r, 1
  %left = icmp ult i64 %r.next, %stop
  br i1 %left, label %row, label %done
done:
  ret void
}
"""


def _factor(count: str) -> str:
    """%factor.all = 1 / sqrt(mean + eps) of %squared.next, a vector of squares."""
    return f"""
  %total = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {_V} %squared.next)
  %count.float = uitofp i64 {count} to float
  %mean = fdiv float %total, %count.float
  %eps.short = trunc i64 %eps to i32
  %eps.float = bitcast i32 %eps.short to float
  %square = fadd float %mean, %eps.float
  %root = call float @llvm.sqrt.f32(float %square)
  %factor = fdiv float 1.0, %root
{spread("factor.all", "%factor", "float", _V)}"""


def _norm(name: str, kind: str, added: bool) -> str:
    adding = "" if not added else load("b", "f32", "%add", "%k") + f"  %s = fadd {_V} %a, %b\n"
    value = "%s" if added else "%a"
    return f"""{_rows(name, "x", "add", "sum", "weight", "y", "inputs", "eps")}
  %start = mul i64 %r, %inputs
  br label %squares
squares:
  %c = phi i64 [0, %row], [%c.next, %squares]
  %squared = phi {_V} [zeroinitializer, %row], [%squared.next, %squares]
  %k = add i64 %start, %c
{load("a", kind, "%x", "%k")}{adding}
  %sum.at = getelementptr float, ptr %sum, i64 %k
  store {_V} {value}, ptr %sum.at, align 4
  %squared.next = call {_V} @llvm.fmuladd.v16f32({_V} {value}, {_V} {value}, {_V} %squared)
  %c.next = add i64 %c, 16
  %more = icmp ult i64 %c.next, %inputs
  br i1 %more, label %squares, label %scale
scale:
{_factor("%inputs")}
  br label %products
products:
  %d = phi i64 [0, %scale], [%d.next, %products]
  %j = add i64 %start, %d
{load("v", "f32", "%sum", "%j")}{load("w", "f32", "%weight", "%d")}
  %scaled = fmul {_V} %v, %factor.all
  %out = fmul {_V} %scaled, %w
  %out.at = getelementptr float, ptr %y, i64 %j
  store {_V} %out, ptr %out.at, align 4
  %d.next = add i64 %d, 16
  %again = icmp ult i64 %d.next, %inputs
  br i1 %again, label %products, label %row.end
{_END}"""


def _ended(kind: str, in_hardware: bool) -> str:
    return f"""{_rows(f"ended_{kind}", "x", "add", "y", "inputs")}
  %start = mul i64 %r, %inputs
  br label %within
within:
  %c = phi i64 [0, %row], [%c.next, %within]
  %k = add i64 %start, %c
{load("a", "f32", "%x", "%k")}{load("b", "f32", "%add", "%k")}
  %s = fadd {_V} %a, %b
{stored(kind, in_hardware, "%s", "%y", "%k", "out")}
  %c.next = add i64 %c, 16
  %more = icmp ult i64 %c.next, %inputs
  br i1 %more, label %within, label %row.end
{_END}"""


def _head_norm() -> str:
    return f"""{_rows("head_norm", "x", "weight", "eps", "heads", "key.heads", "size")}
  %both = add i64 %heads, %key.heads
  %all = add i64 %both, %key.heads
  %numbers = mul i64 %all, %size
  %start = mul i64 %r, %numbers
  br label %head
head:
  %h = phi i64 [0, %row], [%h.next, %head.end]
  %h.off = mul i64 %h, %size
  %base = add i64 %start, %h.off
  %is.key = icmp uge i64 %h, %heads
  %weight.off = select i1 %is.key, i64 %size, i64 0
  br label %squares
squares:
  %c = phi i64 [0, %head], [%c.next, %squares]
  %squared = phi {_V} [zeroinitializer, %head], [%squared.next, %squares]
  %k = add i64 %base, %c
{load("a", "f32", "%x", "%k")}
  %squared.next = call {_V} @llvm.fmuladd.v16f32({_V} %a, {_V} %a, {_V} %squared)
  %c.next = add i64 %c, 16
  %more = icmp ult i64 %c.next, %size
  br i1 %more, label %squares, label %scale
scale:
{_factor("%size")}
  br label %products
products:
  %d = phi i64 [0, %scale], [%d.next, %products]
  %j = add i64 %base, %d
  %w.off = add i64 %weight.off, %d
{load("v", "f32", "%x", "%j")}{load("w", "f32", "%weight", "%w.off")}
  %scaled = fmul {_V} %v, %factor.all
  %out = fmul {_V} %scaled, %w
  store {_V} %out, ptr %v.at, align 4
  %d.next = add i64 %d, 16
  %again = icmp ult i64 %d.next, %size
  br i1 %again, label %products, label %head.end
head.end:
  %h.next = add i64 %h, 1
  %heads.left = icmp ult i64 %h.next, %both
  br i1 %heads.left, label %head, label %row.end
{_END}"""


def _turn(kind: str, in_hardware: bool) -> str:
    """Of `turned` numbers, the first half is a and the second b: a cos - b sin, and b cos + a sin."""
    fma = f"call {_V} @llvm.fmuladd.v16f32"
    return f"""{_rows(f"turn_{kind}", "x", "y", "cos", "sin", "heads", "key.heads", "size", "turned")}
  %both = add i64 %heads, %key.heads
  %all = add i64 %both, %key.heads
  %numbers = mul i64 %all, %size
  %start = mul i64 %r, %numbers
  %half = lshr i64 %turned, 1
  %angles = mul i64 %r, %turned
  br label %head
head:
  %h = phi i64 [0, %row], [%h.next, %head.end]
  %h.off = mul i64 %h, %size
  %base = add i64 %start, %h.off
  %is.value = icmp uge i64 %h, %both
  br i1 %is.value, label %copy, label %turning
turning:
  %c = phi i64 [0, %head], [%c.next, %turning]
  %k = add i64 %base, %c
  %k.other = add i64 %k, %half
  %p = add i64 %angles, %c
  %p.other = add i64 %p, %half
{load("a", "f32", "%x", "%k")}{load("b", "f32", "%x", "%k.other")}
{load("ca", kind, "%cos", "%p")}{load("sa", kind, "%sin", "%p")}
{load("cb", kind, "%cos", "%p.other")}{load("sb", kind, "%sin", "%p.other")}
  %minus = fneg {_V} %b
  %a.cos = fmul {_V} %a, %ca
  %b.cos = fmul {_V} %b, %cb
  %a.new = {fma}({_V} %minus, {_V} %sa, {_V} %a.cos)
  %b.new = {fma}({_V} %a, {_V} %sb, {_V} %b.cos)
{stored(kind, in_hardware, "%a.new", "%y", "%k", "first.out")}
{stored(kind, in_hardware, "%b.new", "%y", "%k.other", "second.out")}
  %c.next = add i64 %c, 16
  %more = icmp ult i64 %c.next, %half
  br i1 %more, label %turning, label %copy
copy:
  %from = phi i64 [0, %head], [%turned, %turning]
  %rest = icmp ult i64 %from, %size
  br i1 %rest, label %copying, label %head.end
copying:
  %d = phi i64 [%from, %copy], [%d.next, %copying]
  %j = add i64 %base, %d
{load("v", "f32", "%x", "%j")}
{stored(kind, in_hardware, "%v", "%y", "%j", "copied")}
  %d.next = add i64 %d, 16
  %again = icmp ult i64 %d.next, %size
  br i1 %again, label %copying, label %head.end
head.end:
  %h.next = add i64 %h, 1
  %heads.left = icmp ult i64 %h.next, %all
  br i1 %heads.left, label %head, label %row.end
{_END}"""


# sqrt(8 / pi), and 0.044715 times it: gelu(x) = x / (1 + exp(-x (A + B x^2))).
_GELU = (1.5957691216057308, 0.07135481627159657)


def _gate(act: str) -> str:
    if act == "silu":
        inner = f"  %inner = fneg {_V} %a\n"
    else:
        inner = (
            spread("gelu.a", float_text(_GELU[0]), "float", _V)
            + spread("gelu.b", float_text(_GELU[1]), "float", _V)
            + f"  %a.squared = fmul {_V} %a, %a\n"
            + f"  %poly = call {_V} @llvm.fmuladd.v16f32({_V} %a.squared, {_V} %gelu.b, {_V} %gelu.a)\n"
            + f"  %a.minus = fneg {_V} %a\n  %inner = fmul {_V} %a.minus, %poly\n"
        )
    return f"""{_rows(f"gate_{act}", "x", "y", "inputs")}
  %start = mul i64 %r, %inputs
  %start.both = shl i64 %start, 1
{spread("one.all", "1.0", "float", _V)}
  br label %within
within:
  %c = phi i64 [0, %row], [%c.next, %within]
  %k = add i64 %start.both, %c
  %k.up = add i64 %k, %inputs
{load("a", "f32", "%x", "%k")}{load("b", "f32", "%x", "%k.up")}
{inner}
  %power = call {_V} @exp16({_V} %inner)
  %under = fadd {_V} %power, %one.all
  %share = fdiv {_V} %a, %under
  %out = fmul {_V} %share, %b
  %j = add i64 %start, %c
  %out.at = getelementptr float, ptr %y, i64 %j
  store {_V} %out, ptr %out.at, align 4
  %c.next = add i64 %c, 16
  %more = icmp ult i64 %c.next, %inputs
  br i1 %more, label %within, label %row.end
{_END}"""
