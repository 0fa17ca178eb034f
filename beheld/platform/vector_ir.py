"""Pieces of LLVM IR over vectors that several modules share: words of a job, conversions, and the exponential.

Vectors have 16 lanes of float32; LLVM divides them where registers hold fewer.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence

TYPES = {"f32": "float", "bf16": "bfloat"}
_V = "<16 x float>"


def float_text(value: float) -> str:
    """Return the float32 nearest to a value, as LLVM writes it."""
    near = struct.unpack("<f", struct.pack("<f", value))[0]
    return "0x" + struct.pack(">d", near).hex().upper()


def float_bits(number: float) -> int:
    """Return the bits of a float32 as a word of a job."""
    found: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return found


def words(job: Sequence[str], pointers: Collection[str], *names: str) -> str:
    """Load words of a job as %name."""
    lines = []
    for name in names:
        lines.append(f"  %{name}.word = getelementptr i64, ptr %job, i64 {job.index(name)}")
        lines.append(f"  %{name} = load {'ptr' if name in pointers else 'i64'}, ptr %{name}.word")
    return "\n".join(lines)


def parts(first: str, last: str) -> tuple[str, str]:
    """Return the beginning and the end of a function that computes the parts %p from `first` to before `last`.

    Between them stands what a part needs: it begins in the block `part`, and ends with a branch to `part.end`.
    """
    begin = f"""
  %none = icmp uge i64 {first}, {last}
  br i1 %none, label %done, label %part
part:
  %p = phi i64 [{first}, %entry], [%p.next, %part.end]
"""
    end = f"""
part.end:
  %p.next = add i64 %p, 1
  %p.more = icmp ult i64 %p.next, {last}
  br i1 %p.more, label %part, label %done
done:
  ret void
}}
"""
    return begin.strip("\n"), end.strip("\n")


def spread(name: str, source: str, scalar: str, vector: str) -> str:
    """Set all lanes of a vector %name to a scalar."""
    lanes = vector[1:].split(" ")[0]
    return (
        f"  %{name}.one = insertelement {vector} poison, {scalar} {source}, i64 0\n"
        f"  %{name} = shufflevector {vector} %{name}.one, {vector} poison, <{lanes} x i32> zeroinitializer\n"
    )


def to_bfloat16(lanes: int, in_hardware: bool, name: str, source: str) -> str:
    """The 16 bits of bfloat16 of `source`, float32, as `name`.

    Without such an instruction LLVM would call a library's function, which is not there.
    """
    floats, ints, shorts = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{lanes} x i16>"

    def each(number: int) -> str:
        return "<" + ", ".join([f"i32 {number}"] * lanes) + ">"

    if in_hardware:
        return (
            f"  {name}.brain = fptrunc {floats} {source} to <{lanes} x bfloat>\n"
            f"  {name} = bitcast <{lanes} x bfloat> {name}.brain to {shorts}\n"
        )
    return f"""
  {name}.bits = bitcast {floats} {source} to {ints}
  {name}.upper = lshr {ints} {name}.bits, {each(16)}
  {name}.odd = and {ints} {name}.upper, {each(1)}
  {name}.half = add {ints} {name}.odd, {each(0x7FFF)}
  {name}.near = add {ints} {name}.bits, {name}.half
  {name}.moved = lshr {ints} {name}.near, {each(16)}
  {name}.broken = fcmp uno {floats} {source}, zeroinitializer
  {name}.own = select <{lanes} x i1> {name}.broken, {ints} {each(0x7FC0)}, {ints} {name}.moved
  {name} = trunc {ints} {name}.own to {shorts}
