"""LLVM IR of attention of decoding sequences on a CPU; see cpu_decode.py.

A part is a pair of a sequence and a key-value head; "at.once" heads of one sequence are done together. A thread has a
line of numbers for each of their query heads:

    scores, one for each position | 16 numbers, the first is the inverse of the sum | sums of values
"""

from __future__ import annotations

from typing import NamedTuple

from beheld.attention.paged_ir import head_place
from beheld.platform import jit
from beheld.platform.vector_ir import EXP, PREFETCH, REDUCTIONS, TYPES, float_text, load, parts, spread, stored, words

# `row` is the numbers of a row of q; with `store`, the row's keys and values follow its queries.
JOB = (
    "q", "keys", "values", "tables", "first", "stop", "y", "scores", "slots", "bias", "sums", "more",
    "heads", "group", "shift", "mask", "width", "scale", "most", "row", "bias.step", "sums.step", "at.once",
    *jit.SHARED_WORDS,
)  # fmt: skip
POINTERS = ("q", "keys", "values", "tables", "first", "stop", "y", "scores", "slots", "bias", "sums", "more")
LANES = 16
BYTES = {"f32": 4, "bf16": 2}
_V = "<16 x float>"
# The cache that rows are read ahead into: the second.
_FETCHED = 2
_FMA = f"call {_V} @llvm.fmuladd.v16f32"
# Additions that a CPU has under way at a time.
_CHAINS = 4


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


def _dot(name: str, kind: str, row: str, vectors: int, queries: str) -> str:
    """Multiply a key of so many vectors by a query: the sum of the lanes of the last, %name(vectors - 1), is left."""
    return "".join(
        load(f"{name}.k{i}", kind, row, str(i * LANES))
        + (
            f"  %{name}{i} = {_FMA}({_V} %{name}.k{i}, {_V} %{queries}q{i}, {_V} %{name}{i - 1})\n"
            if i
            else f"  %{name}0 = fmul {_V} %{name}.k0, %{queries}q0\n"
        )
        for i in range(vectors)
    )


def _dots(name: str, kind: str, vectors: int) -> str:
    """Multiply the query by 16 keys, from %many.key.at on, %position numbers apart: %name has a product in each lane.

    Lanes are added up by pairs of vectors, so that additions are of whole vectors: of two keys, then four, eight and
    16, each as soon as it can be, because registers hold few vectors.
    """
    text: list[str] = []

    def made(first: int, keys: int, own: str) -> None:
        if keys == 1:
            if first:
                before = f"%k.row{first - 1}" if first > 1 else "%many.key.at"
                text.append(f"  %k.row{first} = getelementptr {TYPES[kind]}, ptr {before}, i64 %position\n")
            text.append(_dot(f"many{first}.", kind, f"%k.row{first}" if first else "%many.key.at", vectors, "many."))
            return
        half = keys // 2
        halves = [f"many{at}.{vectors - 1}" if half == 1 else f"many{at}.{half}.keys" for at in (first, first + half)]
        for at, each in zip((first, first + half), halves, strict=True):
            made(at, half, each)
        both = f"{_V} %{halves[0]}, {_V} %{halves[1]}"
        for side, lanes in zip("ab", _PAIRED[keys], strict=True):
            text.append(f"  %{own}.{side} = shufflevector {both}, <16 x i32> {lanes}\n")
        text.append(f"  %{own} = fadd {_V} %{own}.a, %{own}.b\n")

    made(0, LANES, name)
    return "".join(text)


def _paired() -> dict[int, tuple[str, str]]:
    """Of each number of keys, which lanes of two vectors with half as many keys are added.

    A vector has a key's sums four times at first, in its four quarters, and its lanes, 1 to 4 of a quarter:

        1 key   a a a a | a a a a | ..      2 keys   a b a b | ..      4 keys   a b c d | a b c d | ..
        8 keys  a b c d | a b c d | e f g h | e f g h                  16 keys  a b c d | e f g h | ..
    """
    quarters = [range(4 * quarter, 4 * quarter + 4) for quarter in range(8)]
    lanes = {
        2: [[q[i] + 16 * other for q in quarters[:4] for i in side for other in (0, 1)] for side in ((0, 1), (2, 3))],
        4: [[q[i] + 16 * other for q in quarters[:4] for other in (0, 1) for i in side] for side in ((0, 1), (2, 3))],
        8: [[lane for n in side for lane in quarters[n]] for side in ((0, 1, 4, 5), (2, 3, 6, 7))],
        16: [[lane for n in side for lane in quarters[n]] for side in ((0, 2, 4, 6), (1, 3, 5, 7))],
    }
    texts = {
        keys: ["<" + ", ".join(f"i32 {lane}" for lane in own) + ">" for own in both] for keys, both in lanes.items()
    }
    return {keys: (both[0], both[1]) for keys, both in texts.items()}


