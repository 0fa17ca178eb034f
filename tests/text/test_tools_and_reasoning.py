"""Tool calls and thoughts are read alike however the text is cut, and nothing that is written makes a reader fail."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beheld.server.delta_parser import DeltaParser
from beheld.text.marks import Enclosed
from beheld.text.reasoning import FORMATS as REASONING
from beheld.text.reasoning import THINK, ReasoningSplit, splitter
from beheld.text.tools import FORMATS, Piece, Schemas, calls_of, form_of
from beheld.text.tools.bare import BareReader
from beheld.text.tools.json_calls import JsonCalls
from beheld.text.tools.literal import unescaped_keywords_of

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the \\"sky\\""}}\n</tool_call>'
LOOK = Piece("look", '{"at": "the \\"sky\\""}')
SCHEMAS: Schemas = {
    "f": {},
    "g": {},
    "look": {
        "properties": {
            "at": {"type": "string"},
            "days": {"type": "integer"},
            "far": {"type": ["boolean", "null"]},
            "list": {"anyOf": [{"type": "array"}, {"type": "string"}]},
            "kind": {"enum": ["1", "2"]},
            "map": {"type": "dict"},
            "rate": {"type": "float"},
            "shop": {"type": "object", "properties": {"zip": {"type": "integer"}, "open": {"type": "boolean"}}},
            "items": {"type": "array", "items": {"type": "object", "properties": {"count": {"type": "integer"}}}},
            "tags": {"type": "object", "additionalProperties": {"type": "string"}},
        }
    },
}
MARKS = (
    "<tool_call>", "</tool_call>", "<tool", "_call>", "<think>", "</think>", "<", "</", "[TOOL_CALLS]", "[ARGS]",
    '<function name="f">', '<param name="at">', "</param>", "<![CDATA[", "]]>", "[CALL_ID]",
    "<function=", "f>", "</function>", "<parameter=", "at>", "</parameter>", "<arg_key>", "</arg_key>",
    "<arg_value>",     "</arg_value>", "<|python_tag|>", "```json", "```", "f(", "at='", "')", "f", "look", ";",
)  # fmt: skip
FRAGMENTS = st.sampled_from(
    [*MARKS, '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {"x": [', *'{}[]" \n\\,é']
)
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    marks = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(marks)]


def read(form: str, pieces: list[str]) -> tuple[str, list[Piece]]:
    reader = FORMATS[form].reader(SCHEMAS)
    told = [*(reader.push(piece) for piece in pieces), reader.finish()]
    return "".join(text for text, _ in told), calls_of([piece for _, found in told for piece in found])


def split(pieces: list[str], *, inside: bool = False, calls: tuple[str, ...] = ()) -> tuple[str, str]:
    splitter = ReasoningSplit(inside=inside, calls=calls)
    told = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(t for t, _ in told), "".join(a for _, a in told)


GLM = '<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the "sky"</arg_value>\n</tool_call>'
QWEN = '<tool_call>\n<function=look>\n<parameter=at>\nthe "sky"\n</parameter>\n</function>\n</tool_call>'
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">the "sky"</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
STEP3 = (
    "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="look"><steptml:parameter name="at">the "sky"</steptml:parameter></steptml:invoke>'
    "<｜tool_call_end｜><｜tool_calls_end｜>"
)
DSML_OPEN = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'
DSML_CLOSE = "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"


def dsml(key: str, value: str, text: str = "true") -> str:
    begun = f'<｜DSML｜parameter name="{key}" string="{text}">' if text else f'<｜DSML｜parameter name="{key}">'
    return f"{begun}{value}</｜DSML｜parameter>"


M3 = "]<]minimax[>["


def nested(elements: str, name: str = '"look"', frame: bool = True) -> str:
    """A call of MiniMax-M3's, whose tags are written here without the mark before each."""
    call = f"<invoke name={name}>{elements}</invoke>"
    return (f"<tool_call>\n{call}\n</tool_call>" if frame else call).replace("<", f"{M3}<")