"""


def load(name: str, kind: str, base: str, index: str) -> str:
    """Load 16 numbers as float32."""
    type_ = TYPES[kind]
    text = f"  %{name}.at = getelementptr {type_}, ptr {base}, i64 {index}\n"
    if kind == "f32":
        return text + f"  %{name} = load {_V}, ptr %{name}.at, align 4\n"
    return (
        text
        + f"  %{name}.raw = load <16 x {type_}>, ptr %{name}.at, align 2\n"
        + f"  %{name} = fpext <16 x {type_}> %{name}.raw to {_V}\n"
    )


def stored(kind: str, in_hardware: bool, source: str, base: str, index: str, name: str) -> str:
    """Store 16 numbers of float32 as the type `kind`."""
    text = f"  %{name}.at = getelementptr {TYPES[kind]}, ptr {base}, i64 {index}\n"
    if kind == "f32":
        return text + f"  store {_V} {source}, ptr %{name}.at, align 4\n"
    return (
        text
        + to_bfloat16(16, in_hardware, f"%{name}.short", source)
        + f"  store <16 x i16> %{name}.short, ptr %{name}.at, align 2\n"
    )


def _exp() -> str:
    """exp(x) = 2^n p(r), n = round(x / ln 2), r = x - n ln 2; below -87 and above 88 as at these."""
    text = [f"define internal {_V} @exp16({_V} %given) alwaysinline {{\nentry:\n"]
    names = {"lowest": -87.0, "highest": 88.0, "log2e": 1.4426950408889634, "ln2": -0.693359375, "tail": 2.12194440e-4}
    for name, value in names.items():
        text.append(spread(name, float_text(value), "float", _V))
    text.append(f"""
  %too.low = fcmp olt {_V} %given, %lowest
  %low = select <16 x i1> %too.low, {_V} %lowest, {_V} %given
  %too.high = fcmp ogt {_V} %low, %highest
  %x = select <16 x i1> %too.high, {_V} %highest, {_V} %low
  %scaled = fmul {_V} %x, %log2e
  %n = call {_V} @llvm.roundeven.v16f32({_V} %scaled)
  %r.first = call {_V} @llvm.fmuladd.v16f32({_V} %n, {_V} %ln2, {_V} %x)
  %r = call {_V} @llvm.fmuladd.v16f32({_V} %n, {_V} %tail, {_V} %r.first)
""")
    factors = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
    before = ""
    for index, factor in enumerate(factors):
        name = f"p{index}"
        text.append(spread(f"{name}.factor", float_text(factor), "float", _V))
        if not before:
            before = f"%{name}.factor"
            continue
        text.append(f"  %{name} = call {_V} @llvm.fmuladd.v16f32({_V} {before}, {_V} %r, {_V} %{name}.factor)\n")
        before = f"%{name}"
    text.append(spread("bias", "127", "i32", "<16 x i32>") + spread("place", "23", "i32", "<16 x i32>"))
    text.append(f"""
  %n.numbers = fcmp ord {_V} %n, zeroinitializer
  %n.safe = select <16 x i1> %n.numbers, {_V} %n, {_V} zeroinitializer
  %n.int = fptosi {_V} %n.safe to <16 x i32>
  %n.biased = add <16 x i32> %n.int, %bias
  %n.bits = shl <16 x i32> %n.biased, %place
  %power = bitcast <16 x i32> %n.bits to {_V}
  %out = fmul {_V} {before}, %power
  ret {_V} %out
}}
""")
    return "".join(text)


# The function `exp16` of 16 numbers; the module declares llvm.fmuladd.v16f32 and llvm.roundeven.v16f32.
EXP = _exp()

# What a module of attention declares: products and `exp16`, and sums and largest of 16 numbers.
REDUCTIONS = f"""\
declare {_V} @llvm.fmuladd.v16f32({_V}, {_V}, {_V})
declare {_V} @llvm.roundeven.v16f32({_V})
declare float @llvm.vector.reduce.fadd.v16f32(float, {_V})
declare float @llvm.vector.reduce.fmax.v16f32({_V})
"""


# What a module that calls `ahead` declares.
PREFETCH = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"


def ahead(name: str, base: str, num_bytes: int, level: int = 3) -> str:
    """Ask for the memory so many bytes beyond an address, for the first cache (3) or the second (2).

    An address beyond the end does no harm.
    """
    return (
        f"  %{name} = getelementptr i8, ptr {base}, i64 {num_bytes}\n"
        f"  call void @llvm.prefetch.p0(ptr %{name}, i32 0, i32 {level}, i32 1)\n"
    )


def outputs_left(lanes: int, block: str) -> str:
    """`%n` and `%mask` of a block: its first output, and which of its lanes are below `%outputs`.

    Args:
        block: the end of its names; `%block` has its number.
    """
    counted = ", ".join(f"i64 {lane}" for lane in range(lanes))
    return (
        f"  %n{block} = mul i64 %block{block}, {lanes}\n  %left{block} = sub i64 %outputs, %n{block}\n"
        + spread(f"left.all{block}", f"%left{block}", "i64", f"<{lanes} x i64>")
        + f"  %mask{block} = icmp ult <{lanes} x i64> <{counted}>, %left.all{block}\n"
    )