_PAIRED = _paired()


def _named(text: str, prefix: str) -> str:
    """Return IR whose names begin with a prefix in place of NAME."""
    return text.replace("NAME", prefix)


def _together(name: str, after: str) -> str:
    """Set %name.together to whether 16 positions from one on are seen and lie in one block; `after` is beyond them."""
    return f"""
  %{name}.enough = icmp ule i64 {after}, %count
  %{name}.left = sub i64 %mask, %{name}.in
  %{name}.fits = icmp uge i64 %{name}.left, {LANES - 1}
  %{name}.together = and i1 %{name}.enough, %{name}.fits
"""


# Reads 16 rows ahead, so many bytes of each, in the order of memory. Memory that is not there does no harm.
_FETCH = f"""
{PREFETCH}
define internal void @fetch(ptr %row.first, i64 %step, i64 %bytes) {{
entry:
  br label %row
row:
  %n = phi i64 [0, %entry], [%n.next, %row.end]
  %off = mul i64 %n, %step
  %at = getelementptr i8, ptr %row.first, i64 %off
  br label %line
line:
  %byte = phi i64 [0, %row], [%byte.next, %line]
  %here = getelementptr i8, ptr %at, i64 %byte
  call void @llvm.prefetch.p0(ptr %here, i32 0, i32 {_FETCHED}, i32 1)
  %byte.next = add i64 %byte, 64
  %more = icmp ult i64 %byte.next, %bytes
  br i1 %more, label %line, label %row.end
row.end:
  %n.next = add i64 %n, 1
  %again = icmp ult i64 %n.next, {LANES}
  br i1 %again, label %row, label %done
done:
  ret void
}}
"""


def _ahead(name: str, position: str, rows: str, kind: str, size: int, after: str) -> str:
    """Fetch 16 rows of keys or values from a position on, if it is seen, then go to `after`."""
    return f"""
  br label %{name}
{name}:
  %{name}.seen = icmp ult i64 {position}, %count
  br i1 %{name}.seen, label %{name}.fetch, label %{after}
{name}.fetch:
  %{name}.at = add i64 %from, {position}
{head_place(name, f"%{name}.at", size)}
  %{name}.row = getelementptr {TYPES[kind]}, ptr {rows}, i64 %{name}.off
  call void @fetch(ptr %{name}.row, i64 %position.bytes, i64 %own.bytes)
  br label %{after}
"""


def _each_query(block: str, entered: str, kind: str, size: int, row: str, position: str) -> str:
    """Begin a loop over the part's key-value heads, and one over each head's queries, in the block `block`.

    In it, %block.at is where the head begins in the position's row, %block.score where the query's line has the
    position, and %block.rest what follows scores there; %q.at and %own.head, with the block's first word, are the
    query's own numbers and its number.
    """
    word = block.split(".")[0]
    query = ""
    if block.endswith("key"):
        query = f"""
  %{block}.q = mul i64 %{block}.n, {size}
  %{word}.q.at = getelementptr {TYPES[kind]}, ptr %q.first, i64 %{block}.q
  %{word}.own.head = add i64 %first.query, %{block}.n
"""
    return f"""
{block}:
  %{block}.h = phi i64 [0, %{entered}], [%{block}.h.next, %{block}.head.end]
  %{block}.h.off = mul i64 %{block}.h, {size}
  %{block}.at = getelementptr {TYPES[kind]}, ptr {row}, i64 %{block}.h.off
  %{block}.h.first = mul i64 %{block}.h, %group
  br label %{block}.query
{block}.query:
  %{block}.g = phi i64 [0, %{block}], [%{block}.g.next, %{block}.query]
  %{block}.n = add i64 %{block}.h.first, %{block}.g
  %{block}.line.off = mul i64 %{block}.n, %line
  %{block}.line = getelementptr float, ptr %own, i64 %{block}.line.off
  %{block}.rest = getelementptr float, ptr %{block}.line, i64 %most
  %{block}.score = getelementptr float, ptr %{block}.line, i64 {position}
{query}"""


