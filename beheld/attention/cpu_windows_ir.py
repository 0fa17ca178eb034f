"""LLVM IR of attention both ways within windows on a CPU, in float32; see cpu_windows.py.

A part is one head of one window. Its keys are transposed and its values copied once, as float32. For each ROWS of its
queries, two products and a softmax follow:

    S = (scale Q) K^T      (rows, C) x (C, L)
    Y = softmax(S) V       (rows, L) x (L, C)

Each number is summed in the order of its inputs, whatever rows and columns share a tile: a window's result has the same
bits alone and among others.

Shapes: W windows, H heads, C head size, L positions of a window, padded to a multiple of 16.
"""

from __future__ import annotations

from beheld.platform.jit import SHARED_WORDS, sharing
from beheld.platform.vector_ir import EXP, REDUCTIONS, TYPES, load, parts, spread, stored, words

# q, k, v and y (T, H, C) with so many numbers from one position to the next; `bounds` (W + 1) int32; `scratch` so many
# float32 a thread, see `scratch_numbers`; `longest` is the longest window, padded.
JOB = (
    "q", "k", "v", "y", "bounds", "scratch", "q.step", "k.step", "v.step", "y.step", "windows", "longest", "scale",
    *SHARED_WORDS,
)  # fmt: skip
POINTERS = JOB[: JOB.index("q.step")]
NAMES = ("attend",)
# Queries whose scores are there at a time.
ROWS = 32
# Rows and vectors of columns of a product's tile, most first.
_TILE_ROWS, _TILE_VECTORS = (8, 4, 2, 1), (2, 1)
_V = "<16 x float>"


def scratch_numbers(size: int, longest: int) -> int:
    """Return how many float32 a thread needs: keys and values of a window; queries, scores and results of ROWS."""
    return 2 * size * longest + ROWS * (2 * size + longest)


def module(size: int, kind: str, in_hardware: bool, triple: str) -> str:
    """Return the text of the module.

    Args:
        size: C, a multiple of 16.
        kind: the type of q, k, v and y: "f32" or "bf16".
        in_hardware: whether the CPU converts to bfloat16.
    """
    return f"""
target triple = "{triple}"
{REDUCTIONS}declare i64 @llvm.umin.i64(i64, i64)
{EXP}
{_transposed(size, kind)}
{_copied("read", size, kind, "f32", False)}
{_copied("written", size, "f32", kind, in_hardware)}
{"".join(_tile(rows, vectors) for rows in _TILE_ROWS for vectors in _TILE_VECTORS)}
{_product()}
{_softmax()}
{_attend(size, kind)}
{sharing(JOB)}
"""


def _transposed(size: int, kind: str) -> str:
    """Rows (count, C) become columns (C, padded); columns beyond `count` repeat the last one.

    Sixteen by sixteen numbers take four rounds, each of which interleaves row i with row i + 8.
    """
    low = ", ".join(f"i32 {lane}, i32 {lane + 16}" for lane in range(8))
    high = ", ".join(f"i32 {lane + 8}, i32 {lane + 24}" for lane in range(8))
    text = []
    for row in range(16):
        text.append(f"  %j{row}.any = add i64 %j, {row}\n")
        text.append(f"  %j{row} = call i64 @llvm.umin.i64(i64 %j{row}.any, i64 %last)\n")
        text.append(f"  %off{row}.row = mul i64 %j{row}, %step\n  %off{row} = add i64 %off{row}.row, %c\n")
        text.append(load(f"r0.{row}", kind, "%from", f"%off{row}"))
    for turn in range(4):
        for row in range(8):
            pair = f"{_V} %r{turn}.{row}, {_V} %r{turn}.{row + 8}"
            text.append(f"  %r{turn + 1}.{2 * row} = shufflevector {pair}, <16 x i32> <{low}>\n")
            text.append(f"  %r{turn + 1}.{2 * row + 1} = shufflevector {pair}, <16 x i32> <{high}>\n")
    for row in range(16):
        text.append(f"  %c{row} = add i64 %c, {row}\n  %to{row}.row = mul i64 %c{row}, %padded\n")
        text.append(f"  %to{row} = add i64 %to{row}.row, %j\n")
        text.append(stored("f32", False, f"%r4.{row}", "%to", f"%to{row}", f"o{row}"))
    return f"""
define internal void @transposed(ptr %from, i64 %step, i64 %count, i64 %padded, ptr %to) {{
entry:
  %last = sub i64 %count, 1
  br label %columns
columns:
  %j = phi i64 [0, %entry], [%j.next, %columns.end]
  br label %block
block:
  %c = phi i64 [0, %columns], [%c.next, %block]
{"".join(text)}
  %c.next = add i64 %c, 16
  %c.more = icmp ult i64 %c.next, {size}
  br i1 %c.more, label %block, label %columns.end
columns.end:
  %j.next = add i64 %j, 16
  %j.more = icmp ult i64 %j.next, %padded
  br i1 %j.more, label %columns, label %done
done:
  ret void
}}
"""