MUSE_CALL = (
    '<|start|>assistant to=look<|message|><atem:function_calls>\n<atem:invoke name="look">\n'
    '<atem:parameter name="at">the "sky"</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
LFM2_OPEN = "<|tool_call_start|>"
LFM2 = LFM2_OPEN + "[look(at='the \"sky\"')]<|tool_call_end|>"
SKY = '"the \\"sky\\""'


@pytest.mark.parametrize(
    ("form", "text", "shown", "calls"),
    [
        ("hermes", CALL, "", [LOOK]),
        ("hermes", f"I look.\n{CALL}\n{CALL}\n", "I look.", [LOOK, LOOK]),
        ("hermes", f"{CALL} And?", "And?", [LOOK]),
        ("hermes", f"{CALL}\n\nAnd {CALL}\nso?", "And\nso?", [LOOK, LOOK]),
        ("hermes", CALL.removesuffix("</tool_call>"), "", [LOOK]),
        ("hermes", CALL.replace("}}", "}"), "", [LOOK]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": {"y": [1</tool_call>', "",
         [Piece("f", '{"x": {"y": [1]}}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": {"y": [1', "", [Piece("f", '{"x": {"y": [1')]),
        ("hermes", "a  <tool_call>no</tool_call> after ", "a  <tool_call>no</tool_call> after ", []),
        ("hermes", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ("hermes", "a < b <tool", "a < b <tool", []),
        ("hermes", '<tool_call>{"name": "h", "parameters": {"x": 1}}</tool_call>', "", [Piece("h", '{"x": 1}')]),
        ("hermes", '<tool_call>{"arguments": {"x": "é"}, "name": "f"}</tool_call>', "", [Piece("f", '{"x": "é"}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [Piece("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a', "", [Piece("f", '{"x": "a')]),
        ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', "", [Piece("f", "{}"), Piece("g", "{}")]),
        ("granite", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}]', "",
         [Piece("f", "{}"), Piece("g", '{"x": 1}')]),
        ("gemma4", '<|tool_call>:f{a:<|"|>x<|"|>,b:[1]}<tool_call|><|tool_call>g{}<tool_call|>', "",
         [Piece("f", '{"a": "x", "b": [1]}'), Piece("g", "{}")]),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x<|"|>,b:<|"|>y "z', "", [Piece("f", '{"a":"x","b":"y \\"z')]),
        ("gemma4", "<|tool_call>f g<tool_call|>", "<|tool_call>f g<tool_call|>", []),
        ("gemma4", "<|tool_call>call:f<tool_call|><|tool_call>call:f g <tool_call|><|tool_call>:g{}<tool_call|>", "",
         [Piece("f", "{}"), Piece("f g", "{}"), Piece("g", "{}")]),
        ("gemma4", "<|tool_call>call:f", "<|tool_call>call:f", []),
        ("gemma4", "<|tool_call>call:a {x}<tool_call|>", "<|tool_call>call:a {x}<tool_call|>", []),
        ("lfm2", f"{LFM2}{LFM2.removeprefix(LFM2_OPEN)}\n{LFM2.removeprefix(LFM2_OPEN)}", "", [LOOK]),
        ("lfm2", f"I look. {LFM2} {LFM2.removeprefix(LFM2_OPEN)[:-1]}", f"I look. {LFM2.removeprefix(LFM2_OPEN)[:-1]}",
         [LOOK]),
        ("lfm2", f"{LFM2}{LFM2.removeprefix(LFM2_OPEN)}Done.", "Done.", [LOOK]),
        ("lfm2", f"{LFM2}[look(x=1)]{LFM2}", "[look(x=1)]", [LOOK, LOOK]),
        ("lfm2", "<|tool_call_start|>[f(x={'a', 'b'}, y={'a': {1}}, z={})]<|tool_call_end|>", "",
         [Piece("f", '{"x": ["a", "b"], "y": {"a": [1]}, "z": {}}')]),
        ("gemma4", "<|tool_call>call:f{a:some words,b:{c:x_y,d:true,e:null,g:[p,q]}}<tool_call|>", "",
         [Piece("f", '{"a": "some words", "b": {"c": "x_y", "d": true, "e": null, "g": ["p", "q"]}}')]),
        ("qwen3_coder", QWEN.removesuffix("</tool_call>") + QWEN, "", [LOOK, LOOK]),
        ("qwen3_coder", f"Use <tool_call>: so.\n{QWEN}", "Use <tool_call>: so.", [LOOK]),
        ("qwen3_coder", QWEN.replace('the "sky"', "a <tool_call> b"), "", [Piece("look", '{"at": "a <tool_call> b"}')]),
        ("hermes", f"Use <tool_call>: so.\n{CALL}", "Use <tool_call>: so.", [LOOK]),
        ("hermes", CALL.removesuffix("</tool_call>") + CALL, "", [LOOK, LOOK]),
        ("hermes", CALL.replace("the ", "<tool_call> "), "",
         [Piece("look", LOOK.arguments.replace("the ", "<tool_call> "))]),
        ("glm45", GLM.removesuffix("</tool_call>") + GLM, "", [LOOK, LOOK]),
        ("glm45", GLM, "", [LOOK]),
        ("glm45", f"I look.\n{GLM}\n{GLM}", "I look.", [LOOK, LOOK]),
        ("glm45", "<tool_call>f</tool_call>", "", [Piece("f", "{}")]),
        ("glm45", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
        ("glm45", GLM.removesuffix("</tool_call>"), "", [LOOK]),
        ("glm45", GLM[: GLM.index("</arg_value>")], "", [Piece("look", '{"at": "the \\"sky\\"')]),
        ("glm45", "<tool_call>not a name<arg_key>x", "<tool_call>not a name<arg_key>x", []),
        (
            "glm45",
            GLM.replace('at</arg_key>\n<arg_value>the "sky"', "days</arg_key><arg_value>3")
            + "<tool_call>look<arg_key>at</arg_key><arg_value>3</arg_value><arg_key>new</arg_key>"
            + '<arg_value>{"a": [1]}</arg_value><arg_key>x</arg_key><arg_value>some\nwords</arg_value></tool_call>',
            "",
            [Piece("look", '{"days": 3}'), Piece("look", '{"at": "3", "new": {"a": [1]}, "x": "some\\nwords"}')],
        ),
        ("qwen3_coder", QWEN, "", [LOOK]),
        ("qwen3_coder", f"I look.\n\n{QWEN}\n{QWEN}\n", "I look.", [LOOK, LOOK]),
        ("qwen3_coder", QWEN.removeprefix("<tool_call>\n"), "", [LOOK]),
        ("qwen3_coder", QWEN.replace("\n</parameter>", ""), "", [LOOK]),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>", "", [Piece("f", "{}")]),
        ("qwen3_coder", "Write <function=a b> or </tool_call>.", "Write <function=a b> or </tool_call>.", []),
        (
            "qwen3_coder",
            "<tool_call>\n<function=look>\n<parameter=at>\n\n a\n\n</parameter>\n<parameter=days>\n7\n</parameter>\n"
            "<parameter=far>\nTrue\n</parameter>\n<parameter=list>\n[1, 2]\n</parameter>\n<parameter=kind>\n1\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            [Piece("look", '{"at": "\\n a\\n", "days": 7, "far": true, "list": [1, 2], "kind": "1"}')],
        ),
        (
            "qwen3_coder",
            "<function=look>\n<parameter=map>\n{'a': True, 'b': [None, 'it']}\n</parameter>\n<parameter=far>\nNone\n"
            "</parameter>\n<parameter=rate>\n2\n</parameter>\n<parameter=new>\n007\n</parameter>\n</function>",
            "",
            [Piece("look", '{"map": {"a": true, "b": [null, "it"]}, "far": null, "rate": 2, "new": "007"}')],
        ),
        ("qwen3_coder", QWEN[: QWEN.index("</parameter>")], "", [Piece("look", f'{{"at": {SKY[:-1]}')]),
        ("minimax_m2", f"I look.\n{MINIMAX}", "I look.\n", [LOOK]),
        ("minimax_m2", MINIMAX.replace("</parameter>", ""), "", [Piece("look", '{"at": "the \\"sky\\"\\n"}')]),
        ("minimax_m2", MINIMAX[: MINIMAX.index("</parameter>")], "", [Piece("look", f'{{"at": {SKY[:-1]}')]),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>', "", [Piece("f", "{}")]),
        ("minimax_m2", 'Write <invoke name="a b">.', 'Write <invoke name="a b">.', []),
        ("minimax_m3", "I look.\n" + nested('<at>the "sky"</at>'), "I look.\n", [LOOK]),
        ("minimax_m3", nested("<days>3</days>", "'look'") + nested("<far>true</far>", "look"), "",
         [Piece("look", '{"days": 3}'), Piece("look", '{"far": true}')]),
        ("minimax_m3", nested("<shop><zip>018956</zip><open>false</open></shop><tags><a>1</a><b>x</b></tags>"), "",
         [Piece("look", '{"shop": {"zip": 18956, "open": false}, "tags": {"a": "1", "b": "x"}}')]),
        ("minimax_m3", nested("<items><item><count>2</count></item><item><count>x</count></item></items>"), "",
         [Piece("look", '{"items": [{"count": 2}, {"count": "x"}]}')]),
        ("minimax_m3", nested("<new><a>1</a><a>b</a><c> words </c></new><items> </items><shop></shop>"), "",
         [Piece("look", '{"new": {"a": ["1", "b"], "c": " words "}, "items": [], "shop": {}}')]),
        ("minimax_m3", nested("<new>so <a>1</a></new>"), "", [Piece("look", '{"new": {"a": "1", "$text": "so "}}')]),
        ("minimax_m3", nested("<at>a < b </x> c</at>"), "", [Piece("look", f'{{"at": "a {M3}< b {M3}</x> c"}}')]),
        ("minimax_m3", nested("<shop><zip>1</shop><days>2"), "", [Piece("look", '{"shop": {"zip": 1}, "days": 2}')]),
        ("minimax_m3", nested("<days>2</days><at>the").partition("the")[0], "", [Piece("look", '{"days": 2')]),
        ("minimax_m3", nested("", "a b"), f"\n{nested('', 'a b', frame=False)}\n", []),
        ("minimax_m3", "Write ]<]minimax[>[ or <invoke name=f>.", "Write ]<]minimax[>[ or <invoke name=f>.", []),
        ("seed_oss", f"I look.\n{QWEN}".replace("tool_call>", "seed:tool_call>").replace("</tool", "</seed:tool"),
         "I look.", [LOOK]),
        ("hy_v3", "I look. <tool_calls>\n<tool_call>f<tool_sep>\n</tool_call></tool_calls>", "I look. ",
         [Piece("f", "{}")]),
        ("hy_v3", "<tool_calls><tool_call>no name<tool_sep></tool_call></tool_calls>",
         "<tool_call>no name<tool_sep></tool_call>", []),
        ("minicpm5", 'I look. <function name="look"><param name="at"><![CDATA[the "sky"]]></param></function> And?',
         "I look. And?", [LOOK]),
        ("minicpm5", '<functionname="look"><paramname="days">3</param></function>', "", [Piece("look", '{"days": 3}')]),
        ("minicpm5", '<function name="look"><param name="at">a]]</param></function>', "",
         [Piece("look", '{"at": "a]]"}')]),
        ("minicpm5", '<function\u0120name="look"><param\u0120name="days">3</param></function>', "",
         [Piece("look", '{"days": 3}')]),
        ("minicpm5", '<function name="look"><param name="at"><![CDATA[</param> <param name="at">x</function> '
         '<function name="f">]]></param><param name="days">2</param></function> So.', "So.",
         [Piece("look", '{"at": "</param> <param name=\\"at\\">x</function> <function name=\\"f\\">", "days": 2}')]),
        ("minicpm5", '<function name="look"><param name="at"><![CDATA[a]]]]><![CDATA[>b]]></param></function>', "",
         [Piece("look", '{"at": "a]]>b"}')]),
        ("minicpm5", '<function name="look"><param name="at"><![CDATA[a</param></function>', "",
         [Piece("look", '{"at": "a</param></function>')]),
        # An argument that stands twice.
        ("minicpm5", '<function name="look"><param name="arguments">{"days": 1}</param><param name="days">2</param>'
         '<param name="at">a</param></function>', "", [Piece("look", '{"days": 1, "at": "a"}')]),
        ("qwen3_coder", QWEN.replace("</function>", "<parameter=at>\nthe sea\n</parameter>\n</function>"), "", [LOOK]),
        ("glm45", GLM.replace("</tool_call>", "<arg_key>at</arg_key><arg_value>sea</arg_value><arg_key>days</arg_key>"
         "<arg_value>2</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"), "",
         [Piece("look", '{"at": "the \\"sky\\"", "days": 2}')]),
        ("minicpm5", '<function name="look"><param name="at"><![CD', "", [Piece("look", '{"at": ')]),
        ("minicpm5", '<function name="look"><param name="arguments">{"days": 1}</param></function>', "",
         [Piece("look", '{"days": 1}')]),
        ("gigachat3", 'I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"x": "</s>"}}'
         "</s>", "I look.", [Piece("f", '{"x": "</s>"}')]),
        ("gigachat3", "</s> <|function_call|>no</s>", "</s> <|function_call|>no</s>", []),
        ("apertus", 'I look. <|tools_prefix|>[{"f": {}}, {"g": {"x": [1]}}]<|tools_suffix|>', "I look.",
         [Piece("f", "{}"), Piece("g", '{"x": [1]}')]),
        ("apertus", '<|tools_prefix|>[{"f": {"x": 1}, "y": 2}]<|tools_suffix|>',
         "", [Piece("f", '{"x": 1}')]),
        ("apertus", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>', '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>', []),
        ("apertus", '<|tools_prefix|>[{"f": {"x": "a', "", [Piece("f", '{"x": "a')]),
        ("longcat", "a <longcat_tool_call>no</longcat_tool_call>", "a <longcat_tool_call>no</longcat_tool_call>", []),
        ("functiongemma", "So. <start_function_call>call:look{at:<escape>{x}, <3<escape>,days:<escape>3<escape>,"
         "far:true}<end_function_call>", "So.", [Piece("look", '{"at": "{x}, <3", "days": 3, "far": true}')]),
        ("functiongemma", "<start_function_call>call:look{at:<escape>a", "", [Piece("look", '{"at":"a')]),
        ("functiongemma", "<start_function_call>no<end_function_call>", "<start_function_call>no<end_function_call>",
         []),
        ("gigachat3", 'So.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"x": 1}}', "So.",
         [Piece("f", '{"x": 1}')]),
        ("gigachat3", 'So.<|function_call|>{"name": "f", "arguments": {"x": 1}', "So.", [Piece("f", '{"x": 1}')]),
        ("gigachat3", "A function call is <|function_call|>so.", "A function call is <|function_call|>so.", []),
        ("granite-20b-fc", '<function_call> {"name": "f", "arguments": {}}<function_call> {"name": "g"}', "",
         [Piece("f", "{}"), Piece("g", "{}")]),
        ("granite-20b-fc", "<function_call> no", "<function_call> no", []),
        ("muse", f"{MUSE_CALL}<|eom|>{MUSE_CALL}", "", [LOOK, LOOK]),
        ("muse", "<|start|>assistant to=look<|message|>no<|eom|>",
         "<|start|>assistant to=look<|message|>no<|eom|>", []),
        ("muse", MUSE_CALL[: MUSE_CALL.index("sky")], "", [Piece("look", '{"at": "the \\"')]),
        ("deepseek_v41", (DSML_OPEN + dsml("at", 'the "sky"') + DSML_CLOSE).replace("function_calls", "calls")
         .replace("｜DSML｜", "｜DSML｜ "), "", [LOOK]),
        ("deepseek_v32", "So. \n" + DSML_OPEN + dsml("at", 'the "sky"') + DSML_CLOSE, "So. \n", [LOOK]),
        ("deepseek_v4", (DSML_OPEN + dsml("new", "5") + dsml("more", "5", "false") + dsml("on", "yes", "") + DSML_CLOSE)
         .replace("function_calls", "tool_calls"), "", [Piece("look", '{"new": "5", "more": 5, "on": "yes"}')]),
        ("deepseek_v32", DSML_OPEN + dsml("arguments", ' {"at": "x"} ', "false") + DSML_CLOSE, "",
         [Piece("look", '{"at": "x"}')]),
        ("deepseek_v32", DSML_OPEN + dsml("input", '{"at": "x"}') + dsml("days", "2", "false") + DSML_CLOSE, "",
         [Piece("look", '{"at": "x", "days": 2}')]),
        ("deepseek_v32", DSML_OPEN + dsml("arguments", "{}", "false") + DSML_CLOSE, "", [Piece("look", "{}")]),
        ("deepseek_v32", DSML_OPEN + dsml("input", "7") + DSML_CLOSE, "", [Piece("look", '{"input": 7}')]),
        ("deepseek_v32", DSML_OPEN + '<｜DSML｜parameter name="input" string="true">{"at": "x', "",
         [Piece("look", '{"input": ')]),
        ("deepseek_v32", f"{DSML_OPEN}{DSML_CLOSE}", "", [Piece("look", "{}")]),
        ("step3", STEP3, "", [LOOK]),
        ("step3", f"I look.{STEP3}{STEP3}", "I look.", [LOOK, LOOK]),
        ("step3", STEP3.replace("function<｜tool_sep｜>", ""), "", [LOOK]),
        ("step3", "<｜tool_call_begin｜>no<｜tool_call_end｜>", "<｜tool_call_begin｜>no<｜tool_call_end｜>", []),
        ("xlam", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', "", [Piece("f", '{"x": 1}')]),
        ("xlam", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call> ', "", [Piece("f", "{}")]),
        ("xlam", 'Sure. [{"name": "f", "arguments": {}}] Done.', "Sure. Done.", [Piece("f", "{}")]),
        ("xlam", "[1, 2] of [TOOL_CALLS]", "[1, 2] of [TOOL_CALLS]", []),
        ("xlam", 'I look.\n```json\n[{"name": "f", "arguments": {"x": "]"}}]\n``` \nDone, [1].', "I look. \nDone, [1].",
         [Piece("f", '{"x": "]"}')]),
        ("xlam", 'Sure.[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}]', "Sure.",
         [Piece("f", "{}"), Piece("g", '{"x": 1}')]),
        ("xlam", '<think>A [list].</think>[{"name": "f", "arguments": {}}]', "<think>A [list].</think>",
         [Piece("f", "{}")]),
        ("xlam", 'I: <tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
         "I:", [Piece("f", "{}"), Piece("g", "{}")]),
        ("xlam", 'I.\n```json\n```json\n[{"name": "f", "arguments": {}}]\n```\n``` \nDone.', "I. \nDone.",
         [Piece("f", "{}")]),
        ("xlam", '<tool_call>\n```json\n[{"name": "f", "arguments": {}}, {"name": "g"}]\n```</tool_call>', "",
         [Piece("f", "{}"), Piece("g", "{}")]),
        ("xlam", '```json\n{"name": "f", "arguments": {}}\n```\n```python\nx\n```', "\n```python\nx\n```",
         [Piece("f", "{}")]),
        ("xlam", '```json\n[{"x": 1}]\n```', '```json\n[{"x": 1}]\n```', []),
        ("xlam", 'Write ```[{"name": "', 'Write ```[{"name": "', []),
        ("hunyuan_a13b", 'I look. <tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>', "I look. ",
         [Piece("f", "{}")]),
        ("minimax_m2", MINIMAX.replace('the "sky"', "5").replace('"at"', '"unknown"'), "",
         [Piece("look", '{"unknown": "5"}')]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]', "",
         [Piece("f", '{"x": 1}'), Piece("g", "{}")]),
        ("mistral", 'Yes.[TOOL_CALLS]f[ARGS]{"x": "}"}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', "Yes.",
         [Piece("f", '{"x": "}"}'), Piece("g", "{}")]),
        ("mistral", '[TOOL_CALLS]f{"x": 1}\n', "", [Piece("f", '{"x": 1}')]),
        ("mistral", "[TOOL_CALLS]f[ARGS]no {}", "[TOOL_CALLS]f[ARGS]no {}", []),
        ("mistral", "[TOOL_CALLS] [TOOL_CALLS]hm", "[TOOL_CALLS] [TOOL_CALLS]hm", []),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', "",
         [Piece("f", '{"x": 1}'), Piece("g", "{}")]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {"x": 1}}', "", [Piece("f", '{"x": 1}')]),
        ("llama3_json", '```json\n{"name": "f", "arguments": {}}\n```', "", [Piece("f", "{}")]),
        ("llama3_json", '```json\n{"name": "Ada"}\n```', '```json\n{"name": "Ada"}\n```', []),
        ("llama3_json", 'I look: {"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}} Done.',
         "I look: Done.", [Piece("f", '{"x": 1}'), Piece("g", "{}")]),
        ("llama3_json", 'A {set} of {"x": 1}, {"name": 3} and {"name": "g"} ',
         "A {set} of {\"x\": 1}, {\"name\": 3} and", [Piece("g", "{}")]),
        ("llama3_json", '\n I look {"name": "f", "parameters": {}}', "\n I look", [Piece("f", "{}")]),
        ("llama3_json", '```json\nA list: {"name": "f", "parameters": {}} Done.', "```json\nA list: Done.",
         [Piece("f", "{}")]),
        ("llama3_json", '```json\n{"x": {"y": "}"}}\nSo: {"name": "f", "parameters": {}} Done.',
         '```json\n{"x": {"y": "}"}}\nSo: Done.', [Piece("f", "{}")]),
        ("xlam", '\nSure. [{"name": "f", "arguments": {}}]', "\nSure.", [Piece("f", "{}")]),
        ("llama3_json", '{"name": "f", "parameters": {x: }}', '{"name": "f", "parameters": {x: }}', []),
        ("llama3_json", 'So: {"name": "f", invalid json}', 'So: {"name": "f", invalid json}', []),
        ("llama3_json", '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
        ("json", ' {"name": "f", "parameters": {"x": 1}}', "", [Piece("f", '{"x": 1}')]),
        ("json", '[{"name": "f"}, {"name": "g"}]', "", [Piece("f", "{}"), Piece("g", "{}")]),
        ("json", '{"name": "f", "arguments": {"x": "\\ud800"}}', "", [Piece("f", '{"x": "\\ud800"}')]),
        ("json", '{"arguments": {"x": "\\ud800"}, "name": "f"}', "", [Piece("f", '{"x": "\\ud800"}')]),
        ("json", '{"x": 1}', '{"x": 1}', []),
        ("json", '{"name": "Ada", "arguments": {}}', '{"name": "Ada", "arguments": {}}', []),
        ("json", ' [1, {"name": "f"}]', ' [1, {"name": "f"}]', []),
        ("json", "It is {x}.", "It is {x}.", []),
        ("pythonic", '[look(at="the \\"sky\\"")]', "", [LOOK]),
        ("olmo3", 'I look. <function_calls>look(at="the \\"sky\\"")\nf()</function_calls>', "I look.",
         [LOOK, Piece("f", "{}")]),
        ("olmo3", "<function_calls>no call</function_calls>", "<function_calls>no call</function_calls>", []),
        ("olmo3", "<function_calls>f(x=1", "<function_calls>f(x=1", []),
        (
            "pythonic",
            "<|python_start|>[f(a=-1.5, b=[True, None, {'k': 'it\\'s'}], ), look(at='a)]')]<|python_end|>",
            "",
            [Piece("f", '{"a": -1.5, "b": [true, null, {"k": "it\'s"}]}'), Piece("look", '{"at": "a)]"}')],
        ),
        ("pythonic", "[f()]", "", [Piece("f", "{}")]),
        ("pythonic", "[f(1)] is f(1).", "[f(1)] is f(1).", []),
        ("pythonic", "[print(x=1)]", "[print(x=1)]", []),
        ("pythonic", "[1, 2] and (3)", "[1, 2] and (3)", []),
        ("pythonic", "[f(x=" + "[" * 5000 + "]" * 5000 + ")]", "[f(x=" + "[" * 5000 + "]" * 5000 + ")]", []),
    ],
)  # fmt: skip
def test_calls_are_found(form: str, text: str, shown: str, calls: list[Piece]) -> None:
    assert read(form, [text]) == (shown, calls)
    assert read(form, list(text)) == (shown, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", CALL),
        ("glm45", GLM),
        ("qwen3_coder", QWEN),
        ("mistral", "[TOOL_CALLS]look[ARGS]" + LOOK.arguments),
        ("json", '{"name": "look", "arguments": ' + LOOK.arguments + "}"),
    ],
)
def test_arguments_are_told_as_they_come(form: str, text: str) -> None:
    reader = FORMATS[form].reader(SCHEMAS)
    told = [pieces for character in text for pieces in reader.push(character)[1]]
    assert calls_of(told) == [LOOK]
    assert len(told) > 10


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 1000), max_size=6), st.sampled_from(sorted(FORMATS)))
@pytest.mark.case(51)
def test_how_the_text_is_cut_does_not_matter(text: str, places: list[int], form: str) -> None:
    whole = read(form, [text])
    assert read(form, cut(text, places)) == whole
    assert read(form, list(text)) == whole


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n\nyes\n</think>\n\nBlue.", False, ("hm\n\nyes", "Blue.")),
        ("hm</think>Blue.", True, ("hm", "Blue.")),
        # The template wrote the first mark, the model another.
        ("\n<think>\nhm</think>Blue.", True, ("hm", "Blue.")),
        ("<think>never ends ", True, ("never ends", "")),
        (" <thin", True, ("<thin", "")),
        ("</think>Blue.", True, ("", "Blue.")),
        ("Blue.", False, ("", "Blue.")),
        ("Blue. <think>x</think>", False, ("", "Blue. <think>x</think>")),
        ("<think>never ends ", False, ("never ends", "")),
        ("<think></think>", False, ("", "")),
        (" <thin", False, ("", " <thin")),
    ],
)
def test_thoughts_are_told_apart(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert split([text], inside=inside) == expected
    assert split(list(text), inside=inside) == expected


@pytest.mark.parametrize(
    ("form", "text", "inside", "expected"),
    [
        ("olmo3", "\n<think>\nhm \n\n</think>\n\nBlue.\n", False, ("\nhm \n\n", "\n\nBlue.\n")),
        ("olmo3", " hm\n</think>\nBlue.", True, (" hm\n", "\nBlue.")),
        ("olmo3", " Blue.", False, ("", " Blue.")),
        ("step3p5", "\n<think>\nhm \n h\n\n</think>\n\nBlue.\n", False, ("\nhm \n h", "\n\nBlue.\n")),
        ("step3p5", "\n<think>hm</think>\nBlue.", True, ("\nhm", "\nBlue.")),
        ("step3p5", " Blue.", False, ("", " Blue.")),
    ],
)
def test_blanks_are_kept_where_the_form_says_so(form: str, text: str, inside: bool, expected: tuple[str, str]) -> None:
    for place in range(len(text) + 1):
        for pieces in ([text[:place], text[place:]], list(text)):
            made = splitter(REASONING[form], inside=inside)
            told = [*map(made.push, pieces), made.finish()]
            assert ("".join(t for t, _ in told), "".join(a for _, a in told)) == expected


def test_blanks_around_calls_are_kept_where_the_form_says_so() -> None:
    call = '<tool_call> {"name": "f", "arguments": {"x": 1}} </tool_call>'
    text = f" First: \n{call} \n then \n {call}\n Done.\n"
    for place in range(len(text) + 1):
        reader = FORMATS["granite4"].reader({})
        told = [reader.push(text[:place]), reader.push(text[place:]), reader.finish()]
        assert "".join(words for words, _ in told) == text.replace(call, "")
        assert [piece.name for _, pieces in told for piece in pieces if piece.name] == ["f", "f"]


def test_words_in_the_frame_of_calls_are_none_of_the_answer() -> None:
    call = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    for text, shown, calls in (
        (f"So. {begin} noise {call} noise {call}{end} After.", "So.  After.", 2),
        (f"So. {begin} noise {end} After.", "So.  noise  After.", 0),
        (f"So. {begin} noise", "So.  noise", 0),
        (f"So. {begin} a <|tool_call_begin|>b<|tool_call_end|> c", None, 0),
    ):
        whole = read("kimi_k2", [text])
        assert whole == read("kimi_k2", list(text)), text
        assert len(whole[1]) == calls
        if shown is not None:
            assert whole[0] == shown
        else:
            assert all(word in whole[0] for word in (" a ", "b", " c"))


def test_calls_keep_the_ids_that_the_model_gave_them_once() -> None:
    call = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    names = ("functions.look:3", "functions.look:3", "functions.f:4", "g", "g:5")
    parser = DeltaParser(None, "kimi_k2", None, SCHEMAS)
    deltas = [*parser.push("".join(map(call.format, names))), *parser.finish()]
    pieces = [one for delta in deltas for one in delta.get("tool_calls", ())]
    calls = [one for one in pieces if "name" in one["function"]]
    assert [one["function"]["name"] for one in calls] == ["look", "look", "f", "g", "g"]
    assert [calls[place]["id"] for place in (0, 2, 4)] == ["functions.look:3", "functions.f:4", "g:5"]
    assert all(calls[place]["id"].startswith("call_") for place in (1, 3))


@pytest.mark.parametrize(("form", "named"), [("hermes", None), (None, "f")])
def test_a_call_begins_with_a_delta_without_arguments(form: str | None, named: str | None) -> None:
    """As in OpenAI's streams: clients take the first delta for the name alone."""
    parser = DeltaParser(None, form, named, SCHEMAS)
    text = '{"x": 1}' if named else '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    (begun,), *further = [delta["tool_calls"] for delta in (*parser.push(text), *parser.finish())]
    assert begun["function"] == {"name": "f", "arguments": ""}
    assert "".join(one["function"]["arguments"] for (one,) in further) == '{"x": 1}'
    assert all("id" not in one for (one,) in further)


def test_json_behind_a_fence_is_read_in_few_steps() -> None:
    """It was read letter by letter to its end."""

    class Counted(JsonCalls):
        num = 0

        def push(self, text: str) -> tuple[str, list[Piece]]:
            self.num += 1
            return super().push(text)

    text = "```json\n" + json.dumps({"x": ["y" * 10_000] * 14})
    for words in (None, Enclosed()):
        body = Counted(words=words)
        reader = BareReader(body, ("```json", "```"))
        shown, pieces = reader.push(text)
        rest, further = reader.finish()
        assert (shown + rest, pieces + further) == (text, [])
        assert body.num < 100


def test_blanks_in_place_of_a_bare_calls_name_take_no_time() -> None:
    text = f"<|tool_call>call:{' ' * 20_000}{{<tool_call|>"
    begin = time.thread_time()
    assert read("gemma4", [text]) == (text, [])
    assert time.thread_time() - begin < 1


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("think", "so it is", ("", "so it is")),
        ("think", "<think>so</think>\n\n", ("", "so")),
        ("think", "so</think>\nyes", ("so", "yes")),
        ("think", "so<tool_call>{}", ("so", "<tool_call>{}")),
        ("think", "</think>\n", ("", "")),
        ("step3p5", "so</think>\n\n\nyes", ("so", "\n\n\nyes")),
        ("openai", "<|channel|>analysis<|message|>so<|end|>", ("", "so")),
        ("openai", "<|channel|>analysis<|message|>so<|end|><|channel|>final<|message|>yes", ("so", "yes")),
    ],
)
def test_reasoning_that_nothing_follows_is_the_answer_where_that_is_asked(
    form: str, text: str, expected: tuple[str, str]
) -> None:
    for pieces in ([text], list(text)):
        split = splitter(REASONING[form], inside=True, calls=("<tool_call>",), nonempty=True)
        told = [split.push(piece) for piece in pieces] + [split.finish()]
        assert ("".join(t for t, _ in told), "".join(a for _, a in told)) == expected


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<|channel>thought\nhm<channel|>Blue.", False, ("hm", "Blue.")),
        ("<|channel>though, hm<channel|>Blue.", False, ("though, hm", "Blue.")),
        ("thought\nhm<channel|>Blue.", True, ("hm", "Blue.")),
        ("<|channel>thou", False, ("thou", "")),
        ("<|channel>thought\n<channel|>Blue.", False, ("", "Blue.")),
        ("Blue.\n<|channel>thought\nhm<channel|>\nRed.", False, ("hm", "Blue.\n\nRed.")),
        ("<|channel>a<channel|> Blue.<|channel>b<channel|>", False, ("ab", "Blue.")),
        ("Blue.<channel|> Red. <|chan", False, ("", "Blue. Red. <|chan")),
    ],
)
def test_a_label_is_no_part_of_the_thoughts(text: str, inside: bool, expected: tuple[str, str]) -> None:
    for pieces in ([text], list(text)):
        splitter = ReasoningSplit(REASONING["gemma4"], inside=inside)
        told = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
        assert ("".join(t for t, _ in told), "".join(a for _, a in told)) == expected
    assert REASONING["gemma4"].begins_inside("model\n<|channel>thought\n")
    assert REASONING["gemma4"].begins_inside("model\n<|channel>")


