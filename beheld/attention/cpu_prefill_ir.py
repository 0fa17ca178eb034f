"""LLVM IR of attention of a prompt's tokens on a CPU with products of pairs in bfloat16; see cpu_prefill.py.

Parts, in this order:

    pack      16 positions of a key-value head: keys and values are copied from the paged cache in the order of weights
              (platform/pair_products_ir.py): keys as outputs by inputs (positions, C), values as (C, positions)
    attend    ROWS queries of a key-value head's group: scores by a product with the keys, their softmax in float32,
              and a product of the shares in bfloat16 with the values

A query sees the positions from its `low` to its `stop`; the shares of others are zeros. Both grow with the queries.
Positions are counted from 0 whatever queries share a part, so that a query's result has the same bits in any prompt.

Shapes: P queries, H query heads, K key-value heads, G = H / K, C head size, L positions, padded to a multiple of 16.
"""

from __future__ import annotations

from beheld.attention.paged_ir import head_place
from beheld.platform import pair_products_ir
from beheld.platform.jit import SHARED_WORDS, sharing
from beheld.platform.vector_ir import EXP, REDUCTIONS, float_text, load, parts, spread, stored, words

# q (P, H, C) with `q.step` numbers a row, y (P, H, C); packed keys and values; `scores` ROWS x (L + SPARE) float32 a
# thread; `zeros` max(L, C) float32; `tiles` of queries; `first` the first position that any of them sees.
JOB = (
    "q", "keys", "values", "table", "keys.packed", "values.packed", "low", "stop", "y", "scores", "zeros",
    "rows", "q.step", "y.step", "heads", "group", "shift", "mask", "scale", "first", "known", "length", "tiles",
    *SHARED_WORDS,
)  # fmt: skip
POINTERS = JOB[: JOB.index("rows")]
NAMES = ("pack", "attend")
# Queries of a part: a block of keys stays in the first cache for all of them.
ROWS = 32
# Numbers between rows of scores, whose places in the first cache would be the same at distances of powers of two.
SPARE = 16
_V = "<16 x float>"
_LOWEST = float_text(-3.0e38)


def module(size: int, triple: str) -> str:
    """Return the text of the module for heads of this size."""
    return f"""
target triple = "{triple}"
{pair_products_ir.DECLARED}
{REDUCTIONS}{EXP}
{pair_products_ir.products("f32")}
{pair_products_ir.products("bf16")}
{_pack(size)}
{_softmax()}
{_attend(size)}
{sharing(JOB)}
"""