def _copied(name: str, size: int, source: str, target: str, in_hardware: bool) -> str:
    """`count` rows (count, C), multiplied by `factor`."""
    return f"""
define internal void @{name}(ptr %from, i64 %from.step, i64 %count, float %factor, ptr %to, i64 %to.step) {{
entry:
{spread("factors", "%factor", "float", _V)}
  br label %row
row:
  %r = phi i64 [0, %entry], [%r.next, %row.end]
  %from.off = mul i64 %r, %from.step
  %from.row = getelementptr {TYPES[source]}, ptr %from, i64 %from.off
  %to.off = mul i64 %r, %to.step
  %to.row = getelementptr {TYPES[target]}, ptr %to, i64 %to.off
  br label %vector
vector:
  %c = phi i64 [0, %row], [%c.next, %vector]
{load("a", source, "%from.row", "%c")}
  %b = fmul {_V} %a, %factors
{stored(target, in_hardware, "%b", "%to.row", "%c", "out")}
  %c.next = add i64 %c, 16
  %c.more = icmp ult i64 %c.next, {size}
  br i1 %c.more, label %vector, label %row.end
row.end:
  %r.next = add i64 %r, 1
  %r.more = icmp ult i64 %r.next, %count
  br i1 %r.more, label %row, label %done
done:
  ret void
}}
"""


# x (rows, inner), b (inner, columns) and y (rows, columns), each with so many numbers from row to row.
_OPERANDS = "ptr %x, i64 %x.step, ptr %b, i64 %b.step, ptr %y, i64 %y.step, i64 %inner"


def _tile(rows: int, vectors: int) -> str:
    """y = x b for these rows and vectors of 16 columns."""
    every = [(row, vector) for row in range(rows) for vector in range(vectors)]
    text = [f"define internal void @tile_{rows}_{vectors}({_OPERANDS}) {{\nentry:\n"]
    for row in range(rows):
        text.append(f"  %x.off{row} = mul i64 %x.step, {row}\n")
        text.append(f"  %x.row{row} = getelementptr float, ptr %x, i64 %x.off{row}\n")
    text.append("  br label %within\nwithin:\n  %k = phi i64 [0, %entry], [%k.next, %within]\n")
    for row, vector in every:
        name = f"%s{row}.{vector}"
        text.append(f"  {name} = phi {_V} [zeroinitializer, %entry], [{name}.next, %within]\n")
    text.append("  %b.off = mul i64 %k, %b.step\n  %b.row = getelementptr float, ptr %b, i64 %b.off\n")
    for vector in range(vectors):
        text.append(load(f"b{vector}", "f32", "%b.row", str(16 * vector)))
    for row in range(rows):
        text.append(f"  %x.at{row} = getelementptr float, ptr %x.row{row}, i64 %k\n")
        text.append(f"  %x.one{row} = load float, ptr %x.at{row}\n" + spread(f"x{row}", f"%x.one{row}", "float", _V))
        for vector in range(vectors):
            name = f"%s{row}.{vector}"
            given = f"{_V} %x{row}, {_V} %b{vector}, {_V} {name}"
            text.append(f"  {name}.next = call {_V} @llvm.fmuladd.v16f32({given})\n")
    text.append("  %k.next = add i64 %k, 1\n  %more = icmp ult i64 %k.next, %inner\n")
    text.append("  br i1 %more, label %within, label %end\nend:\n")
    for row in range(rows):
        text.append(f"  %y.off{row} = mul i64 %y.step, {row}\n")
        text.append(f"  %y.row{row} = getelementptr float, ptr %y, i64 %y.off{row}\n")
    for row, vector in every:
        place = str(16 * vector)
        text.append(stored("f32", False, f"%s{row}.{vector}.next", f"%y.row{row}", place, f"y{row}.{vector}"))
    text.append("  ret void\n}\n")
    return "".join(text)