@pytest.mark.parametrize("form", ["kimi_k2", "deepseek_v3", "hermes"])
def test_words_before_calls_in_a_frame_keep_their_whitespace(form: str) -> None:
    calls = {
        "kimi_k2": "<|tool_calls_section_begin|>\n<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "deepseek_v3": "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "hermes": '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
    }[form]
    kept = "I look. \n" if form != "hermes" else "I look."
    for pieces in ([f"I look. \n{calls}"], list(f"I look. \n{calls}")):
        words, found = read(form, pieces)
        assert (words, [call.name for call in found]) == (kept, ["look"])
    assert read(form, [f" \n{calls}"])[0] == ""


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("command='sed -n '3,4p' a.py'", {"command": "sed -n '3,4p' a.py"}),
        ("""command='c -e "f('\\,'))"', at="b" """, {"command": """c -e "f('\\,'))\"""", "at": "b"}),
    ],
)
def test_texts_whose_quotes_are_not_escaped_are_read(written: str, expected: dict[str, str]) -> None:
    text = f"<|tool_call_start|>[look({written})]<|tool_call_end|>\nDone."
    for pieces in ([text], list(text)):
        words, (call,) = read("lfm2", pieces)
        assert (words, call.name, json.loads(call.arguments)) == ("Done.", "look", expected)