def _pack(size: int) -> str:
    """A part is a block of 16 positions of a head, from that of `first` on; those before it and not known are zeros.

    A window's cache no longer holds the positions before it: their places may have anything, NaN too.
    """
    pairs = size // 2
    interleaved = ", ".join(f"i32 {lane}, i32 {lane + 16}" for lane in range(16))
    columns = "".join(
        f"""
  %one{c}.at = getelementptr i16, ptr %v.even, i64 {16 * c}
  %two{c}.at = getelementptr i16, ptr %v.odd, i64 {16 * c}
  %one{c}.read = load <16 x i16>, ptr %one{c}.at, align 2
  %one{c} = select i1 %is.even, <16 x i16> %one{c}.read, <16 x i16> zeroinitializer
  %two{c}.read = load <16 x i16>, ptr %two{c}.at, align 2
  %two{c} = select i1 %is.pair, <16 x i16> %two{c}.read, <16 x i16> zeroinitializer
  %both{c} = shufflevector <16 x i16> %one{c}, <16 x i16> %two{c}, <32 x i32> <{interleaved}>
  %to{c}.column = mul i64 %length, {16 * c}
  %to{c}.off = add i64 %to{c}.column, %v.place
  %to{c} = getelementptr i16, ptr %v.head, i64 %to{c}.off
  store <32 x i16> %both{c}, ptr %to{c}, align 2
"""
        for c in range(size // 16)
    )

    part, end = parts("%begin", "%last")
    return f"""
define void @pack(ptr %job, i64 %begin, i64 %last) {{
entry:
{words(JOB, POINTERS, "keys", "values", "table", "keys.packed", "values.packed", "heads", "shift", "mask")}
{words(JOB, POINTERS, "first", "known", "length")}
  %blocks.all = lshr i64 %length, 4
  %blocks.before = lshr i64 %first, 4
  %blocks = sub i64 %blocks.all, %blocks.before
  %head.numbers = mul i64 %length, {size}
{part}
  %head = udiv i64 %p, %blocks
  %block.own = urem i64 %p, %blocks
  %block = add i64 %block.own, %blocks.before
  %from = shl i64 %block, 4
  %head.off = mul i64 %head, %head.numbers
  %v.head = getelementptr i16, ptr %values.packed, i64 %head.off
  %block.off = mul i64 %from, {size}
  %block.to = add i64 %head.off, %block.off
  %k.to = getelementptr i16, ptr %keys.packed, i64 %block.to
  br label %key
key:
  %j = phi i64 [0, %part], [%j.next, %key.end]
  %j.at = add i64 %from, %j
  %k.column = getelementptr i32, ptr %k.to, i64 %j
  %j.early = icmp ult i64 %j.at, %known
  %j.late = icmp uge i64 %j.at, %first
  %is.known = and i1 %j.early, %j.late
  br i1 %is.known, label %copies, label %blank
copies:
{head_place("k", "%j.at", size)}
  %k.row = getelementptr i16, ptr %keys, i64 %k.off
  br label %copy
copy:
  %t = phi i64 [0, %copies], [%t.next, %copy]
  %pair.at = getelementptr i32, ptr %k.row, i64 %t
  %pair = load i32, ptr %pair.at, align 2
  %pair.off = shl i64 %t, 4
  %pair.to = getelementptr i32, ptr %k.column, i64 %pair.off
  store i32 %pair, ptr %pair.to, align 2
  %t.next = add i64 %t, 1
  %t.more = icmp ult i64 %t.next, {pairs}
  br i1 %t.more, label %copy, label %key.end
blank:
  %b = phi i64 [0, %key], [%b.next, %blank]
  %blank.off = shl i64 %b, 4
  %blank.to = getelementptr i32, ptr %k.column, i64 %blank.off
  store i32 0, ptr %blank.to, align 2
  %b.next = add i64 %b, 1
  %b.more = icmp ult i64 %b.next, {pairs}
  br i1 %b.more, label %blank, label %key.end
key.end:
  %j.next = add i64 %j, 1
  %j.more = icmp ult i64 %j.next, 16
  br i1 %j.more, label %key, label %value
value:
  %i = phi i64 [0, %key.end], [%i.next, %value.end]
  %even = add i64 %from, %i
  %odd.own = add i64 %even, 1
  %v.place = shl i64 %even, 4
  %i.early = icmp ult i64 %even, %known
  %i.late = icmp uge i64 %odd.own, %first
  %is.value = and i1 %i.early, %i.late
  br i1 %is.value, label %join, label %empty
join:
  %is.even = icmp uge i64 %even, %first
  %is.pair = icmp ult i64 %odd.own, %known
  %odd = select i1 %is.pair, i64 %odd.own, i64 %even
{head_place("e", "%even", size)}{head_place("o", "%odd", size)}
  %v.even = getelementptr i16, ptr %values, i64 %e.off
  %v.odd = getelementptr i16, ptr %values, i64 %o.off
{columns}
  br label %value.end
empty:
  %c = phi i64 [0, %value], [%c.next, %empty]
  %c.column = mul i64 %length, %c
  %c.off = add i64 %c.column, %v.place
  %c.to = getelementptr i16, ptr %v.head, i64 %c.off
  store <32 x i16> zeroinitializer, ptr %c.to, align 2
  %c.next = add i64 %c, 16
  %c.more = icmp ult i64 %c.next, {size}
  br i1 %c.more, label %empty, label %value.end
value.end:
  %i.next = add i64 %i, 2
  %i.more = icmp ult i64 %i.next, 16
  br i1 %i.more, label %value, label %part.end
{end}
"""


def _softmax() -> str:
    """A row's scores from %from to %to, multiples of 16, become shares in bfloat16, at the row's beginning."""
    lanes = ", ".join(f"i64 {lane}" for lane in range(16))
    longs = "<16 x i64>"

    def within(name: str, place: str) -> str:
        """Which positions from `place` on the query sees."""
        return (
            spread(f"{name}.first", place, "i64", longs)
            + f"  %{name}.places = add {longs} %{name}.first, <{lanes}>\n"
            + f"  %{name}.late = icmp uge {longs} %{name}.places, %low.all\n"
            + f"  %{name}.early = icmp ult {longs} %{name}.places, %stop.all\n"
            + f"  %{name} = and <16 x i1> %{name}.late, %{name}.early\n"
        )

    return f"""
define internal void @softmax(ptr %row, i64 %from, i64 %to, i64 %low, i64 %stop, float %scale) {{
entry:
{spread("low.all", "%low", "i64", longs)}{spread("stop.all", "%stop", "i64", longs)}
{spread("scale.all", "%scale", "float", _V)}{spread("lowest.all", _LOWEST, "float", _V)}
  %begin = and i64 %low, -16
  %stop.up = add i64 %stop, 15
  %end = and i64 %stop.up, -16
  br label %greatest
greatest:
  %g = phi i64 [%begin, %entry], [%g.next, %greatest]
  %most = phi {_V} [%lowest.all, %entry], [%most.next, %greatest]
{load("a", "f32", "%row", "%g")}
{within("g.seen", "%g")}
  %a.scaled = fmul {_V} %a, %scale.all
  %a.seen = select <16 x i1> %g.seen, {_V} %a.scaled, {_V} %lowest.all
  store {_V} %a.seen, ptr %a.at, align 4
  %above = fcmp ogt {_V} %a.seen, %most
  %most.next = select <16 x i1> %above, {_V} %a.seen, {_V} %most
  %g.next = add i64 %g, 16
  %g.more = icmp ult i64 %g.next, %end
  br i1 %g.more, label %greatest, label %weigh
weigh:
  %largest = call float @llvm.vector.reduce.fmax.v16f32({_V} %most.next)
{spread("largest.all", "%largest", "float", _V)}
  br label %weighing
weighing:
  %w = phi i64 [%begin, %weigh], [%w.next, %weighing]
  %total = phi {_V} [zeroinitializer, %weigh], [%total.next, %weighing]
{load("s", "f32", "%row", "%w")}
{within("w.seen", "%w")}
  %less = fsub {_V} %s, %largest.all
  %power = call {_V} @exp16({_V} %less)
  %power.seen = select <16 x i1> %w.seen, {_V} %power, {_V} zeroinitializer
  store {_V} %power.seen, ptr %s.at, align 4
  %total.next = fadd {_V} %total, %power.seen
  %w.next = add i64 %w, 16
  %w.more = icmp ult i64 %w.next, %end
  br i1 %w.more, label %weighing, label %divide
divide:
  %sum = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {_V} %total.next)
  %inverse = fdiv float 1.0, %sum
{spread("inverse.all", "%inverse", "float", _V)}
  br label %share
share:
  %d = phi i64 [%from, %divide], [%d.next, %share.end]
  %d.late = icmp uge i64 %d, %begin
  %d.early = icmp ult i64 %d, %end
  %d.seen = and i1 %d.late, %d.early
  br i1 %d.seen, label %shares, label %share.none
shares:
{load("e", "f32", "%row", "%d")}
  %part = fmul {_V} %e, %inverse.all
{stored("bf16", True, "%part", "%row", "%d", "out")}
  br label %share.end
share.none:
  %none.at = getelementptr i16, ptr %row, i64 %d
  store <16 x i16> zeroinitializer, ptr %none.at, align 2
  br label %share.end
share.end:
  %d.next = add i64 %d, 16
  %d.more = icmp ult i64 %d.next, %to
  br i1 %d.more, label %share, label %done
done:
  ret void
}}
"""


def _attend(size: int) -> str:
    """A part is a tile of queries of a key-value head; tiles come from both ends in turn, so that shares are equal."""

    def product(name: str, **values: str) -> str:
        """Set the words of a product's job."""
        lines = []
        for word, value in values.items():
            place, kind = pair_products_ir.WORDS.index(word.replace("_", ".")), "i64"
            if word in pair_products_ir.POINTERS:
                kind = "ptr"
            lines.append(f"  %{name}.{word} = getelementptr i64, ptr %{name}, i64 {place}")
            lines.append(f"  store {kind} {value}, ptr %{name}.{word}")
        return "\n".join(lines)

    words_ = len(pair_products_ir.WORDS)
    part, end = parts("%first", "%last")
    return f"""
define void @attend(ptr %job, i64 %first, i64 %last) {{
entry:
  %scoring = alloca [{words_} x i64]
  %mixing = alloca [{words_} x i64]
{words(JOB, POINTERS, "q", "keys.packed", "values.packed", "low", "stop", "y", "scores", "zeros", "rows", "q.step")}
{words(JOB, POINTERS, "y.step", "heads", "group", "scale", "length", "tiles")}
  %scale.short = trunc i64 %scale to i32
  %scale.float = bitcast i32 %scale.short to float
  %thread = call i32 @omp_get_thread_num()
  %thread.wide = zext i32 %thread to i64
  %row.step = add i64 %length, {SPARE}
  %thread.numbers = mul i64 %row.step, {ROWS}
  %own.off = mul i64 %thread.wide, %thread.numbers
  %own = getelementptr float, ptr %scores, i64 %own.off
  %head.numbers = mul i64 %length, {size}
  %block.numbers = mul i64 %length, 16
  %share.step = mul i64 %row.step, 2
{part}
  %head = udiv i64 %p, %tiles
  %turn = urem i64 %p, %tiles
  %early = lshr i64 %turn, 1
  %tiles.less = sub i64 %tiles, 1
  %late = sub i64 %tiles.less, %early
  %turn.odd = trunc i64 %turn to i1
  %tile = select i1 %turn.odd, i64 %late, i64 %early
  %r.first = mul i64 %tile, {ROWS}
  %r.next = add i64 %r.first, {ROWS}
  %r.stop = call i64 @llvm.umin.i64(i64 %r.next, i64 %rows)
  %count = sub i64 %r.stop, %r.first
  %low.at = getelementptr i64, ptr %low, i64 %r.first
  %low.least = load i64, ptr %low.at
  %r.last = sub i64 %r.stop, 1
  %stop.at = getelementptr i64, ptr %stop, i64 %r.last
  %stop.most = load i64, ptr %stop.at
  %from = and i64 %low.least, -16
  %stop.up = add i64 %stop.most, 15
  %to = and i64 %stop.up, -16
  %numbers = sub i64 %to, %from
  %block.from = lshr i64 %from, 4
  %block.to = lshr i64 %to, 4
  %head.off = mul i64 %head, %head.numbers
  %k.head = getelementptr bfloat, ptr %keys.packed, i64 %head.off
  %v.from = mul i64 %from, 16
  %v.first = add i64 %head.off, %v.from
  %v.head = getelementptr bfloat, ptr %values.packed, i64 %v.first
  %shares = getelementptr bfloat, ptr %own, i64 %from
  %first.query = mul i64 %head, %group
  %q.rows = mul i64 %r.first, %q.step
  %y.rows = mul i64 %r.first, %y.step
  br label %query
query:
  %g = phi i64 [0, %part], [%g.next, %query.end]
  %h = add i64 %first.query, %g
  %h.off = mul i64 %h, {size}
  %q.off = add i64 %q.rows, %h.off
  %q.own = getelementptr bfloat, ptr %q, i64 %q.off
  %y.off = add i64 %y.rows, %h.off
  %y.own = getelementptr bfloat, ptr %y, i64 %y.off
{
        product(
            "scoring",
            x="%q.own",
            weights="%k.head",
            bias="%zeros",
            y="%own",
            rows="%count",
            inputs=str(size),
            outputs="%length",
            x_step="%q.step",
            w_step=str(16 * size),
            y_step="%row.step",
        )
    }
  call void @product_f32(ptr %scoring, i64 %block.from, i64 %block.to)
  br label %row
row:
  %r = phi i64 [0, %query], [%r.after, %row]
  %r.at = add i64 %r.first, %r
  %r.low.at = getelementptr i64, ptr %low, i64 %r.at
  %r.low = load i64, ptr %r.low.at
  %r.stop.at = getelementptr i64, ptr %stop, i64 %r.at
  %r.own.stop = load i64, ptr %r.stop.at
  %row.off = mul i64 %r, %row.step
  %row.at = getelementptr float, ptr %own, i64 %row.off
  call void @softmax(ptr %row.at, i64 %from, i64 %to, i64 %r.low, i64 %r.own.stop, float %scale.float)
  %r.after = add i64 %r, 1
  %r.more = icmp ult i64 %r.after, %count
  br i1 %r.more, label %row, label %query.end
query.end:
{
        product(
            "mixing",
            x="%shares",
            weights="%v.head",
            bias="%zeros",
            y="%y.own",
            rows="%count",
            inputs="%numbers",
            outputs=str(size),
            x_step="%share.step",
            w_step="%block.numbers",
            y_step="%y.step",
        )
    }
  call void @product_bf16(ptr %mixing, i64 0, i64 {size // 16})
  %g.next = add i64 %g, 1
  %g.more = icmp ult i64 %g.next, %group
  br i1 %g.more, label %query, label %part.end
{end}
"""
