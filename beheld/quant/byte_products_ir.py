"""LLVM IR of the products of grouped weights on a CPU: sums of products of bytes.

A weight is low + scale q, with q of 4 or 8 bits and one scale and one low for each group of an output's inputs; an
activation is step q_x, with q_x in int8 and one step for each group of a row's inputs. A group's part of a product is

    step (scale sum(q q_x) + low sum(q_x))

where both sums are of whole numbers and exact. Groups are added one after the other, so a row's result has the same
bits alone and among others.

Weights lie in blocks of L outputs, L lanes of a vector: inputs four by four, each four of an output next to each other.
With 4 bits a byte holds two of them, four inputs apart:

    8 bits   [q(n, 4t) .. q(n, 4t + 3) for n in block]    for each t
    4 bits   [q(n, 8t) + 16 q(n, 8t + 4) .. q(n, 8t + 3) + 16 q(n, 8t + 7) for n in block]    for each t

With VNNI one instruction adds four products of bytes to a sum. With AVX2 one multiplies bytes and adds pairs in 16
bits, and a second adds pairs of these. 16 bits hold a pair of products of 4 bits, and those of q - 128, whose sign is
moved to the activation; 128 scale is then added to low.

A job is a list of 64-bit words, see JOB. Functions:

    rounded_X(job, row, stop)           activations of the type X, "f32" or "bf16", to whole numbers, steps and sums
    product_BITS_X(job, block, stop)    outputs of some blocks, for all rows
"""

from __future__ import annotations

from collections.abc import Iterator

from beheld.platform.host import ByteProducts
from beheld.platform.jit import SHARED_WORDS, sharing
from beheld.platform.vector_ir import PREFETCH, ahead, outputs_left, spread, to_bfloat16

# Words of a job: addresses, then counts. `factor` and `bias` are float32 by output, `scales` float16: for each block
# and group L scales, then L lows. `sums` are step sum(q_x). `whole` gets q_x with the bits of `shift` turned over.
JOB = (
    "x", "whole", "step", "sums", "weights", "scales", "factor", "bias", "y",
    "rows", "inputs", "groups", "group", "outputs", "shift", *SHARED_WORDS,
)  # fmt: skip
# Rows that share each weight that is unpacked, most first; the accumulators must fit the registers.
_TILES = {16: (8, 4, 2, 1), 8: (4, 2, 1)}
# Rows whose activations stay in the second cache while blocks of weights pass.
_ROWS = 64
# A tile of few rows waits for the memory, and asks for weights so many bytes ahead, and for scales so many groups. A
# larger one asks for the weights of the next tile while it computes.
_AHEAD, _GROUPS_AHEAD, _FEW_ROWS = 4096, 8, 4
_TYPES = {"f32": "float", "bf16": "bfloat"}
# A row of smaller numbers is zero.
_LEAST = "0x39B4484C00000000"
_EACH = ", ".join(["i16 1"] * 16)
# What AVX2 has in place of VNNI.
_PAIRS = """
declare <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8>, <32 x i8>)
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
declare <32 x i8> @llvm.x86.avx2.psign.b(<32 x i8>, <32 x i8>)
declare <32 x i8> @llvm.abs.v32i8(<32 x i8>, i1)
"""


def module(products: ByteProducts, kind: str, older: bool, triple: str) -> str:
    """Return the text of the module for activations of one type.

    Args:
        older: whether LLVM declares the instruction of VNNI with vectors of int32 in place of bytes.
    """
    lanes = products.lanes
    parts = [_head(products, triple, older), _rounded(kind)]
    for bits in (4, 8):
        parts += [_tile(products, bits, kind, rows, 1, older) for rows in _TILES[lanes]]
        parts.append(_tile(products, bits, kind, _TILES[lanes][0], 2, older))
        parts.append(_product(lanes, bits, kind))
    return "\n".join([*parts, sharing(JOB)])


