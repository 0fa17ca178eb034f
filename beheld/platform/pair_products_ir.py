"""LLVM IR of products of rows with blocks of 16 columns in bfloat16, by the instruction that sums products of pairs.

Linear layers and attention of prompts use it: y = x W^T + bias. W lies in blocks of 16 outputs, the lanes of a vector:
inputs two by two, an output's pair next to each other:

    [w(n, 2t), w(n, 2t + 1) for n in block]    for each t

Each output of a row is summed in float32, pair by pair, whatever rows and outputs share a tile: a row's result has the
same bits alone and among others.

A job is a list of 64-bit words that begins with WORDS. Rows of x and y and blocks of W may lie farther apart than they
are long.
"""

from __future__ import annotations

from beheld.platform.vector_ir import PREFETCH, ahead, outputs_left, spread, to_bfloat16, words

LANES = 16
# Addresses, then counts; the last three are numbers from one row of x to the next, block of weights, row of y. `bias`
# is float32, zeros beyond the outputs.
WORDS = ("x", "weights", "bias", "y", "rows", "inputs", "outputs", "x.step", "w.step", "y.step")
POINTERS = ("x", "weights", "bias", "y")
# Rows and blocks of outputs of a tile, most rows first; the accumulators must fit the registers.
_TILES = ((8, 3), (4, 4), (2, 4), (1, 4))
# Rows whose activations stay in the second cache while blocks of weights pass.
_ROWS = 64
# A tile of few rows waits for the memory, and asks for weights so many bytes ahead. A larger one asks for the blocks
# of the next tile while it computes.
_AHEAD, _FEW_ROWS = 4096, 4
_TYPES = {"f32": "float", "bf16": "bfloat"}
_V, _PAIRS, _INTS = "<16 x float>", "<32 x bfloat>", "<16 x i32>"
# What a module with products declares.
DECLARED = f"""
declare {_V} @llvm.x86.avx512bf16.dpbf16ps.512({_V}, {_PAIRS}, {_PAIRS})
declare void @llvm.masked.store.v16f32.p0({_V}, ptr, i32, <16 x i1>)
declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, i32, <16 x i1>)
declare i64 @llvm.umin.i64(i64, i64)
{PREFETCH}
"""


def products(kind: str, asks: bool = False) -> str:
    """Return `product_KIND(job, block, stop)`: some blocks of outputs y of the type KIND, for all rows.

    Args:
        asks: whether it asks for weights before it needs them; keys and values of a prompt lie in the caches.
    """
    tiles = [_tile(kind, rows, columns, asks) for rows, most in _TILES for columns in sorted({1, most})]
    return "\n".join([*tiles, _product(kind)])


def _tile(kind: str, rows: int, columns: int, asks: bool) -> str:
    """`columns` blocks of outputs from %block on, for `rows` rows from %m on."""
    type_, every, across = _TYPES[kind], range(rows), range(columns)
    both = [(row, column) for row in every for column in across]
    text = [f"define internal void @tile_{kind}_{rows}_{columns}(ptr %job, i64 %block, i64 %m) {{\nentry:\n"]
    text.append(words(WORDS, POINTERS, *(name for name in WORDS if name != "rows")) + "\n")
    for column in across:
        text.append(f"  %block{column} = add i64 %block, {column}\n")
        text.append(f"  %w.off{column} = mul i64 %block{column}, %w.step\n")
        text.append(f"  %w.block{column} = getelementptr bfloat, ptr %weights, i64 %w.off{column}\n")
    text.append(f"  %w.tile = mul i64 %w.step, {columns}\n")
    for row in every:
        text.append(f"  %m{row} = add i64 %m, {row}\n  %x.off{row} = mul i64 %m{row}, %x.step\n")
        text.append(f"  %x.row{row} = getelementptr bfloat, ptr %x, i64 %x.off{row}\n")
    text.append("  br label %within\nwithin:\n  %k = phi i64 [0, %entry], [%k.next, %within]\n")
    for row, column in both:
        name = f"{row}.{column}"
        text.append(f"  %a{name} = phi {_V} [zeroinitializer, %entry], [%a.next{name}, %within]\n")
    text.append(f"  %w.here = mul i64 %k, {LANES}\n")
    for column in across:
        text.append(f"  %w.at{column} = getelementptr bfloat, ptr %w.block{column}, i64 %w.here\n")
        text.append(f"  %w{column} = load {_PAIRS}, ptr %w.at{column}, align 2\n")
        if asks and rows <= _FEW_ROWS:
            text.append(ahead(f"w.ahead{column}", f"%w.at{column}", _AHEAD))
        elif asks:
            text.append(f"  %w.next{column} = getelementptr bfloat, ptr %w.at{column}, i64 %w.tile\n")
            text.append(ahead(f"w.ahead{column}", f"%w.next{column}", 0, level=2))
    for row in every:
        text.append(f"  %x.at{row} = getelementptr bfloat, ptr %x.row{row}, i64 %k\n")
        text.append(f"  %x.raw{row} = load i32, ptr %x.at{row}, align 2\n")
        text.append(spread(f"x.all{row}", f"%x.raw{row}", "i32", _INTS))
        text.append(f"  %x.pairs{row} = bitcast {_INTS} %x.all{row} to {_PAIRS}\n")
        for column in across:
            name = f"{row}.{column}"
            operands = f"{_V} %a{name}, {_PAIRS} %w{column}, {_PAIRS} %x.pairs{row}"
            text.append(f"  %a.next{name} = call {_V} @llvm.x86.avx512bf16.dpbf16ps.512({operands})\n")
    text.append("  %k.next = add i64 %k, 2\n  %more = icmp ult i64 %k.next, %inputs\n")
    text.append("  br i1 %more, label %within, label %done\ndone:\n")
    for column in across:
        text.append(outputs_left(LANES, str(column)))
        text.append(f"  %bias.to{column} = getelementptr float, ptr %bias, i64 %n{column}\n")
        text.append(f"  %bias.own{column} = load {_V}, ptr %bias.to{column}, align 4\n")
    for row, column in both:
        name = f"{row}.{column}"
        if column == 0:
            text.append(f"  %to.row{row} = mul i64 %m{row}, %y.step\n")
        text.append(f"  %out{name} = fadd {_V} %a.next{name}, %bias.own{column}\n")
        text.append(f"  %to.off{name} = add i64 %to.row{row}, %n{column}\n")
        text.append(f"  %to{name} = getelementptr {type_}, ptr %y, i64 %to.off{name}\n")
        given, sort = f"{_V} %out{name}", "f32"
        if kind != "f32":
            text.append(to_bfloat16(LANES, True, f"%short{name}", f"%out{name}"))
            given, sort = f"<{LANES} x i16> %short{name}", "i16"
        text.append(f"  call void @llvm.masked.store.v16{sort}.p0({given}, ptr %to{name}, ")
        text.append(f"i32 2, <{LANES} x i1> %mask{column})\n")
    return "".join([*text, "  ret void\n}\n"])


