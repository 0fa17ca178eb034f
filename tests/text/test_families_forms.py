"""What a family's chat template writes is read back, whole and in every cut of the stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from beheld.families.registry import families
from beheld.server.delta_parser import DeltaParser
from beheld.text import reasoning
from beheld.text.tools import FORMATS, form_of

SCHEMAS: Any = {"look": {"properties": {"at": {"type": "string"}, "days": {"type": "integer"}}}, "stop": {}}
CALLS: list[tuple[str, dict[str, Any]]] = [("look", {"at": 'the "sky", {x}', "days": 3}), ("stop", {})]
THOUGHT, WORDS = "Shall I?\n\nI shall.", "I look."


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def each(text: str, separator: str = "\n") -> str:
    """One call after another, each from a template with NAME and ARGUMENTS."""
    return separator.join(text.replace("NAME", name).replace("ARGUMENTS", compact(given)) for name, given in CALLS)


def listed(name: str = "name", arguments: str = "arguments") -> str:
    return compact([{name: function, arguments: given} for function, given in CALLS])


def tagged(call: str, argument: str, text: str = "") -> str:
    made = []
    for name, given in CALLS:
        inner = "".join(argument.replace("KEY", key).replace("VALUE", str(value)) for key, value in given.items())
        made.append(call.replace("NAME", name).replace("ARGUMENTS", inner))
    return "\n".join(made)


def python_lines() -> list[str]:
    return [f"{n}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for n, given in CALLS]


def python() -> str:
    return f"[{', '.join(python_lines())}]"


def gemma() -> str:
    quote = '<|"|>'
    shown = {
        name: ",".join(f"{k}:{quote + v + quote if isinstance(v, str) else v}" for k, v in given.items())
        for name, given in CALLS
    }
    return "".join(f"<|tool_call>call:{name}{{{inner}}}<tool_call|>" for name, inner in shown.items())


_STEP3 = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_STEP3_CALL = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">ARGUMENTS</steptml:invoke>'
    "<｜tool_call_end｜>"
)
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
# Format -> what a template of it writes for two calls, in each spelling that models of it use.
WRITTEN: dict[str, list[str]] = {
    "hermes": [each('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>')],
    "granite4": [each('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>')],
    "glm45": [
        tagged("<tool_call>NAME\nARGUMENTS</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
        tagged("<tool_call>NAMEARGUMENTS</tool_call>", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"),
    ],
    "qwen3_coder": [
        tagged(
            "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
            "<parameter=KEY>\nVALUE\n</parameter>\n",
        )
    ],
    "minimax_m2": [
        "<minimax:tool_call>\n"
        + tagged('<invoke name="NAME">\nARGUMENTS</invoke>', '<parameter name="KEY">VALUE</parameter>\n')
        + "\n</minimax:tool_call>",
        tagged(
            '<minimax:tool_call><invoke name="NAME">ARGUMENTS</invoke></minimax:tool_call>',
            '<parameter name="KEY">VALUE</parameter>',
        ),
    ],
    **{
        form: [
            f"<｜DSML｜{frame}>\n"
            + tagged(
                '<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>',
                '<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\n',
            )
            + f"\n</｜DSML｜{frame}>"
        ]
        for form, frame in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    },
    "step3": [
        _STEP3[0]
        + tagged(_STEP3_CALL, '<steptml:parameter name="KEY">VALUE</steptml:parameter>').replace("\n", "")
        + _STEP3[1],
        _STEP3[0] + tagged(_STEP3_CALL, '\n<steptml:parameter name="KEY">VALUE</steptml:parameter>\n') + _STEP3[1],
    ],
    "mistral": [f"[TOOL_CALLS] {listed()}", each("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "")],
    "deepseek_v3": [
        _DEEPSEEK[0]
        + each("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>")
        + _DEEPSEEK[1],
        _DEEPSEEK[0] + each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>", "") + _DEEPSEEK[1],
    ],
    "kimi_k2": [
        _KIMI[0]
        + each("<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>", "")
        + _KIMI[1]
    ],
    "openai": [
        each(
            "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>",
            "",
        ),
        each("<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS<|call|>", ""),
    ],
    "gemma4": [gemma()],
    "phi4_mini_json": [f"<|tool_call|>{listed()}<|/tool_call|>", f"functools{listed()}"],
    "jamba": [
        f"<tool_calls>{listed()}</tool_calls>",
        "<tool_calls>\n" + each('{"name": "NAME", "arguments": ARGUMENTS}') + "\n</tool_calls>",
    ],
    "hunyuan_a13b": [f"<tool_calls>{listed()}</tool_calls>"],
    "internlm": [each('<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ARGUMENTS}<|action_end|>')],
    "cohere": [f"<|START_ACTION|>{listed('tool_name', 'parameters')}<|END_ACTION|>"],
    "nemotron": [f"<TOOLCALL>{listed()}</TOOLCALL>"],
    "lfm2": [f"<|tool_call_start|>{python()}<|tool_call_end|>"],
    "olmo3": [
        f"<function_calls>{python()[1:-1]}</function_calls>",
        "<function_calls>\n" + "\n".join(python_lines()) + "\n</function_calls>",
    ],
    "granite": [f"<|tool_call|>{listed()}"],
    "pythonic": [python(), f"<|python_start|>{python()}<|python_end|>"],
    "llama3_json": [each('{"name": "NAME", "parameters": ARGUMENTS}', "; ")],
    "xlam": [
        listed(),
        f"```json\n{listed()}\n```",
        f"[TOOL_CALLS]{listed()}",
        f"<tool_call>{listed()}</tool_call>",
    ],
    "json": [listed()],
}
# Format -> reasoning as a template writes it.
THOUGHTS = {
    "think": f"<think>\n{THOUGHT}\n</think>\n\n",
    "mistral": f"[THINK]{THOUGHT}[/THINK]",
    "cohere": f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>",
    "gemma4": f"<|channel>thought\n{THOUGHT}\n<channel|>",
    "openai": f"<|channel|>analysis<|message|>{THOUGHT}<|end|>",
}
# Formats that have no words before calls: calls are the whole answer.
ALONE = {"pythonic", "json", "xlam"}
FAMILIES = {name: family for name, family in families().items() if family.calls or family.reasoning}
PAIRS = sorted(
    {(calls, thoughts) for f in FAMILIES.values() for calls in (*f.calls, "") for thoughts in (*f.reasoning, "")}
    | {(calls, "") for calls in FORMATS}
)


def words_of(thoughts: str, words: str) -> str:
    """An answer's words as they stand after this reasoning."""
    return f"<|start|>assistant<|channel|>final<|message|>{words}<|end|>" if thoughts == "openai" else words