def _head(products: ByteProducts, triple: str, older: bool) -> str:
    lanes, vnni = products.lanes, products.vnni
    bits, ints, bytes_ = 32 * lanes, f"<{lanes} x i32>", f"<{4 * lanes} x i8>"
    operand = ints if older else bytes_
    dot = f"declare {ints} @llvm.x86.avx512.vpdpbusd.{bits}({ints}, {operand}, {operand})" if vnni else _PAIRS
    return f"""
target triple = "{triple}"
{dot}
declare <{lanes} x float> @llvm.fmuladd.v{lanes}f32(<{lanes} x float>, <{lanes} x float>, <{lanes} x float>)
declare void @llvm.masked.store.v{lanes}f32.p0(<{lanes} x float>, ptr, i32, <{lanes} x i1>)
declare void @llvm.masked.store.v{lanes}i16.p0(<{lanes} x i16>, ptr, i32, <{lanes} x i1>)
declare <16 x i32> @llvm.smax.v16i32(<16 x i32>, <16 x i32>)
declare i32 @llvm.vector.reduce.smax.v16i32(<16 x i32>)
declare <16 x float> @llvm.roundeven.v16f32(<16 x float>)
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
declare i64 @llvm.umin.i64(i64, i64)
{PREFETCH}
"""


def _words(*names: str) -> str:
    """Load words of the job as %name, addresses as pointers."""
    lines = []
    for name in names:
        place = JOB.index(name)
        kind = "i64" if JOB.index(name) >= JOB.index("rows") and name != "act" else "ptr"
        lines.append(f"  %{name}.at = getelementptr i64, ptr %job, i64 {place}")
        lines.append(f"  %{name} = load {kind}, ptr %{name}.at")
    return "\n".join(lines)


