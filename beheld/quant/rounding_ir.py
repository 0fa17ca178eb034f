"""LLVM IR that rounds weights to grouped numbers, in the order of byte_products_ir.py.

A group's least number becomes `low`, and its greatest one low + (2 ** bits - 1) scale:

    scale = max((greatest - least) / (2 ** bits - 1), tiny)        q = round((weight - low) / scale)

in float32, as `rounded` in grouped.py computes it. A job is a list of 64-bit words, see JOB. Functions:

    weights_BITS_X(job, block, stop)    the weights of some blocks of outputs, of the type X, "f32" or "bf16"
"""

from __future__ import annotations

from beheld.platform.jit import SHARED_WORDS, sharing
from beheld.platform.vector_ir import float_text, load, spread, words
from beheld.quant.grouped import LEAST

# Words of a job: addresses, then counts. `scale` and `low` are float32 by output and group; `greatest` is the greatest
# absolute number of each output, or NaN if one is NaN.
JOB = ("source", "packed", "scale", "low", "greatest", "inputs", "groups", "group", "outputs", *SHARED_WORDS)
_POINTERS = ("source", "packed", "scale", "low", "greatest")
_V, _I = "<16 x float>", "<16 x i32>"


def module(lanes: int, kind: str, triple: str) -> str:
    """Return the text of the module for weights of one type, in blocks of `lanes` outputs."""
    head = f"""
target triple = "{triple}"
declare {_V} @llvm.minnum.v16f32({_V}, {_V})
declare {_V} @llvm.maxnum.v16f32({_V}, {_V})
declare {_V} @llvm.roundeven.v16f32({_V})
declare {_I} @llvm.smax.v16i32({_I}, {_I})
declare i32 @llvm.vector.reduce.smax.v16i32({_I})
declare float @llvm.vector.reduce.fmin.v16f32({_V})
declare float @llvm.vector.reduce.fmax.v16f32({_V})
declare float @llvm.maxnum.f32(float, float)
"""
    return "\n".join([head, _weights(lanes, 4, kind), _weights(lanes, 8, kind), sharing(JOB)])


