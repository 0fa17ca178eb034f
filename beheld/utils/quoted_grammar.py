"""Grammars of texts that stand in JSON strings: each terminal is rewritten to match its text as JSON writes it."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right

_TOKEN = re.compile(
    r"""(?P<gap>\s+|//[^\n]*|\#[^\n]*)
    |(?P<range>"(?P<low>[^"\\\n]|\\[^\n]{1,5})"\s*\.\.\s*"(?P<high>[^"\\\n]|\\[^\n]{1,5})")
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[a-z]*)
    |(?P<repeat>~\s*\d+(?:\s*\.\.\s*\d+)?)
    |%import\s+common\.(?P<single>\w+)(?:\s*->\s*(?P<alias>\w+))?
    |%import\s+common\s*\((?P<several>[\w\s,]*)\)
    |(?P<other>%ignore\b|[\w?!:|()\[\]{}*+.,-]+)""",
    re.VERBOSE,
)
# Lark's own terminals, as llguidance takes them.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "NUMBER": r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "ESCAPED_STRING": r'"(\\[^\n]|[^"\\])*"',
}
# The characters that JSON escapes, in their order, and how.
_ESCAPED = {character: json.dumps(character)[1:-1] for character in (*map(chr, range(32)), '"', "\\")}
_CODES = [*map(ord, _ESCAPED)]
_ALL = (1 << len(_CODES)) - 1
_PLAIN = r'[^"\\\x00-\x1f]'
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]{1,6}\}|u[0-9a-fA-F]{4}|[^a-zA-Z0-9]|[dDwWsSnrtfv])"
_ATOM = re.compile(
    rf"""(?P<set>\[\^?\]?(?:\\.|[^\]\\\[])*\]|{_ESCAPE})
    |(?P<dot>\.)
    |(?P<open>\((?:\?:|\?P?<\w+>|\?(?P<flags>[is]+):|(?!\?)))
    |(?P<close>\))
    |(?P<syntax>[|]|[*+?]\??|\{{\d*,?\d*\}}\??)
    |(?P<letters>[^\\\[\](){{}}^$|*+?."\x00-\x1f]+)
    |(?P<letter>["\x00-\x1f])""",
    re.VERBOSE | re.DOTALL,
)
_MEMBER = re.compile(rf"{_ESCAPE}|[^\\]", re.DOTALL)
# Letters with two sets between them, which Python and llguidance do not read alike.
_OPERATIONS = ("&&", "--", "~~")
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
# Rewritten grammars are no longer than the longest that may be compiled; a set counts as this much, for the time.
_MOST, _SET_COST = 128 << 10, 64


def of_regex(regex: str) -> str:
    """A Lark grammar of the texts that match a regular expression as a whole."""
    inner = regex.removeprefix("^")
    if inner.endswith("$") and not inner.endswith("\\$"):
        inner = inner[:-1]
    slashed = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], inner, flags=re.DOTALL)
    return f"start: /{slashed}/"


def quoted(grammar: str) -> str:
    """The grammar of the same texts inside the quotes of a JSON string.

    Args:
        grammar: in Lark, with terminals of texts and regular expressions.

    Raises:
        ValueError: a part cannot be rewritten; the message names it.
    """
    made: list[str] = []
    place = depth = 0
    room = _MOST
    while place < len(grammar):
        found = _TOKEN.match(grammar, place)
        if found is None:
            raise _unknown(f"{grammar[place : place + 20]!r}")
        kind, text = found.lastgroup, found[0]
        if kind == "gap":
            made.append("\n" if "\n" in text else " ")
        elif found["range"] is not None:
            made.append(_range(found["low"], found["high"]))
        elif kind == "text":
            made.append(_text(text))
        elif kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            made.append(f"/{_regex(body, flags, room)}/{flags}")
        elif found["single"] is not None:
            made.append(_imported(found["single"], found["alias"]))
        elif found["several"] is not None:
            made.append("\n".join(_imported(name.strip(), None) for name in found["several"].split(",")))
        else:
            made.append(text)
            for brace in re.findall("[{}]", text):
                depth += 1 if brace == "{" else -1
                if depth < 0:
                    # It would close the grammar around this one.
                    raise _unknown(f"{grammar[place : place + 20]!r}")
        room -= len(made[-1])
        if room < 0:
            raise _long()
        place = found.end()
    if depth:
        raise _unknown("a brace that nothing closes")
    return "".join(made)


def _long() -> ValueError:
    return ValueError(f"a grammar of more than {_MOST} characters has no form in JSON that can be used")


def _unknown(part: str) -> ValueError:
    return ValueError(f"{part} has no form in JSON")


def _imported(name: str, alias: str | None) -> str:
    if name not in _COMMON:
        raise _unknown(f"%import common.{name}")
    return f"{alias or name}: /{_regex(_COMMON[name], '', _MOST)}/"


def _text(written: str) -> str:
    text, flag = (written[:-1], "i") if written.endswith("i") else (written, "")
    try:
        inner = json.dumps(json.loads(text), ensure_ascii=False)[1:-1]
    except ValueError as error:
        raise _unknown(written) from error
    if flag and "\\" in inner:
        raise _unknown(written)
    return json.dumps(inner, ensure_ascii=False) + flag


def _range(low: str, high: str) -> str:
    """A terminal of the characters from one to another."""
    try:
        ends = [str(json.loads(f'"{end}"')) for end in (low, high)]
    except ValueError as error:
        raise _unknown(f'"{low}".."{high}"') from error
    if any(len(end) != 1 for end in ends):
        raise _unknown(f'"{low}".."{high}"')
    first, last = (f"\\x{{{ord(end):x}}}" for end in ends)
    return f"/{_set(f'[{first}-{last}]', insensitive=False)}/"


def _regex(body: str, flags: str, room: int) -> str:
    if not set(flags) <= set("ims"):
        raise _unknown(f"/{body}/{flags}")
    made: list[str] = []
    # The flags that hold in each open group, and in the one that is read.
    outer: list[str] = []
    place = 0
    while place < len(body):
        found = _ATOM.match(body, place)
        if found is None:
            raise _unknown(f"{body[place : place + 20]!r} of a regular expression")
        kind, text = found.lastgroup, found[0]
        if found["open"] is not None:
            outer.append(flags)
            flags = "".join({*flags, *(found["flags"] or "")})
            made.append(text)
        elif kind == "close":
            flags = outer.pop() if outer else flags
            made.append(text)
        elif kind == "dot":
            mask = _ALL if "s" in flags else _ALL & ~_mask(10, 10)
            made.append(_either(_PLAIN, mask, insensitive="i" in flags))
        elif kind == "set":
            made.append(_set(text, insensitive="i" in flags))
            room -= _SET_COST
        elif kind == "letter":
            made.append(_either("", _mask(ord(text), ord(text)), insensitive="i" in flags))
        else:
            made.append(text)
        room -= len(made[-1])
        if room < 0:
            raise _long()
        place = found.end()
    return "".join(made)


def _mask(low: int, high: int) -> int:
    """The escaped characters among those from one code to another: a bit for each of `_CODES`."""
    return (1 << bisect_right(_CODES, high)) - 1 & -(1 << bisect_left(_CODES, low))


# Of the classes; what is not here holds no escaped character.
_CLASSES = {"s": _mask(9, 13), "S": _ALL & ~_mask(9, 13), "D": _ALL, "W": _ALL}


def _set(text: str, *, insensitive: bool) -> str:
    """A set of characters, or an escape that stands for some."""
    inner, negated = text, False
    if text[0] == "[":
        negated = text[1] == "^"
        inner = text[2 if negated else 1 : -1]
    if any(operation in inner for operation in _OPERATIONS):
        raise _unknown(text)
    mask = place = 0
    low: int | None = None
    ranged = False
    while place < len(inner):
        found = _MEMBER.match(inner, place)
        if found is None:
            raise _unknown(text)
        member, place = found[0], found.end()
        if member == "-" and low is not None and not ranged and place < len(inner):
            ranged = True
            continue
        code = _code_of(member)
        if code is None and ranged:
            raise _unknown(text)
        if code is None:
            mask |= _CLASSES.get(member[1], 0)
        elif ranged and low is not None:
            mask |= _mask(low, code)
        else:
            mask |= _mask(code, code)
        low, ranged = None if ranged else code, False
    mask ^= _ALL if negated else 0
    if not mask:
        return text
    return _either(f"[{text}&&{_PLAIN}]", mask, insensitive=insensitive)


def _code_of(member: str) -> int | None:
    """The code of one character as a regular expression writes it; None for a class of several."""
    if len(member) == 1:
        return ord(member)
    if member[1] in "xu" and len(member) > 2:
        return int(member[2:].strip("{}"), 16)
    if member[1] in "dDwWsS":
        return None
    return ord(_NAMED.get(member[1], member[1]))


def _either(plain: str, mask: int, *, insensitive: bool) -> str:
    """A pattern of what JSON writes as it is, and of characters that it escapes, whose letters are always small."""
    written = [each for place, each in enumerate(_ESCAPED.values()) if mask >> place & 1]
    short = "".join(re.escape(each[1]) for each in written if len(each) == 2)
    ways = [*([f"[{short}]"] if short else []), *(each[1:] for each in written if len(each) > 2)]
    escaped = rf"\\(?:{'|'.join(ways)})"
    if insensitive:
        escaped = f"(?-i:{escaped})"
    return f"(?:{plain}|{escaped})" if plain else escaped