def _rounded(kind: str) -> str:
    type_ = _TYPES[kind]
    widen = "%{0} = fadd <16 x float> %{0}.raw, zeroinitializer"
    if kind != "f32":
        widen = f"%{{0}} = fpext <16 x {type_}> %{{0}}.raw to <16 x float>"
    return f"""
; The greatest absolute number is that of the greatest bits, without the sign; those of NaN are greater still.
define void @rounded_{kind}(ptr %job, i64 %first, i64 %stop) {{
entry:
{_words("x", "whole", "step", "sums", "inputs", "groups", "group", "shift")}
  %unsigned.one = insertelement <16 x i32> poison, i32 2147483647, i64 0
  %unsigned = shufflevector <16 x i32> %unsigned.one, <16 x i32> poison, <16 x i32> zeroinitializer
  %most.one = insertelement <16 x float> poison, float 127.0, i64 0
  %most.all = shufflevector <16 x float> %most.one, <16 x float> poison, <16 x i32> zeroinitializer
  %shift.byte = trunc i64 %shift to i8
  %shift.one = insertelement <16 x i8> poison, i8 %shift.byte, i64 0
  %shift.all = shufflevector <16 x i8> %shift.one, <16 x i8> poison, <16 x i32> zeroinitializer
  %first_group = mul i64 %first, %groups
  %stop_group = mul i64 %stop, %groups
  %none = icmp uge i64 %first_group, %stop_group
  br i1 %none, label %done, label %group_of
group_of:
  %g = phi i64 [%first_group, %entry], [%g.next, %store]
  %start = mul i64 %g, %group
  br label %greatest
greatest:
  %c = phi i64 [0, %group_of], [%c.next, %greatest]
  %most = phi <16 x i32> [zeroinitializer, %group_of], [%most.next, %greatest]
  %k = add i64 %start, %c
  %a.at = getelementptr {type_}, ptr %x, i64 %k
  %a.raw = load <16 x {type_}>, ptr %a.at, align 2
  {widen.format("a")}
  %a.bits = bitcast <16 x float> %a to <16 x i32>
  %a.abs = and <16 x i32> %a.bits, %unsigned
  %most.next = call <16 x i32> @llvm.smax.v16i32(<16 x i32> %most, <16 x i32> %a.abs)
  %c.next = add i64 %c, 16
  %more = icmp ult i64 %c.next, %group
  br i1 %more, label %greatest, label %scale
scale:
  %amax.bits = call i32 @llvm.vector.reduce.smax.v16i32(<16 x i32> %most.next)
  %amax = bitcast i32 %amax.bits to float
  %tiny = fcmp olt float %amax, {_LEAST}
  %step.own = fdiv float %amax, 127.0
  %inverse = fdiv float 127.0, %amax
  %step.used = select i1 %tiny, float 0.0, float %step.own
  %inverse.used = select i1 %tiny, float 0.0, float %inverse
  %inverse.one = insertelement <16 x float> poison, float %inverse.used, i64 0
  %inverse.all = shufflevector <16 x float> %inverse.one, <16 x float> poison, <16 x i32> zeroinitializer
  br label %rounding
rounding:
  %d = phi i64 [0, %scale], [%d.next, %rounding]
  %total = phi <16 x i32> [zeroinitializer, %scale], [%total.next, %rounding]
  %j = add i64 %start, %d
  %b.at = getelementptr {type_}, ptr %x, i64 %j
  %b.raw = load <16 x {type_}>, ptr %b.at, align 2
  {widen.format("b")}
  %exact = fmul <16 x float> %b, %inverse.all
  %near = call <16 x float> @llvm.roundeven.v16f32(<16 x float> %exact)
  %is.number = fcmp olt <16 x float> %near, %most.all
  %near.number = select <16 x i1> %is.number, <16 x float> %near, <16 x float> %most.all
  %q.int = fptosi <16 x float> %near.number to <16 x i32>
  %q = trunc <16 x i32> %q.int to <16 x i8>
  %q.at = getelementptr i8, ptr %whole, i64 %j
  %q.shifted = xor <16 x i8> %q, %shift.all
  store <16 x i8> %q.shifted, ptr %q.at, align 1
  %total.next = add <16 x i32> %total, %q.int
  %d.next = add i64 %d, 16
  %again = icmp ult i64 %d.next, %group
  br i1 %again, label %rounding, label %store
store:
  %sum.int = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %total.next)
  %sum.float = sitofp i32 %sum.int to float
  %sum = fmul float %sum.float, %step.used
  %step.to = getelementptr float, ptr %step, i64 %g
  store float %step.used, ptr %step.to
  %sum.to = getelementptr float, ptr %sums, i64 %g
  store float %sum, ptr %sum.to
  %g.next = add i64 %g, 1
  %left = icmp ult i64 %g.next, %stop_group
  br i1 %left, label %group_of, label %done
done:
  ret void
}}
"""