def _weights(lanes: int, bits: int, kind: str) -> str:
    most = float_text(float((1 << bits) - 1))
    return f"""
; The greatest absolute number is that of the greatest bits, without the sign; those of NaN are greater still.
define void @weights_{bits}_{kind}(ptr %job, i64 %first, i64 %stop) {{
entry:
{words(JOB, _POINTERS, "source", "packed", "scale", "low", "greatest", "inputs", "groups", "group", "outputs")}
{spread("unsigned", "2147483647", "i32", _I)}
{spread("most", most, "float", _V)}
  %first.output = mul i64 %first, {lanes}
  %stop.all = mul i64 %stop, {lanes}
  %past = icmp ugt i64 %stop.all, %outputs
  %stop.output = select i1 %past, i64 %outputs, i64 %stop.all
  %block.bytes = mul i64 %inputs, {lanes * bits // 8}
  %none = icmp uge i64 %first.output, %stop.output
  br i1 %none, label %done, label %output
output:
  %n = phi i64 [%first.output, %entry], [%n.next, %output.end]
  %block = udiv i64 %n, {lanes}
  %lane = urem i64 %n, {lanes}
  %block.start = mul i64 %block, %block.bytes
  %lane.start = mul i64 %lane, 4
  %to.offset = add i64 %block.start, %lane.start
  %to = getelementptr i8, ptr %packed, i64 %to.offset
  %row = mul i64 %n, %inputs
  %first.group = mul i64 %n, %groups
  br label %group.of
group.of:
  %g = phi i64 [0, %output], [%g.next, %group.end]
  %great.before = phi {_I} [zeroinitializer, %output], [%great, %group.end]
  %start = mul i64 %g, %group
  %from = add i64 %row, %start
{load("begin", kind, "%source", "%from")}
  br label %extremes
extremes:
  %c = phi i64 [0, %group.of], [%c.next, %extremes]
  %great.so.far = phi {_I} [%great.before, %group.of], [%great, %extremes]
  %lows = phi {_V} [%begin, %group.of], [%lows.next, %extremes]
  %highs = phi {_V} [%begin, %group.of], [%highs.next, %extremes]
  %at.c = add i64 %from, %c
{load("a", kind, "%source", "%at.c")}
  %a.bits = bitcast {_V} %a to {_I}
  %a.abs = and {_I} %a.bits, %unsigned
  %great = call {_I} @llvm.smax.v16i32({_I} %great.so.far, {_I} %a.abs)
  %lows.next = call {_V} @llvm.minnum.v16f32({_V} %lows, {_V} %a)
  %highs.next = call {_V} @llvm.maxnum.v16f32({_V} %highs, {_V} %a)
  %c.next = add i64 %c, 16
  %more = icmp ult i64 %c.next, %group
  br i1 %more, label %extremes, label %scaled
scaled:
  %least = call float @llvm.vector.reduce.fmin.v16f32({_V} %lows.next)
  %highest = call float @llvm.vector.reduce.fmax.v16f32({_V} %highs.next)
  %range = fsub float %highest, %least
  %step = fdiv float %range, {most}
  %step.used = call float @llvm.maxnum.f32(float %step, float {float_text(LEAST)})
  %place = add i64 %first.group, %g
  %scale.at = getelementptr float, ptr %scale, i64 %place
  store float %step.used, ptr %scale.at
  %low.at = getelementptr float, ptr %low, i64 %place
  store float %least, ptr %low.at
{spread("steps", "%step.used", "float", _V)}
{spread("least.all", "%least", "float", _V)}
  br label %rounding
rounding:
  %d = phi i64 [0, %scaled], [%d.next, %rounding]
  %at.d = add i64 %from, %d
{load("b", kind, "%source", "%at.d")}
  %above = fsub {_V} %b, %least.all
  %exact = fdiv {_V} %above, %steps
  %near = call {_V} @llvm.roundeven.v16f32({_V} %exact)
  %kept = call {_V} @llvm.minnum.v16f32({_V} %near, {_V} %most)
  %whole = fptosi {_V} %kept to {_I}
  %bytes = trunc {_I} %whole to <16 x i8>
  %fours = bitcast <16 x i8> %bytes to <4 x i32>
  %k = add i64 %start, %d
{_stores(lanes, bits)}
  %d.next = add i64 %d, 16
  %again = icmp ult i64 %d.next, %group
  br i1 %again, label %rounding, label %group.end
group.end:
  %g.next = add i64 %g, 1
  %groups.left = icmp ult i64 %g.next, %groups
  br i1 %groups.left, label %group.of, label %output.end
output.end:
  %great.one = call i32 @llvm.vector.reduce.smax.v16i32({_I} %great)
  %great.at = getelementptr i32, ptr %greatest, i64 %n
  store i32 %great.one, ptr %great.at
  %n.next = add i64 %n, 1
  %left = icmp ult i64 %n.next, %stop.output
  br i1 %left, label %output, label %done
done:
  ret void
}}
"""


def _stores(lanes: int, bits: int) -> str:
    """Store 16 numbers from input %k on, four by four, at their output's place of each four or eight inputs."""
    text = [f"  %k.bytes = mul i64 %k, {lanes * bits // 8}\n"]
    for four in range(4):
        text.append(f"  %four{four} = extractelement <4 x i32> %fours, i64 {four}\n")
    if bits == 4:
        for first in (0, 2):
            text.append(f"  %upper{first} = shl i32 %four{first + 1}, 4\n")
            text.append(f"  %both{first} = or i32 %four{first}, %upper{first}\n")
        stored = ["both0", "both2"]
    else:
        stored = [f"four{four}" for four in range(4)]
    for index, name in enumerate(stored):
        text.append(f"  %q.offset{index} = add i64 %k.bytes, {4 * lanes * index}\n")
        text.append(f"  %q.at{index} = getelementptr i8, ptr %to, i64 %q.offset{index}\n")
        text.append(f"  store i32 %{name}, ptr %q.at{index}, align 4\n")
    return "".join(text)