@pytest.mark.parametrize("written", ["a='x' 'y", "a='x', a='y' z'", "='x'y'", "a='b'c', 1"])
def test_other_texts_with_quotes_are_no_arguments(written: str) -> None:
    with pytest.raises(ValueError, match=r"keyword|early"):
        unescaped_keywords_of(written)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "mistral"])
def test_a_call_ends_reasoning_that_was_not_closed(form: str) -> None:
    call = {"hermes": CALL, "qwen3_coder": QWEN, "mistral": "[TOOL_CALLS]look[ARGS]" + LOOK.arguments}[form]
    for pieces in ([f"<think>hm, {call}"], list(f"<think>hm, {call}")):
        reasoning, answer = split(pieces, calls=FORMATS[form].openings)
        assert (reasoning, read(form, [answer])) == ("hm, ", ("", [LOOK]))
    assert split([f"<think>hm</think>{call}"], calls=FORMATS[form].openings) == ("hm", call)


@pytest.mark.parametrize(("form", "named"), [(None, "look"), ("json", None)])
@pytest.mark.parametrize("text", ["<think", " <", "<think>hm", ""])
def test_a_forced_call_that_is_cut_off_in_the_opening_tag_has_no_arguments(
    form: str | None, named: str | None, text: str
) -> None:
    parser = DeltaParser(ReasoningSplit(inside=False), form, named, SCHEMAS, forced=True)
    deltas = [*parser.push(text), *parser.finish()]
    assert deltas == ([{"reasoning": "hm", "reasoning_content": "hm"}] if "hm" in text else [])