def _product() -> str:
    """y = x b for all `rows` and `columns`, a multiple of 16: strips of columns, and in each tiles of rows."""
    text = [
        f"""
define internal void @product({_OPERANDS}, i64 %rows, i64 %columns) {{
entry:
  br label %strip0
"""
    ]
    for place, vectors in enumerate(_TILE_VECTORS):
        # The column that the strip before this one ended with.
        came = "0, %entry" if not place else f"%n{place - 1}, %strip{place - 1}"
        text.append(f"""
strip{place}:
  %n{place} = phi i64 [{came}], [%n{place}.next, %strip{place}.end]
  %n{place}.next = add i64 %n{place}, {16 * vectors}
  %n{place}.fits = icmp ule i64 %n{place}.next, %columns
  br i1 %n{place}.fits, label %strip{place}.begin, label %{f"strip{place + 1}" if vectors > 1 else "done"}
strip{place}.begin:
  %b{place} = getelementptr float, ptr %b, i64 %n{place}
  %y{place} = getelementptr float, ptr %y, i64 %n{place}
  br label %tiles{place}.0
""")
        for turn, rows in enumerate(_TILE_ROWS):
            name, last = f"{place}.{turn}", turn + 1 == len(_TILE_ROWS)
            begin = f"0, %strip{place}.begin" if not turn else f"%m{place}.{turn - 1}, %tiles{place}.{turn - 1}"
            text.append(f"""
tiles{name}:
  %m{name} = phi i64 [{begin}], [%m{name}.next, %tiles{name}.does]
  %m{name}.next = add i64 %m{name}, {rows}
  %m{name}.fits = icmp ule i64 %m{name}.next, %rows
  br i1 %m{name}.fits, label %tiles{name}.does, label %{f"strip{place}.end" if last else f"tiles{place}.{turn + 1}"}
tiles{name}.does:
  %x{name}.off = mul i64 %m{name}, %x.step
  %x{name} = getelementptr float, ptr %x, i64 %x{name}.off
  %y{name}.off = mul i64 %m{name}, %y.step
  %y{name} = getelementptr float, ptr %y{place}, i64 %y{name}.off
  call void @tile_{rows}_{vectors}(
    ptr %x{name}, i64 %x.step, ptr %b{place}, i64 %b.step, ptr %y{name}, i64 %y.step, i64 %inner)
  br label %tiles{name}
""")
        text.append(f"strip{place}.end:\n  br label %strip{place}\n")
    text.append("done:\n  ret void\n}\n")
    return "".join(text)


def _softmax() -> str:
    """A row's scores become shares. Those beyond `count` repeat one, so that they cannot be the largest."""
    longs, lanes = "<16 x i64>", ", ".join(f"i64 {lane}" for lane in range(16))
    return f"""
define internal void @softmax(ptr %row, i64 %count, i64 %padded) {{
entry:
{spread("counts", "%count", "i64", longs)}
{load("begin", "f32", "%row", "0")}
  br label %greatest
greatest:
  %g = phi i64 [0, %entry], [%g.next, %greatest]
  %most = phi {_V} [%begin, %entry], [%most.next, %greatest]
{load("a", "f32", "%row", "%g")}
  %above = fcmp ogt {_V} %a, %most
  %most.next = select <16 x i1> %above, {_V} %a, {_V} %most
  %g.next = add i64 %g, 16
  %g.more = icmp ult i64 %g.next, %padded
  br i1 %g.more, label %greatest, label %weigh
weigh:
  %largest = call float @llvm.vector.reduce.fmax.v16f32({_V} %most.next)
{spread("largests", "%largest", "float", _V)}
  br label %weighing
weighing:
  %w = phi i64 [0, %weigh], [%w.next, %weighing]
  %total = phi {_V} [zeroinitializer, %weigh], [%total.next, %weighing]
{load("s", "f32", "%row", "%w")}
  %less = fsub {_V} %s, %largests
  %power = call {_V} @exp16({_V} %less)
  store {_V} %power, ptr %s.at, align 4
{spread("w.first", "%w", "i64", longs)}
  %places = add {longs} %w.first, <{lanes}>
  %within = icmp ult {longs} %places, %counts
  %counted = select <16 x i1> %within, {_V} %power, {_V} zeroinitializer
  %total.next = fadd {_V} %total, %counted
  %w.next = add i64 %w, 16
  %w.more = icmp ult i64 %w.next, %padded
  br i1 %w.more, label %weighing, label %divide
divide:
  %sum = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {_V} %total.next)
  %inverse = fdiv float 1.0, %sum
{spread("inverses", "%inverse", "float", _V)}
  br label %share
share:
  %d = phi i64 [0, %divide], [%d.next, %share]
{load("e", "f32", "%row", "%d")}
  %part = fmul {_V} %e, %inverses
  store {_V} %part, ptr %e.at, align 4
  %d.next = add i64 %d, 16
  %d.more = icmp ult i64 %d.next, %padded
  br i1 %d.more, label %share, label %done
done:
  ret void
}}
"""