def _queries_end(block: str, after: str) -> str:
    """End the loops of `_each_query`, and go to `after`."""
    return f"""
  %{block}.g.next = add i64 %{block}.g, 1
  %{block}.g.more = icmp ult i64 %{block}.g.next, %group
  br i1 %{block}.g.more, label %{block}.query, label %{block}.head.end
{block}.head.end:
  %{block}.h.next = add i64 %{block}.h, 1
  %{block}.h.more = icmp ult i64 %{block}.h.next, %own.heads
  br i1 %{block}.h.more, label %{block}, label %{block}.end
{block}.end:
  br label %{after}
"""


def _weighted(kind: str, vectors: int, in_hardware: bool) -> str:
    """Add 16 values from %many.value.at on, times their shares, to the line's sums."""
    # So many sums of each vector that one addition need not wait for the one before.
    chains = max(1, _CHAINS // vectors)
    text: list[str] = [load(f"many.sum{i}.0", "f32", "%many.sums", str(i * LANES)) for i in range(vectors)]
    newest = {(i, 0): f"%many.sum{i}.0" for i in range(vectors)}
    for n in range(LANES):
        row = f"%many.v{n}.row" if n else "%many.value.at"
        if n:
            before = f"%many.v{n - 1}.row" if n > 1 else "%many.value.at"
            text.append(f"  {row} = getelementptr {TYPES[kind]}, ptr {before}, i64 %position\n")
        text.append(f"  %share{n}.at = getelementptr float, ptr %many.value.score, i64 {n}\n")
        text.append(
            f"  %share{n} = load float, ptr %share{n}.at\n" + spread(f"share{n}.all", f"%share{n}", "float", _V)
        )
        for i in range(vectors):
            made, own = f"%many.v{n}.sum{i}", (i, n % chains)
            text.append(load(f"many.v{n}.{i}", kind, row, str(i * LANES)))
            if own in newest:
                text.append(f"  {made} = {_FMA}({_V} %many.v{n}.{i}, {_V} %share{n}.all, {_V} {newest[own]})\n")
            else:
                text.append(f"  {made} = fmul {_V} %many.v{n}.{i}, %share{n}.all\n")
            newest[own] = made
    for i in range(vectors):
        for c in range(1, chains):
            text.append(f"  %many.total{i}.{c} = fadd {_V} {newest[i, 0]}, {newest[i, c]}\n")
            newest[i, 0] = f"%many.total{i}.{c}"
        text.append(stored("f32", in_hardware, newest[i, 0], "%many.sums", str(i * LANES), f"many.kept{i}"))
    return "".join(text)


def module(kind: str, size: int, form: DecodeForm, in_hardware: bool, triple: str) -> str:
    """Return the IR of `decode`, which attends, and of `store`, which writes a step's own keys and values.

    Keys are read position after position, of all heads that are done together, in the order of memory, and so are
    values: head after head, each position's place is far from the one before, and a CPU reads ahead of neither.
    """
    type_ = TYPES[kind]
    scores, shares = _scores(kind, size, form), _shares(kind, size, form, in_hardware)
    sums, answers = _sums(kind, size, in_hardware), _answers(kind, size, in_hardware)
    return f"""
target triple = "{triple}"
{REDUCTIONS}{EXP}
{_FETCH}
{jit.sharing(JOB)}
define void @decode(ptr %job, i64 %begin, i64 %end) {{
entry:
{words(JOB, POINTERS, *JOB[: -len(jit.SHARED_WORDS)])}
  %scale.short = trunc i64 %scale to i32
  %scale.float = bitcast i32 %scale.short to float
{spread("scale.all", "%scale.float", "float", _V)}
  %position = mul i64 %heads, {size}
  %queries = mul i64 %at.once, %group
  %line = add i64 %most, {LANES + size}
  %position.bytes = mul i64 %position, {BYTES[kind]}
  %thread = call i32 @omp_get_thread_num()
  %thread.wide = zext i32 %thread to i64
  %thread.lines = mul i64 %thread.wide, %queries
  %scores.off = mul i64 %thread.lines, %line
  %own = getelementptr float, ptr %scores, i64 %scores.off
  %none = icmp uge i64 %begin, %end
  br i1 %none, label %done, label %part
part:
  %p = phi i64 [%begin, %entry], [%p.next, %part.end]
  %b = udiv i64 %p, %heads
  %head = urem i64 %p, %heads
  %heads.left = sub i64 %heads, %head
  %parts.left = sub i64 %end, %p
  %fewer = icmp ult i64 %parts.left, %heads.left
  %heads.mine = select i1 %fewer, i64 %parts.left, i64 %heads.left
  %too.many = icmp ugt i64 %heads.mine, %at.once
  %own.heads = select i1 %too.many, i64 %at.once, i64 %heads.mine
  %own.lines = mul i64 %own.heads, %group
  %first.at = getelementptr i64, ptr %first, i64 %b
  %from = load i64, ptr %first.at
  %stop.at = getelementptr i64, ptr %stop, i64 %b
  %to = load i64, ptr %stop.at
  %count = sub i64 %to, %from
  %table.off = mul i64 %b, %width
  %table = getelementptr i32, ptr %tables, i64 %table.off
  %first.query = mul i64 %head, %group
  %q.row = mul i64 %b, %row
  %q.own = mul i64 %first.query, {size}
  %q.off = add i64 %q.row, %q.own
  %q.first = getelementptr {type_}, ptr %q, i64 %q.off
  %own.bytes = mul i64 %own.heads, {size * BYTES[kind]}
{scores}{shares}{sums}{answers}part.end:
  %p.next = add i64 %p, %own.heads
  %p.more = icmp ult i64 %p.next, %end
  br i1 %p.more, label %part, label %done
done:
  ret void
}}
{_store(kind, size)}"""


def _scores(kind: str, size: int, form: DecodeForm) -> str:
    """Put the score of each position into the lines, from `begun` to `soft`: 16 positions at once, or one."""
    vectors, type_ = range(size // LANES), TYPES[kind]
    q_loads = "".join(
        load(f"NAMEq{i}.raw", kind, "%NAMEq.at", str(i * LANES))
        + f"  %NAMEq{i} = fmul {_V} %NAMEq{i}.raw, %scale.all\n"
        for i in vectors
    )
    one_scored, many_scored, last = "", "", f"%dot{vectors[-1]}"
    if form.bias:
        bias = """
  %NAMEbias.off = add i64 %NAMEown.head, 1
  %NAMEbias.end = mul i64 %NAMEbias.off, %bias.step
  %NAMEbias.from = sub i64 %NAMEbias.end, %count
  %NAMEbias.place = add i64 %NAMEbias.from, %l
"""
        one_scored = (
            _named(bias, "one.")
            + """
  %one.bias.at = getelementptr float, ptr %bias, i64 %one.bias.place
  %one.bias = load float, ptr %one.bias.at
  %score = fadd float %dot.sum, %one.bias
"""
        )
        many_scored = _named(bias, "many.") + load("biases", "f32", "%bias", "%many.bias.place")
        many_scored += f"  %scores16 = fadd {_V} %dots, %biases\n"
    return f"""{_ahead("first.keys", "0", "%keys", kind, size, "begun")}
begun:
  br label %key
key:
  %l = phi i64 [0, %begun], [%l.next, %one.key.end], [%l.many, %many.key.end]
  %l.more = icmp ult i64 %l, %count
  br i1 %l.more, label %key.place, label %soft
key.place:
  %l.at = add i64 %from, %l
{head_place("k", "%l.at", size)}
  %k.row = getelementptr {type_}, ptr %keys, i64 %k.off
  %l.next = add i64 %l, 1
  %l.many = add i64 %l, {LANES}
{_together("k", "%l.many")}
  br i1 %k.together, label %many.keys, label %one.key
many.keys:
{_ahead("next.keys", "%l.many", "%keys", kind, size, "many.begin")}
many.begin:
  br label %many.key
{_each_query("many.key", "many.begin", kind, size, "%k.row", "%l")}
{_named(q_loads, "many.")}
{_dots("dots" if form.bias else "scores16", kind, len(vectors))}{many_scored}
  store {_V} %scores16, ptr %many.key.score, align 4
{_queries_end("many.key", "key")}
{_each_query("one.key", "key.place", kind, size, "%k.row", "%l")}
{_named(q_loads, "one.")}
{_dot("dot", kind, "%one.key.at", len(vectors), "one.")}
  %{"dot.sum" if form.bias else "score"} = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {_V} {last})
{one_scored}  store float %score, ptr %one.key.score
{_queries_end("one.key", "key")}
"""


def _shares(kind: str, size: int, form: DecodeForm, in_hardware: bool) -> str:
    """Turn each line's scores into shares that are not yet divided by their sum, and begin its sums of values."""
    vectors, type_ = range(size // LANES), TYPES[kind]
    opened, compared, counted, begun = "", "", "", ""
    if form.sums:
        opened = """
  %sums.off = mul i64 %b, %sums.step
  %sums.own = add i64 %sums.off, %own.head
  %sums.at = getelementptr float, ptr %sums, i64 %sums.own
  %sums.one = load float, ptr %sums.at
"""
        compared = """
  %sums.above = fcmp ogt float %sums.one, %largest.keys
  %largest.one = select i1 %sums.above, float %sums.one, float %largest.keys
"""
        counted = "  %sums.less = fsub float %sums.one, %largest.one\n" + spread(
            "sums.less.all", "%sums.less", "float", _V
        )
        counted += f"  %sums.power = call {_V} @exp16({_V} %sums.less.all)\n"
        counted += f"  %sums.share = extractelement {_V} %sums.power, i64 0\n"
    for i in vectors:
        first = "zeroinitializer"
        if form.more:
            begun += load(f"more{i}.raw", kind, "%more.line", str(i * LANES))
            begun += f"  %more{i} = fmul {_V} %more{i}.raw, %sums.power\n"
            first = f"%more{i}"
        begun += stored("f32", in_hardware, first, "%n.sums", str(i * LANES), f"begun{i}")
    lowest = float_text(-3.0e38)
    lowest_all = "<" + ", ".join([f"float {lowest}"] * LANES) + ">"
    largest, total = ("largest.one", "scores.sum") if form.sums else ("largest.keys", "sum")
    return f"""soft:
{_ahead("first.values", "0", "%values", kind, size, "softs")}
softs:
  br label %softly
softly:
  %n = phi i64 [0, %softs], [%n.next, %mix]
  %n.off = mul i64 %n, %line
  %n.line = getelementptr float, ptr %own, i64 %n.off
  %n.rest = getelementptr float, ptr %n.line, i64 %most
  %n.sums = getelementptr float, ptr %n.rest, i64 {LANES}
  %own.head = add i64 %first.query, %n
{opened}  br label %pad
pad:
  %d = phi i64 [%count, %softly], [%d.next, %padding]
  %d.low = and i64 %d, {LANES - 1}
  %d.done = icmp eq i64 %d.low, 0
  br i1 %d.done, label %compare, label %padding
padding:
  %d.at = getelementptr float, ptr %n.line, i64 %d
  store float {lowest}, ptr %d.at
  %d.next = add i64 %d, 1
  br label %pad
compare:
  %c = phi i64 [0, %pad], [%c.next, %compare]
  %largest16 = phi {_V} [{lowest_all}, %pad], [%largest16.next, %compare]
{load("compared", "f32", "%n.line", "%c")}
  %above16 = fcmp ogt {_V} %compared, %largest16
  %largest16.next = select <16 x i1> %above16, {_V} %compared, {_V} %largest16
  %c.next = add i64 %c, {LANES}
  %c.more = icmp ult i64 %c.next, %count
  br i1 %c.more, label %compare, label %weigh
weigh:
  %largest.keys = call float @llvm.vector.reduce.fmax.v16f32({_V} %largest16.next)
{compared}{spread("largest.all", f"%{largest}", "float", _V)}
  br label %weighing
weighing:
  %w = phi i64 [0, %weigh], [%w.next, %weighing]
  %total = phi {_V} [zeroinitializer, %weigh], [%total.next, %weighing]
{load("s", "f32", "%n.line", "%w")}
  %less = fsub {_V} %s, %largest.all
  %power = call {_V} @exp16({_V} %less)
  store {_V} %power, ptr %s.at, align 4
  %total.next = fadd {_V} %total, %power
  %w.next = add i64 %w, {LANES}
  %w.more = icmp ult i64 %w.next, %count
  br i1 %w.more, label %weighing, label %mix
mix:
  %{total} = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {_V} %total.next)
{counted}{"  %sum = fadd float %scores.sum, %sums.share" if form.sums else ""}
  %inverse.made = fdiv float 1.0, %sum
  store float %inverse.made, ptr %n.rest
  %y.before = mul i64 %p, %group
  %n.query = add i64 %y.before, %n
  %n.out = mul i64 %n.query, {size}
  %more.line = getelementptr {type_}, ptr %more, i64 %n.out
{begun}
  %n.next = add i64 %n, 1
  %n.again = icmp ult i64 %n.next, %own.lines
  br i1 %n.again, label %softly, label %value
"""


def _sums(kind: str, size: int, in_hardware: bool) -> str:
    """Add the values of all positions, times their shares, to the lines' sums."""
    vectors, type_ = range(size // LANES), TYPES[kind]
    one_adds = "".join(
        load(f"v{i}", kind, "%one.v.at", str(i * LANES))
        + load(f"sum{i}", "f32", "%one.sums", str(i * LANES))
        + f"  %sum{i}.next = {_FMA}({_V} %v{i}, {_V} %share.all, {_V} %sum{i})\n"
        + stored("f32", in_hardware, f"%sum{i}.next", "%one.sums", str(i * LANES), f"kept{i}")
        for i in vectors
    )
    return f"""value:
  %j = phi i64 [0, %mix], [%j.next, %one.value.end], [%j.many, %many.value.end]
  %j.more = icmp ult i64 %j, %count
  br i1 %j.more, label %value.place, label %out
value.place:
  %j.at = add i64 %from, %j
{head_place("v", "%j.at", size)}
  %v.row = getelementptr {type_}, ptr %values, i64 %v.off
  %j.next = add i64 %j, 1
  %j.many = add i64 %j, {LANES}
{_together("v", "%j.many")}
  br i1 %v.together, label %many.values, label %one.value
many.values:
{_ahead("next.values", "%j.many", "%values", kind, size, "many.start")}
many.start:
  br label %many.value
{_each_query("many.value", "many.start", kind, size, "%v.row", "%j")}
  %many.sums = getelementptr float, ptr %many.value.rest, i64 {LANES}
{_weighted(kind, len(vectors), in_hardware)}
{_queries_end("many.value", "value")}
{_each_query("one.value", "value.place", kind, size, "%v.row", "%j")}
  %one.v.at = getelementptr {type_}, ptr %one.value.at, i64 0
  %one.sums = getelementptr float, ptr %one.value.rest, i64 {LANES}
  %share = load float, ptr %one.value.score
{spread("share.all", "%share", "float", _V)}{one_adds}
{_queries_end("one.value", "value")}
"""


def _answers(kind: str, size: int, in_hardware: bool) -> str:
    """Write each line's sums, divided by the sum of its shares."""
    vectors, type_ = range(size // LANES), TYPES[kind]
    ends = "".join(
        load(f"end{i}", "f32", "%e.sums", str(i * LANES))
        + f"  %o{i} = fmul {_V} %end{i}, %inverse.all\n"
        + stored(kind, in_hardware, f"%o{i}", "%y.line", str(i * LANES), f"out{i}")
        for i in vectors
    )
    return f"""out:
  %e = phi i64 [0, %value], [%e.next, %out]
  %e.off = mul i64 %e, %line
  %e.line = getelementptr float, ptr %own, i64 %e.off
  %e.rest = getelementptr float, ptr %e.line, i64 %most
  %e.sums = getelementptr float, ptr %e.rest, i64 {LANES}
  %inverse = load float, ptr %e.rest
{spread("inverse.all", "%inverse", "float", _V)}
  %e.query = add i64 %y.before, %e
  %y.off = mul i64 %e.query, {size}
  %y.line = getelementptr {type_}, ptr %y, i64 %y.off
{ends}
  %e.next = add i64 %e, 1
  %e.more = icmp ult i64 %e.next, %own.lines
  br i1 %e.more, label %out, label %part.end
"""


def _store(kind: str, size: int) -> str:
    """Return the IR of `store`: rows of q hold their keys and values after the queries."""
    type_ = TYPES[kind]
    part, part_end = parts("%begin", "%end")
    return f"""define void @store(ptr %job, i64 %begin, i64 %end) {{
entry:
{words(JOB, POINTERS, "q", "keys", "values", "slots", "heads", "group", "row")}
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