def read(pieces: list[str], form: str, thoughts: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """(reasoning, content, calls) of an answer in pieces."""
    marks = reasoning.FORMATS.get(thoughts)
    calls = FORMATS[form].openings if form else ()
    split = None if marks is None else reasoning.splitter(marks, inside=False, calls=calls)
    parser = DeltaParser(split, form or None, None, SCHEMAS)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + [*parser.finish()]
    found: list[list[str]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "name" in call["function"]:
                found.append([call["function"]["name"], ""])
            found[call["index"]][1] += call["function"]["arguments"]
    text = ["".join(delta.get(kind, "") for delta in deltas) for kind in ("reasoning_content", "content")]
    return text[0], text[1], [(name, json.loads(given)) for name, given in found]


@pytest.mark.parametrize(("form", "thoughts"), PAIRS)
def test_what_a_template_writes_is_read_in_every_cut(form: str, thoughts: str) -> None:
    # In this format, only the reasoning's reader knows the ends of messages.
    thoughts = "openai" if form == "openai" else thoughts
    begin = THOUGHTS.get(thoughts, "")
    expected = THOUGHT if thoughts else ""
    for calls in WRITTEN.get(form, [""]):
        for words in ("",) if form in ALONE else ("", WORDS):
            text = begin + (words_of(thoughts, words) if words else "") + calls
            whole = read([text], form, thoughts)
            assert whole[0] == expected
            assert whole[1].strip() == words
            assert whole[2] == (CALLS if form else [])
            assert read(list(text), form, thoughts) == whole
            for place in range(1, len(text)):
                assert read([text[:place], text[place:]], form, thoughts) == whole


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_states_formats_that_its_template_chooses(name: str) -> None:
    family = FAMILIES[name]
    for form in family.calls:
        template = " ".join(FORMATS[form].template)
        assert form_of(template, family.calls) == form
    for thoughts in family.reasoning:
        assert reasoning.reasoning_of(f"{{{{ '{THOUGHTS[thoughts]}' }}}}", family.reasoning) == thoughts
    assert form_of("{{ messages }}", family.calls) is None
    assert reasoning.reasoning_of("{{ messages }}", family.reasoning) is None


def test_every_format_is_tested() -> None:
    assert WRITTEN.keys() == FORMATS.keys()
    # These are `think` with more of its blanks: test_tools_and_reasoning.py.
    assert THOUGHTS.keys() | {"olmo3", "step3p5"} == reasoning.FORMATS.keys()


def test_channels_that_are_no_reasoning_are_the_answer() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Soon.<|end|>"
    assert read([text], "openai", "openai") == ("hm", "Soon.", [])
    assert read([*"Plain."], "openai", "openai") == ("", "Plain.", [])
    assert read(["<|channel|>analysis<|message|>cut"], "openai", "openai") == ("cut", "", [])
