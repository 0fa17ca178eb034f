"""Plots of a load ladder, throughput and time to first token by number of clients: as SVG, and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 420, 300, 62, 40, 46
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.t{font-size:14px;font-weight:600}"
    "line{stroke:#ddd}.a{stroke:#333}.one{stroke:#0b5f58;fill:none;stroke-width:2}"
    ".two{stroke:#a3561b;fill:none;stroke-width:2;stroke-dasharray:5 3}"
)


def svg(lines: Sequence[Mapping[str, Any]], title: str) -> str:
    """Draw two panels; `lines` are reports of load.report with rising numbers of clients."""
    clients = [line["clients"] for line in lines]
    rate = [("one", "tokens a second", [line["tokens_per_s"] for line in lines])]
    first = [
        ("one", "median", [line["first_token_ms"]["p50"] for line in lines]),
        ("two", "99th percentile", [line["first_token_ms"]["p99"] for line in lines]),
    ]
    body = _panel(0, "throughput, tokens a second", clients, rate)
    body += _panel(_WIDTH, "to the first token, ms", clients, first)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {2 * _WIDTH} {_HEIGHT}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/><text class="t" x="{_LEFT}" y="20">{escape(title)}</text>'
        f"{body}</svg>\n"
    )


def text(lines: Sequence[Mapping[str, Any]], width: int) -> str:
    """Draw two bars a line in ASCII, `width` characters wide but at least 62: throughput, and time to first token,
    whose bar goes on from the median to the 99th percentile.
    """
    rates = [line["tokens_per_s"] for line in lines]
    firsts = [(line["first_token_ms"]["p50"], line["first_token_ms"]["p99"]) for line in lines]
    rate_words = [f"{rate:.1f}" for rate in rates]
    first_words = [f"{median:.0f} (p99 {high:.0f})" for median, high in firsts]
    rate_room, first_room = max(map(len, rate_words)), max(map(len, first_words))
    # A line is the number of clients (7), two bars with a figure each, and blanks between.
    bar = max(8, (width - 7 - rate_room - first_room - 8) // 2)
    left, right = bar + 1 + rate_room, bar + 1 + first_room
    made = [f"{'clients':>7}  {'tokens a second':<{left}}  {'first token, ms: = median, - p99':<{right}}"]
    for line, rate, (median, high), rate_word, first_word in zip(
        lines, rates, firsts, rate_words, first_words, strict=True
    ):
        first = "=" * _cells(median, max(each for _, each in firsts), bar)
        tail = "-" * (_cells(high, max(each for _, each in firsts), bar) - len(first))
        filled = "=" * _cells(rate, max(rates), bar)
        made.append(
            f"{line['clients']:>7}  {f'{filled} {rate_word}':<{left}}  {f'{first}{tail} {first_word}':<{right}}"
        )
    return "\n".join(row.rstrip() for row in made)


def _cells(value: float, most: float, room: int) -> int:
    """Return the length of a bar; what is above 0 is seen."""
    return 0 if value <= 0 or most <= 0 else max(1, round(room * value / most))


def _panel(left: int, name: str, clients: Sequence[int], curves: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    top = _ceiling(max(max(values) for _, _, values in curves))
    low, high = math.log2(min(clients)), math.log2(max(clients))
    width, height = _WIDTH - _LEFT - 24, _HEIGHT - _TOP - _BOTTOM

    def x(count: float) -> float:
        return left + _LEFT + width * ((math.log2(count) - low) / (high - low) if high > low else 0.5)

    def y(value: float) -> float:
        return _TOP + height * (1 - value / top)

    made = [f'<text x="{left + _LEFT}" y="{_TOP - 6}">{escape(name)}</text>']
    for step in range(5):
        at = y(top * step / 4)
        made.append(f'<line x1="{left + _LEFT}" x2="{left + _LEFT + width}" y1="{at:.1f}" y2="{at:.1f}"/>')
        made.append(f'<text x="{left + _LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{top * step / 4:g}</text>')
    for count in clients:
        made.append(f'<text x="{x(count):.1f}" y="{_TOP + height + 18}" text-anchor="middle">{count}</text>')
    made.append(f'<text x="{left + _LEFT + width / 2}" y="{_HEIGHT - 8}" text-anchor="middle">clients</text>')
    for kind, label, values in curves:
        points = " ".join(f"{x(c):.1f},{y(v):.1f}" for c, v in zip(clients, values, strict=True))
        made.append(f'<polyline class="{kind}" points="{points}"><title>{escape(label)}</title></polyline>')
        if len(curves) > 1:
            made.append(f'<text x="{x(clients[-1]):.1f}" y="{y(values[-1]) - 6:.1f}" text-anchor="end">{label}</text>')
    return "".join(made)


def _ceiling(value: float) -> float:
    """Round up to 1, 2, 4, 5 or 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value)