def test_a_forced_call_that_is_cut_off_before_its_name_is_no_content() -> None:
    call = '{"name": "look", "parameters": {}}'
    for forced, content in ((True, []), (False, ['{"'])):
        parser = DeltaParser(None, "json", None, SCHEMAS, forced=forced)
        deltas = [*parser.push(f'[{call}, {{"'), *parser.finish()]
        assert [delta["content"] for delta in deltas if "content" in delta] == content
        assert sum(len(delta.get("tool_calls", ())) for delta in deltas) >= 1


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 1000), max_size=6), st.booleans())
def test_how_thoughts_are_cut_does_not_matter(text: str, places: list[int], inside: bool) -> None:
    assert split(cut(text, places), inside=inside) == split([text], inside=inside)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from(sorted(FORMATS)))
@pytest.mark.case(51)
def test_what_is_no_call_is_text(text: str, form: str) -> None:
    shown, calls = read(form, [text])
    if not calls:
        assert shown == text
    for call in calls:
        assert call.name
        (shown + call.name + call.arguments).encode()


STARTS = {
    "hermes": ['<tool_call>{"name": "f", "arguments": {"x": "', '<tool_call>{"x": "', "<tool_call>"],
    "glm45": ["<tool_call>f<arg_key>x</arg_key><arg_value>", "<tool_call>", "<tool_call>f<arg_key>"],
    "qwen3_coder": ["<function=look><parameter=at>", "<function=look><parameter=x>", "<tool_call>", "<function="],
    "minimax_m2": ['<invoke name="look"><parameter name="at">', "<minimax:tool_call>", '<invoke name="'],
    "minimax_m3": [f"{M3}<invoke name=f>", f"{M3}<invoke name=f>{M3}<at>", f"{M3}<tool_call>"],
    "minicpm5": ['<function name="look"><param name="at">', '<function name="look"><param name="at"><![CDATA['],
    "apertus": ['<|tools_prefix|>[{"f": {"x": "', "<|tools_prefix|>["],
    "functiongemma": ["<start_function_call>call:f{x:<escape>"],
    "step3": ["<｜tool_call_begin｜>", STEP3[: STEP3.index("the ")]],
    "xlam": ['[TOOL_CALLS][{"name": "f", "arguments": {"x": "', "<tool_call>", "["],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]", '[TOOL_CALLS]f[ARGS]{"x": "'],
    "json": ['{"name": "f", "arguments": {"x": "', '{"x": "', "[", "```"],
    "llama3_json": ['I: {"name": "f", "arguments": {"x": "', 'I: {"name": "', "I: {", "I: ["],
    "pythonic": ["[f(x='", "[", "[f(x=[", "[f("],
}
REPEATED = [
    "<tool_call>", "<tool_call", "</tool_call>", "{", "[", "\n", "<", "x", '"', "\\", ", ", "[TOOL_CALLS]", "f(", "{}",
    "<function=f>", "<arg_key>", "</arg_value>", CALL, '{"name": "f", "arguments": {}};', "f(x=1), ", "``",
    "]<]minimax[>[<a>", "]<]minimax[>[</a>", "]]>",
]  # fmt: skip