def _product(kind: str) -> str:
    """Runs of rows; in each, tiles of decreasing numbers of rows, each through all blocks of outputs."""
    text = [
        f"""
define void @product_{kind}(ptr %job, i64 %first, i64 %stop) {{
entry:
{words(WORDS, POINTERS, "rows")}
  %none.rows = icmp eq i64 %rows, 0
  %none.blocks = icmp uge i64 %first, %stop
  %none = or i1 %none.rows, %none.blocks
  br i1 %none, label %done, label %run
run:
  %r = phi i64 [0, %entry], [%r.next, %run.end]
  %r.next = add i64 %r, {_ROWS}
  %r.stop = call i64 @llvm.umin.i64(i64 %r.next, i64 %rows)
  br label %check{_TILES[0][0]}
"""
    ]
    before, place = "run", "%r"
    for index, (tile, most) in enumerate(_TILES):
        following = f"check{_TILES[index + 1][0]}" if index + 1 < len(_TILES) else "run.end"
        # Blocks outside, rows within: blocks of weights stay in the first cache for all rows of the run.
        text.append(f"""check{tile}:
  %m{tile} = phi i64 [{place}, %{before}], [%m{tile}.after, %ended{tile}]
  %left{tile} = sub i64 %r.stop, %m{tile}
  %tiles{tile} = udiv i64 %left{tile}, {tile}
  %taken{tile} = mul i64 %tiles{tile}, {tile}
  %m{tile}.after = add i64 %m{tile}, %taken{tile}
  %fits{tile} = icmp ne i64 %tiles{tile}, 0
  br i1 %fits{tile}, label %block{tile}, label %{following}
block{tile}:
  %b{tile} = phi i64 [%first, %check{tile}], [%b{tile}.next, %block.end{tile}]
  %b{tile}.most = add i64 %b{tile}, {most}
  %b{tile}.one = add i64 %b{tile}, 1
  %wide{tile} = icmp ule i64 %b{tile}.most, %stop
  %b{tile}.next = select i1 %wide{tile}, i64 %b{tile}.most, i64 %b{tile}.one
  br label %row{tile}
row{tile}:
  %i{tile} = phi i64 [%m{tile}, %block{tile}], [%i{tile}.next, %row.end{tile}]
  br i1 %wide{tile}, label %many{tile}, label %one{tile}
many{tile}:
  call void @tile_{kind}_{tile}_{most}(ptr %job, i64 %b{tile}, i64 %i{tile})
  br label %row.end{tile}
one{tile}:
  call void @tile_{kind}_{tile}_1(ptr %job, i64 %b{tile}, i64 %i{tile})
  br label %row.end{tile}
row.end{tile}:
  %i{tile}.next = add i64 %i{tile}, {tile}
  %i{tile}.more = icmp ult i64 %i{tile}.next, %m{tile}.after
  br i1 %i{tile}.more, label %row{tile}, label %block.end{tile}
block.end{tile}:
  %b{tile}.more = icmp ult i64 %b{tile}.next, %stop
  br i1 %b{tile}.more, label %block{tile}, label %ended{tile}
ended{tile}:
  br label %check{tile}
""")
        before, place = f"check{tile}", f"%m{tile}"
    text.append("""run.end:
  %again = icmp ult i64 %r.next, %rows
  br i1 %again, label %run, label %done
done:
  ret void
}
""")
    return "".join(text)
