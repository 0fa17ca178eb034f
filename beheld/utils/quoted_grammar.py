"""Grammars of texts that stand in JSON strings: each terminal is rewritten to match its text as JSON writes it."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(
    r"""(?P<gap>\s+|//[^\n]*|\#[^\n]*)
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
# The characters that JSON escapes, and how; as a class of those that it does not.
_ESCAPED = {character: json.dumps(character)[1:-1] for character in (*map(chr, range(32)), '"', "\\")}
_PLAIN = r'[^"\\\x00-\x1f]'
_ATOM = re.compile(
    r"""(?P<set>\[\^?\]?(?:\\.|[^\]\\\[])*\]|\\(?:x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|[^a-zA-Z0-9]|[dDwWsSnrtfv]))
    |(?P<dot>\.)
    |(?P<syntax>\((?:\?:|\?P?<\w+>|\?[is]+:|(?!\?))|[)|]|[*+?]\??|\{\d*,?\d*\}\??)
    |(?P<letter>[^\\\[\](){}^$|*+?.])""",
    re.VERBOSE | re.DOTALL,
)
# Where a set is looked at, to learn whether JSON writes some of it as it is.
_SEEN = [chr(code) for code in range(32, 0x3000) if chr(code) not in _ESCAPED]


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
    place = 0
    while place < len(grammar):
        found = _TOKEN.match(grammar, place)
        if found is None:
            raise _unknown(f"{grammar[place : place + 20]!r}")
        kind, text = found.lastgroup, found[0]
        if kind == "gap":
            made.append("\n" if "\n" in text else " ")
        elif kind == "text":
            made.append(_text(text))
        elif kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            made.append(f"/{_regex(body, flags)}/{flags}")
        elif found["single"] is not None:
            made.append(_imported(found["single"], found["alias"]))
        elif found["several"] is not None:
            made.append("\n".join(_imported(name.strip(), None) for name in found["several"].split(",")))
        else:
            made.append(text)
        place = found.end()
    return "".join(made)


def _unknown(part: str) -> ValueError:
    return ValueError(f"{part} has no form in JSON")


def _imported(name: str, alias: str | None) -> str:
    if name not in _COMMON:
        raise _unknown(f"%import common.{name}")
    return f"{alias or name}: /{_regex(_COMMON[name], '')}/"


def _text(written: str) -> str:
    text, flag = (written[:-1], "i") if written.endswith("i") else (written, "")
    try:
        inner = json.dumps(json.loads(text), ensure_ascii=False)[1:-1]
    except ValueError as error:
        raise _unknown(written) from error
    if flag and "\\" in inner:
        raise _unknown(written)
    return json.dumps(inner, ensure_ascii=False) + flag


def _regex(body: str, flags: str) -> str:
    if not set(flags) <= set("ims"):
        raise _unknown(f"/{body}/{flags}")
    whole = "s" in flags or re.search(r"\(\?i?s", body) is not None
    made: list[str] = []
    place = 0
    while place < len(body):
        found = _ATOM.match(body, place)
        if found is None:
            raise _unknown(f"{body[place : place + 20]!r} of /{body}/")
        text = found[0]
        if found.lastgroup == "syntax":
            made.append(text)
        elif found.lastgroup == "dot":
            made.append(_either(_PLAIN, [each for each in _ESCAPED if whole or each != "\n"]))
        elif found.lastgroup == "set":
            made.append(_set(text))
        else:
            made.append(_either("", [text]) if text in _ESCAPED else text)
        place = found.end()
    return "".join(made)


def _set(text: str) -> str:
    """A set of characters, or an escape that stands for some."""
    try:
        holds = re.compile(
            re.sub(r"\\x\{([0-9a-fA-F]+)\}", lambda one: re.escape(chr(int(one[1], 16))), text)
        ).fullmatch
    except (re.error, ValueError, OverflowError) as error:
        raise _unknown(text) from error
    escaped = [each for each in _ESCAPED if holds(each)]
    if not escaped:
        return text
    return _either(f"[{text}&&{_PLAIN}]" if any(map(holds, _SEEN)) else "", escaped)


def _either(plain: str, escaped: list[str]) -> str:
    """A pattern of what JSON writes as it is, and of characters that it escapes."""
    written = [re.escape(_ESCAPED[each]).replace("/", "\\/") for each in escaped]
    return f"(?:{'|'.join([plain, *written] if plain else written)})"