def is_linear(work: Callable[[int], Any]) -> bool:
    """False if a piece of work takes long, and eight times as much takes much more than eight times as long."""

    def seconds(count: int) -> float:
        begin = time.process_time()
        work(count)
        return time.process_time() - begin

    # What takes the square of its length, and a quarter of a second for four times as much, takes longer than this.
    if seconds(5_000) < 0.25 / 16:
        return True
    few, many = (min(seconds(count) for _ in range(3)) for count in (2_500, 20_000))
    return many < 8 * 3.0 * few


@pytest.mark.parametrize("form", sorted(STARTS))
@pytest.mark.case(51)
def test_reading_is_linear(form: str) -> None:
    for start in ("", *STARTS[form]):
        for text in REPEATED:
            assert is_linear(lambda count: read(form, [start + text * (count // len(text))])), (start, text)  # noqa: B023
        for text in " x":
            assert is_linear(lambda count: read(form, [start, *itertools.repeat(text, count)])), (start, text)  # noqa: B023


@pytest.mark.case(51)
def test_a_word_of_gemma_s_without_quotes_is_read_in_linear_time() -> None:
    for text in ("a" + " " * 40, "a", "a b "):
        begun = "<|tool_call>call:f{x:"
        assert is_linear(lambda count: read("gemma4", [begun + text * (count // len(text)) + "\n<tool_call|>"])), text  # noqa: B023


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"q": "say <tool_call> now"}, "name": "f"}</tool_call>'),
        ("nemotron", '<TOOLCALL>[{"arguments": {"q": "say <TOOLCALL> now"}, "name": "f"}]</TOOLCALL>'),
        ("gemma4", '<|tool_call>call:f{q:<|"|>say <|tool_call> now<|"|>}<tool_call|>'),
    ],
)
def test_an_opening_mark_in_arguments_is_theirs(form: str, text: str) -> None:
    """Also in those that stand before the name, which shows that this is a call."""
    mark = text[: text.index(">") + 1]
    for pieces in ([text], list(text)):
        words, (call,) = read(form, pieces)
        assert (words, call.name, json.loads(call.arguments)) == ("", "f", {"q": f"say {mark} now"})


@pytest.mark.case(51)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("start", "text"), [("", " "), ("", "\n"), ("<think>", " "), ("<think>x", " "), ("<think>", "</thin"), ("x", " ")]
)
def test_telling_thoughts_apart_is_linear(inside: bool, start: str, text: str) -> None:
    assert is_linear(lambda count: split([start, *itertools.repeat(text, count)], inside=inside))


@pytest.mark.case(51)
@pytest.mark.parametrize(
    ("form", "start", "text"),
    [
        ("gemma4", "Blue.", "<channel|>"),
        ("gemma4", "Blue.", "<|channel>x<channel|>"),
        ("openai", "<|channel|>analysis<|message|>", "<|end|><|message|>"),
        ("muse", "to=self<|message|>", "<|eom|><|message|>"),
        ("muse", "to=self<|message|>", " to=x"),
        ("muse", "", "to="),
        ("ernie45", "<think>a</think><response>", "</response>"),
    ],
)
def test_many_marks_in_one_piece_are_read_in_linear_time(form: str, start: str, text: str) -> None:
    """An answer that is not streamed comes whole."""

    def work(count: int) -> None:
        made = splitter(REASONING[form], inside=False)
        made.push(start + text * count)
        made.finish()

    assert is_linear(work)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("... <tool_call> ...", "hermes"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("{% set begin = '<minimax:tool_call>' %}", "minimax_m2"),
        ("<｜tool_call_begin｜>function<｜tool_sep｜>", "step3"),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ('{{ tools }} Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ('{{ tools }} "parameters": use [func_name1(params_name1=params_value1), func_name2()]', "pythonic"),
    ],
)
def test_forms_are_recognised(template: str | None, form: str | None) -> None:
    assert form_of(template) == form


def test_beginnings_are_recognised() -> None:
    assert THINK.begins_inside("assistant\n<think>\n")
    assert not THINK.begins_inside("assistant\n")
    assert not THINK.begins_inside(None)