def _tile(products: ByteProducts, bits: int, kind: str, rows: int, columns: int, older: bool) -> str:
    """`columns` blocks of outputs from %block on, for `rows` rows from %m on."""
    lanes, vnni = products.lanes, products.vnni
    floats, ints, bytes_ = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{4 * lanes} x i8>"
    type_, every, across = _TYPES[kind], range(rows), range(columns)
    both = [(row, column) for row in every for column in across]
    per_step = 8 if bits == 4 else 4
    halves = [("low", "a", "b", 0), ("high", "b", "a.next", 4)] if bits == 4 else [("low", "a", "a.next", 0)]

    def summed(half: str, before: str, after: str, offset: int) -> Iterator[str]:
        name = f"@llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        for column in across if older and vnni else ():
            yield f"  %{half}.ints{column} = bitcast {bytes_} %{half}{column} to {ints}\n"
        if not vnni and bits == 8:
            for column in across:
                yield f"  %{half}.own{column} = xor {bytes_} %{half}{column}, %half.range\n"
                own = f"{bytes_} %{half}.own{column}"
                yield f"  %{half}.amount{column} = call {bytes_} @llvm.abs.v32i8({own}, i1 false)\n"
        for row in every:
            yield f"  %x{half}.at{row} = getelementptr i8, ptr %x.row{row}, i64 %k{offset}\n"
            yield f"  %x{half}.raw{row} = load i32, ptr %x{half}.at{row}, align 4\n"
            yield spread(f"x{half}{row}", f"%x{half}.raw{row}", "i32", ints)
            if not (older and vnni):
                yield f"  %x{half}.bytes{row} = bitcast {ints} %x{half}{row} to {bytes_}\n"
            for column in across if not vnni else ():
                place = f"{row}.{column}"
                amount, x = f"{bytes_} %{half}{column}", f"{bytes_} %x{half}.bytes{row}"
                if bits == 8:
                    own = f"{bytes_} %{half}.own{column}"
                    yield f"  %x{half}.turned{place} = call {bytes_} @llvm.x86.avx2.psign.b({x}, {own})\n"
                    amount, x = f"{bytes_} %{half}.amount{column}", f"{bytes_} %x{half}.turned{place}"
                pairs = f"<16 x i16> %pairs.{half}{place}"
                yield f"  {pairs.split()[-1]} = call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw({amount}, {x})\n"
                if half == halves[-1][0]:
                    if len(halves) > 1:
                        yield f"  %pairs.both{place} = add {pairs}, %pairs.{halves[0][0]}{place}\n"
                        pairs = f"<16 x i16> %pairs.both{place}"
                    ones = f"<16 x i16> <{_EACH}>"
                    yield f"  %fours{place} = call {ints} @llvm.x86.avx2.pmadd.wd({pairs}, {ones})\n"
                    yield f"  %a.next{place} = add {ints} %a{place}, %fours{place}\n"
            for column in across if vnni else ():
                operands = f"{bytes_} %{half}{column}, {bytes_} %x{half}.bytes{row}"
                if older:
                    operands = f"{ints} %{half}.ints{column}, {ints} %x{half}{row}"
                place = f"{row}.{column}"
                yield f"  %{after}{place} = call {ints} {name}({ints} %{before}{place}, {operands})\n"

    text = [f"define internal void @tile_{bits}_{kind}_{rows}_{columns}(ptr %job, i64 %block, i64 %m) {{\nentry:\n"]
    text.append(
        _words("whole", "step", "sums", "weights", "scales", "factor", "bias", "y", "inputs", "groups", "group")
    )
    text.append("\n" + _words("outputs") + "\n")
    text.append(f"  %block.numbers = mul i64 %inputs, {lanes * bits // 8}\n")
    text.append(f"  %w.tile = mul i64 %block.numbers, {columns}\n")
    for column in across:
        text.append(f"  %block{column} = add i64 %block, {column}\n")
        text.append(f"  %w.off{column} = mul i64 %block{column}, %block.numbers\n")
        text.append(f"  %w.block{column} = getelementptr i8, ptr %weights, i64 %w.off{column}\n")
        text.append(f"  %s.first{column} = mul i64 %block{column}, %groups\n")
    for row in every:
        text.append(f"  %m{row} = add i64 %m, {row}\n  %x.off{row} = mul i64 %m{row}, %inputs\n")
        text.append(f"  %x.row{row} = getelementptr i8, ptr %whole, i64 %x.off{row}\n")
        text.append(f"  %g.off{row} = mul i64 %m{row}, %groups\n")
        text.append(f"  %step.row{row} = getelementptr float, ptr %step, i64 %g.off{row}\n")
        text.append(f"  %sums.row{row} = getelementptr float, ptr %sums, i64 %g.off{row}\n")
    text.append("  br label %group_of\ngroup_of:\n  %g = phi i64 [0, %entry], [%g.next, %joined]\n")
    for row, column in both:
        name = f"{row}.{column}"
        text.append(f"  %y{name} = phi {floats} [zeroinitializer, %entry], [%y.next{name}, %joined]\n")
    text.append("  %start = mul i64 %g, %group\n  br label %within\nwithin:\n")
    text.append("  %c = phi i64 [0, %group_of], [%c.next, %within]\n")
    for row, column in both:
        name = f"{row}.{column}"
        text.append(f"  %a{name} = phi {ints} [zeroinitializer, %group_of], [%a.next{name}, %within]\n")
    text.append("  %k0 = add i64 %start, %c\n  %k4 = add i64 %k0, 4\n")
    text.append(f"  %w.here = mul i64 %k0, {lanes * bits // 8}\n")
    if bits == 4:
        text.append(spread("fifteen", "15", "i8", bytes_) + spread("four", "4", "i8", bytes_))
    elif not vnni:
        text.append(spread("half.range", "-128", "i8", bytes_))
    for column in across:
        text.append(f"  %w.at{column} = getelementptr i8, ptr %w.block{column}, i64 %w.here\n")
        text.append(f"  %w{column} = load {bytes_}, ptr %w.at{column}, align 1\n")
        if rows <= _FEW_ROWS:
            text.append(ahead(f"w.ahead{column}", f"%w.at{column}", _AHEAD))
        else:
            text.append(f"  %w.next{column} = getelementptr i8, ptr %w.at{column}, i64 %w.tile\n")
            text.append(ahead(f"w.ahead{column}", f"%w.next{column}", 0, level=2))
        if bits == 4:
            text.append(f"  %low{column} = and {bytes_} %w{column}, %fifteen\n")
            text.append(f"  %high{column} = lshr {bytes_} %w{column}, %four\n")
        else:
            text.append(f"  %low{column} = or {bytes_} %w{column}, zeroinitializer\n")
    for half in halves:
        text += summed(*half)
    text.append(f"  %c.next = add i64 %c, {per_step}\n  %more = icmp ult i64 %c.next, %group\n")
    text.append("  br i1 %more, label %within, label %joined\njoined:\n")
    for column in across:
        text.append(f"  %s.group{column} = add i64 %s.first{column}, %g\n")
        text.append(f"  %s.off{column} = mul i64 %s.group{column}, {2 * lanes}\n")
        text.append(f"  %s.at{column} = getelementptr half, ptr %scales, i64 %s.off{column}\n")
        text.append(f"  %l.at{column} = getelementptr half, ptr %s.at{column}, i64 {lanes}\n")
        if rows <= _FEW_ROWS:
            text.append(ahead(f"s.ahead{column}", f"%s.at{column}", _GROUPS_AHEAD * 4 * lanes))
        for name in (f"s{column}", f"l{column}"):
            text.append(f"  %{name}.half = load <{lanes} x half>, ptr %{name[0]}.at{column}, align 2\n")
            text.append(f"  %{name} = fpext <{lanes} x half> %{name}.half to {floats}\n")
    fma = f"call {floats} @llvm.fmuladd.v{lanes}f32"
    low = "l"
    if bits == 8 and not vnni:
        low = "l.moved"
        text.append(spread("range.all", "128.0", "float", floats))
        for column in across:
            text.append(f"  %l.moved{column} = {fma}({floats} %s{column}, {floats} %range.all, {floats} %l{column})\n")
    for row in every:
        for name in ("step", "sums"):
            text.append(f"  %{name}.at{row} = getelementptr float, ptr %{name}.row{row}, i64 %g\n")
            text.append(f"  %{name}.raw{row} = load float, ptr %{name}.at{row}\n")
            text.append(spread(f"{name}{row}", f"%{name}.raw{row}", "float", floats))
    for row, column in both:
        name = f"{row}.{column}"
        text.append(f"  %f{name} = sitofp {ints} %a.next{name} to {floats}\n")
        text.append(f"  %scaled{name} = fmul {floats} %f{name}, %s{column}\n")
        text.append(f"  %y.half{name} = {fma}({floats} %scaled{name}, {floats} %step{row}, {floats} %y{name})\n")
        text.append(f"  %y.next{name} = {fma}({floats} %{low}{column}, {floats} %sums{row}, {floats} %y.half{name})\n")
    text.append("  %g.next = add i64 %g, 1\n  %again = icmp ult i64 %g.next, %groups\n")
    text.append("  br i1 %again, label %group_of, label %done\ndone:\n")
    for column in across:
        text.append(outputs_left(lanes, str(column)))
        for name in ("factor", "bias"):
            text.append(f"  %{name}.to{column} = getelementptr float, ptr %{name}, i64 %n{column}\n")
            text.append(f"  %{name}.own{column} = load {floats}, ptr %{name}.to{column}, align 4\n")
    for row in every:
        text.append(f"  %to.row{row} = mul i64 %m{row}, %outputs\n")
    for row, column in both:
        name = f"{row}.{column}"
        text.append(f"  %out{name} = {fma}({floats} %y.next{name}, ")
        text.append(f"{floats} %factor.own{column}, {floats} %bias.own{column})\n")
        text.append(f"  %to.off{name} = add i64 %to.row{row}, %n{column}\n")
        text.append(f"  %to{name} = getelementptr {type_}, ptr %y, i64 %to.off{name}\n")
        given, stored = f"{floats} %out{name}", "f32"
        if kind != "f32":
            text.append(to_bfloat16(lanes, products.bfloat16, f"%short{name}", f"%out{name}"))
            given, stored = f"<{lanes} x i16> %short{name}", "i16"
        text.append(f"  call void @llvm.masked.store.v{lanes}{stored}.p0({given}, ptr %to{name}, ")
        text.append(f"i32 2, <{lanes} x i1> %mask{column})\n")
    return "".join([*text, "  ret void\n}\n"])