def _attend(size: int, kind: str) -> str:
    """A part's head is counted before its window: threads get all windows of some heads each, which are equal work."""
    type_ = TYPES[kind]
    part, end = parts("%first", "%last")

    def at(name: str, place: str) -> str:
        """%NAME.PLACE: the head's numbers of position `place` of q, k, v or y."""
        own = f"%{name}.{place}"
        return (
            f"  {own}.row = mul i64 %{place}, %{name}.step\n  {own}.off = add i64 {own}.row, %head.first\n"
            f"  {own} = getelementptr {type_}, ptr %{name}, i64 {own}.off\n"
        )

    return f"""
define void @attend(ptr %job, i64 %first, i64 %last) {{
entry:
{words(JOB, POINTERS, *JOB[: -len(SHARED_WORDS)])}
  %scale.short = trunc i64 %scale to i32
  %scale.float = bitcast i32 %scale.short to float
  %thread = call i32 @omp_get_thread_num()
  %thread.wide = zext i32 %thread to i64
  %window.numbers = mul i64 %longest, {size}
  %score.numbers = mul i64 %longest, {ROWS}
  %windows.numbers = mul i64 %window.numbers, 2
  %rows.numbers = add i64 %windows.numbers, %score.numbers
  %thread.numbers = add i64 %rows.numbers, {2 * ROWS * size}
  %own.off = mul i64 %thread.wide, %thread.numbers
  %keys = getelementptr float, ptr %scratch, i64 %own.off
  %values = getelementptr float, ptr %keys, i64 %window.numbers
  %scores = getelementptr float, ptr %values, i64 %window.numbers
  %queries = getelementptr float, ptr %scores, i64 %score.numbers
  %results = getelementptr float, ptr %queries, i64 {ROWS * size}
{part}
  %head = udiv i64 %p, %windows
  %window = urem i64 %p, %windows
  %head.first = mul i64 %head, {size}
  %start.at = getelementptr i32, ptr %bounds, i64 %window
  %start.short = load i32, ptr %start.at
  %start = zext i32 %start.short to i64
  %stop.at = getelementptr i32, ptr %start.at, i64 1
  %stop.short = load i32, ptr %stop.at
  %stop = zext i32 %stop.short to i64
  %count = sub i64 %stop, %start
  %empty = icmp eq i64 %count, 0
  br i1 %empty, label %part.end, label %some
some:
  %count.up = add i64 %count, 15
  %padded = and i64 %count.up, -16
{at("k", "start")}{at("v", "start")}
  call void @transposed(ptr %k.start, i64 %k.step, i64 %count, i64 %padded, ptr %keys)
  call void @read(ptr %v.start, i64 %v.step, i64 %count, float 1.0, ptr %values, i64 {size})
  br label %tile
tile:
  %r = phi i64 [0, %some], [%r.next, %tile.end]
  %left = sub i64 %count, %r
  %rows = call i64 @llvm.umin.i64(i64 %left, i64 {ROWS})
  %t = add i64 %start, %r
{at("q", "t")}{at("y", "t")}
  call void @read(ptr %q.t, i64 %q.step, i64 %rows, float %scale.float, ptr %queries, i64 {size})
  call void @product(
    ptr %queries, i64 {size}, ptr %keys, i64 %padded, ptr %scores, i64 %padded, i64 {size}, i64 %rows, i64 %padded)
  br label %row
row:
  %s = phi i64 [0, %tile], [%s.next, %row]
  %row.off = mul i64 %s, %padded
  %row.at = getelementptr float, ptr %scores, i64 %row.off
  call void @softmax(ptr %row.at, i64 %count, i64 %padded)
  %s.next = add i64 %s, 1
  %s.more = icmp ult i64 %s.next, %rows
  br i1 %s.more, label %row, label %tile.end
tile.end:
  call void @product(
    ptr %scores, i64 %padded, ptr %values, i64 {size}, ptr %results, i64 {size}, i64 %count, i64 %rows, i64 {size})
  call void @written(ptr %results, i64 {size}, i64 %rows, float 1.0, ptr %y.t, i64 %y.step)
  %r.next = add i64 %r, {ROWS}
  %r.more = icmp ult i64 %r.next, %count
  br i1 %r.more, label %tile, label %part.end
{end}
"""