def _product(lanes: int, bits: int, kind: str) -> str:
    """Pairs of blocks of outputs, inside runs of rows; each run in tiles of decreasing size."""
    tiles = _TILES[lanes]
    text = [
        f"""
define void @product_{bits}_{kind}(ptr %job, i64 %first, i64 %stop) {{
entry:
{_words("rows")}
  %none.rows = icmp eq i64 %rows, 0
  %none.blocks = icmp uge i64 %first, %stop
  %none = or i1 %none.rows, %none.blocks
  br i1 %none, label %done, label %run
run:
  %r = phi i64 [0, %entry], [%r.next, %run.end]
  %r.next = add i64 %r, {_ROWS}
  %r.stop = call i64 @llvm.umin.i64(i64 %r.next, i64 %rows)
  br label %block
block:
  %b = phi i64 [%first, %run], [%b.next, %block.end]
  %b.one = add i64 %b, 1
  %b.two = add i64 %b, 2
  %pair = icmp ule i64 %b.two, %stop
  %b.next = select i1 %pair, i64 %b.two, i64 %b.one
  br label %check{tiles[0]}
"""
    ]
    before, place = "block", "%r"
    for index, tile in enumerate(tiles):
        following = f"check{tiles[index + 1]}" if index + 1 < len(tiles) else "block.end"
        name = f"@tile_{bits}_{kind}_{tile}"
        pair = f"  call void {name}_2(ptr %job, i64 %b, i64 %m{tile})\n"
        if index:
            pair = "".join(f"  call void {name}_1(ptr %job, i64 %{b}, i64 %m{tile})\n" for b in ("b", "b.one"))
        text.append(f"""check{tile}:
  %m{tile} = phi i64 [{place}, %{before}], [%m{tile}.next, %taken{tile}]
  %m{tile}.next = add i64 %m{tile}, {tile}
  %fits{tile} = icmp ule i64 %m{tile}.next, %r.stop
  br i1 %fits{tile}, label %take{tile}, label %{following}
take{tile}:
  br i1 %pair, label %both{tile}, label %one{tile}
both{tile}:
{pair}  br label %taken{tile}
one{tile}:
  call void {name}_1(ptr %job, i64 %b, i64 %m{tile})
  br label %taken{tile}
taken{tile}:
  br label %check{tile}
""")
        before, place = f"check{tile}", f"%m{tile}"
    text.append("""block.end:
  %more = icmp ult i64 %b.next, %stop
  br i1 %more, label %block, label %run.end
run.end:
  %again = icmp ult i64 %r.next, %rows
  br i1 %again, label %run, label %done
done:
  ret void
}
""")
    return "".join(text)
