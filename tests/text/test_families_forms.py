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


def gemma(quote: str = '<|"|>', marks: tuple[str, str] = ("<|tool_call>", "<tool_call|>"), every: bool = False) -> str:
    shown = {
        name: ",".join(f"{k}:{f'{quote}{v}{quote}' if every or isinstance(v, str) else v}" for k, v in given.items())
        for name, given in CALLS
    }
    return "".join(f"{marks[0]}call:{name}{{{inner}}}{marks[1]}" for name, inner in shown.items())


def keyed() -> str:
    return compact([{function: given} for function, given in CALLS])


_M3 = "]<]minimax[>["
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
    "minimax_m3": [
        f"{_M3}<tool_call>\n"
        + tagged(f'{_M3}<invoke name="NAME">ARGUMENTS{_M3}</invoke>', f"{_M3}<KEY>VALUE{_M3}</KEY>")
        + f"\n{_M3}</tool_call>",
        f"{_M3}<tool_call>\n"
        + tagged(f'{_M3}<invoke name="NAME">\nARGUMENTS{_M3}</invoke>', f"{_M3}<KEY>VALUE{_M3}</KEY>\n")
        + f"\n{_M3}</tool_call>",
    ],
    "seed_oss": [
        tagged(
            "<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
            "<parameter=KEY>VALUE</parameter>\n",
        )
    ],
    "hy_v3": [
        f"<tool_calls>{blank}"
        + tagged(
            f"<tool_call>NAME<tool_sep>{blank}ARGUMENTS</tool_call>",
            f"<arg_key>KEY</arg_key>{blank}<arg_value>VALUE</arg_value>{blank}",
        )
        + f"{blank}</tool_calls>"
        for blank in ("", "\n")
    ],
    "minicpm5": [
        tagged('<function name="NAME">ARGUMENTS</function>', '<param name="KEY">VALUE</param>'),
        tagged('<function name="NAME">ARGUMENTS</function>', '<param name="KEY"><![CDATA[VALUE]]></param>'),
    ],
    "muse": [
        tagged(
            "<|start|>assistant to=NAME<|message|><atem:function_calls>\n"
            '<atem:invoke name="NAME">\nARGUMENTS</atem:invoke>\n</atem:function_calls><|eom|>',
            '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        ).replace("\n<|start|>", "<|start|>")
    ],
    "apertus": [f"<|tools_prefix|>{keyed()}<|tools_suffix|>"],
    "longcat": [each('<longcat_tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</longcat_tool_call>')],
    "functiongemma": [
        gemma("<escape>", ("<start_function_call>", "<end_function_call>"), every=every) for every in (False, True)
    ],
    "gigachat3": [
        each('<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "NAME", "arguments": ARGUMENTS}', ""),
        each('<|function_call|>{"name": "NAME", "arguments": ARGUMENTS}<|message_sep|>\n\n', ""),
    ],
    "granite-20b-fc": [each('<function_call> {"name": "NAME", "arguments": ARGUMENTS}')],
    **{
        form: [
            f"<｜DSML｜{blank}{frame}>\n"
            + tagged(
                f'<｜DSML｜{blank}invoke name="NAME">\nARGUMENTS</｜DSML｜{blank}invoke>',
                f'<｜DSML｜{blank}parameter name="KEY" string="true">VALUE</｜DSML｜{blank}parameter>\n',
            )
            + f"\n</｜DSML｜{blank}{frame}>"
        ]
        for form, blank, frame in (
            ("deepseek_v32", "", "function_calls"),
            ("deepseek_v4", "", "tool_calls"),
            ("deepseek_v41", " ", "calls"),
        )
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
_MUSE = "<|start|>assistant "
# Format -> reasoning as a template writes it.
THOUGHTS = {
    "think": f"<think>\n{THOUGHT}\n</think>\n\n",
    "ernie45": f"<think>\n{THOUGHT}\n</think>\n\n",
    "hunyuan_a13b": f"<think>\n{THOUGHT}\n</think>\n",
    "seed_oss": f"<seed:think>{THOUGHT}</seed:think>",
    "minimax_m3": f"<mm:think>{THOUGHT}</mm:think>",
    "longcat": f"<longcat_think>\n{THOUGHT}\n</longcat_think>\n",
    "apertus": f"<|inner_prefix|>{THOUGHT}<|inner_suffix|>",
    "granite": f"Here is my thought process:{THOUGHT}Here is my response:",
    "muse": f"{_MUSE}to=self<|message|>{THOUGHT}<|eom|>",
    "muse_glimmer": f" to=self<|message|>{THOUGHT}<|eom|>",
    "mistral": f"[THINK]{THOUGHT}[/THINK]",
    "cohere": f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>",
    "gemma4": f"<|channel>thought\n{THOUGHT}\n<channel|>",
    "openai": f"<|channel|>analysis<|message|>{THOUGHT}<|end|>",
}
# Format of reasoning -> the answer behind it, where that is not the words alone.
ANSWERS = {
    "openai": "<|start|>assistant<|channel|>final<|message|>WORDS<|end|>",
    "ernie45": "<response>\nWORDS\n</response>\n",
    "hunyuan_a13b": "<answer>\nWORDS\n</answer>",
    "cohere": "<|START_RESPONSE|>WORDS<|END_RESPONSE|>",
    "muse": f"{_MUSE}to=user<|message|>WORDS<|eot|>",
    "muse_glimmer": f"{_MUSE}to=user<|message|>WORDS<|eom|>",
}
# Formats of calls that only the reasoning's reader finds: it knows the ends of messages.
WITHIN = {"openai": "openai", "muse": "muse"}
# Formats that have no words before calls: calls are the whole answer.
ALONE = {"pythonic", "json", "xlam"}
FAMILIES = {name: family for name, family in families().items() if family.calls or family.reasoning}
PAIRS = sorted(
    {(calls, thoughts) for f in FAMILIES.values() for calls in (*f.calls, "") for thoughts in (*f.reasoning, "")}
    | {(calls, "") for calls in FORMATS}
    | {("", thoughts) for thoughts in THOUGHTS}
)


def words_of(thoughts: str, words: str) -> str:
    """An answer's words as they stand after this reasoning."""
    return ANSWERS.get(thoughts, "WORDS").replace("WORDS", words)


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
    thoughts = thoughts or WITHIN.get(form, "")
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
        template = THOUGHTS[thoughts] + words_of(thoughts, "")
        assert reasoning.reasoning_of(template, family.reasoning) == thoughts
    assert form_of("{{ messages }}", family.calls) is None
    assert reasoning.reasoning_of("{{ messages }}", family.reasoning) is None


@pytest.mark.parametrize("thoughts", sorted(THOUGHTS))
def test_a_template_shows_its_reasoning_to_families_that_state_none(thoughts: str) -> None:
    # Both write the same marks; marks of an answer are left out only where the family says so.
    thoughts = {"muse_glimmer": "muse", "ernie45": "think", "hunyuan_a13b": "think"}.get(thoughts, thoughts)
    assert reasoning.reasoning_of(THOUGHTS[thoughts] + words_of(thoughts, "")) == thoughts


def test_every_format_is_tested() -> None:
    assert WRITTEN.keys() == FORMATS.keys()
    # These are `think` with more of its blanks (test_tools_and_reasoning.py), or without a split.
    assert THOUGHTS.keys() | {"olmo3", "step3p5", "minimax_m2_append_think"} == reasoning.FORMATS.keys()


def test_a_template_that_nobody_states_keeps_the_marks_of_the_answer() -> None:
    """R1-style templates ask for <answer>, which scripts read; MiniMax-M2's have <response> around tools' results."""
    for word in ("answer", "response"):
        assert reasoning.reasoning_of(f"<think></think><{word}></{word}>") == "think"


def test_a_message_to_a_function_may_hold_several_calls() -> None:
    calls = "".join(
        f'<atem:invoke name="look">\n<atem:parameter name="at">{at}</atem:parameter>\n</atem:invoke>\n' for at in "ab"
    )
    text = f" to=look<|message|><atem:function_calls>\n{calls}</atem:function_calls><|eom|>"
    expected = [("look", {"at": "a"}), ("look", {"at": "b"})]
    for pieces in ([text], [*text]):
        assert read(pieces, "muse", "muse") == ("", "", expected)


def test_channels_that_are_no_reasoning_are_the_answer() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Soon.<|end|>"
    assert read([text], "openai", "openai") == ("hm", "Soon.", [])
    assert read([*"Plain."], "openai", "openai") == ("", "Plain.", [])
    assert read(["<|channel|>analysis<|message|>cut"], "openai", "openai") == ("cut", "", [])


@pytest.mark.parametrize(
    ("thoughts", "text", "expected"),
    [
        ("muse", "to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Soon.<|eot|>", ("hm", "Soon.", [])),
        (
            "muse",
            " to=commentary<|message|>I look.<|eom|><|start|>assistant to=self<|message|>hm",
            ("hm", "I look.", []),
        ),
        ("muse", "<|message|>hm<|eom|><|start|>assistant to=user<|message|>Soon.", ("hm", "Soon.", [])),
        ("muse_glimmer", "<|message|>Soon.<|eot|>", ("", "Soon.", [])),
        # A message that was not ended.
        ("muse", " to=self<|message|>hm, to=x\n to=user<|message|>Soon to=", ("hm, to=x", "Soon to=", [])),
        ("muse", "Plain.", ("", "Plain.", [])),
        ("muse", "to=x is a part of a header.", ("", "to=x is a part of a header.", [])),
        ("muse", "to=x" + " is" * 40 + "<|message|>", ("", "to=x" + " is" * 40 + "<|message|>", [])),
        ("muse", " to=self<|message|>cut", ("cut", "", [])),
        ("hunyuan_a13b", "<think>\n\n</think>\n<answer>\nSoon.\n</answer>", ("", "Soon.", [])),
        ("hunyuan_a13b", "<answer>\nSoon.\n\nOr later.\n</answer>\n", ("", "Soon.\n\nOr later.", [])),
        ("hunyuan_a13b", "<think>hm</think>Soon <answer>", ("hm", "Soon <answer>", [])),
        ("ernie45", "<think>hm</think>\n\n<response>\nSoon.\n", ("hm", "Soon.\n", [])),
        ("ernie45", "<think>hm</think>\n<resp", ("hm", "<resp", [])),
        ("cohere", "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>Soon.<|END_TEXT|>", ("hm", "Soon.", [])),
        ("granite", "Here's my thought process: hm Here's my response: Soon.", (" hm ", " Soon.", [])),
        ("minimax_m2_append_think", "<think>hm</think>\nSoon.", ("", "<think>hm</think>\nSoon.", [])),
        ("granite", "Here is my thought.", ("", "Here is my thought.", [])),
        ("granite", "Here is my response: Soon.", ("", "Here is my response: Soon.", [])),
        ("minimax_m3", "</mm:think>\nSoon.", ("", "Soon.", [])),
        ("think", "</think>Soon.</think>", ("", "</think>Soon.</think>", [])),
    ],
)
def test_answers_that_are_written_otherwise(thoughts: str, text: str, expected: tuple[str, str, list[Any]]) -> None:
    assert read([text], "", thoughts) == expected
    assert read([*text], "", thoughts) == expected
    for place in range(1, len(text)):
        assert read([text[:place], text[place:]], "", thoughts) == expected


def test_a_call_in_an_answer_of_muse_is_none() -> None:
    call = WRITTEN["muse"][0]
    echo = '<atem:invoke name="look">'
    text = f" to=self<|message|>{echo}<|eom|><|start|>assistant to=user<|message|>{echo}<|eom|>{call}"
    assert read([text], "muse", "muse") == (echo, echo, CALLS)
    assert read([*text], "muse", "muse") == (echo, echo, CALLS)


@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen3", "qwen3_moe", "qwen3_next"])
def test_a_template_of_coder_s_calls_is_not_taken_for_hermes_s(name: str) -> None:
    """Both show the mark around calls."""
    stated = FAMILIES[f"beheld.families.{name}"].calls
    assert form_of(WRITTEN["qwen3_coder"][0], stated) == "qwen3_coder"
    assert form_of(WRITTEN["hermes"][0], stated) == "hermes"


def test_a_family_that_states_hermes_alone_reads_the_calls_that_its_template_shows() -> None:
    for form in ("hermes", "qwen3_coder", "glm45"):
        assert form_of(WRITTEN[form][0], ("hermes",)) == form
    # One that is stated is not taken for another of the same marks.
    for form in ("jamba", "hunyuan_a13b"):
        assert form_of(WRITTEN["jamba"][0], (form,)) == form


@pytest.mark.parametrize("again", ["", "<think>", "\n<think>"])
def test_reasoning_that_stays_in_the_answer_keeps_its_marks(again: str) -> None:
    """Of an answer that the prompt has begun; the model may write the mark once more."""
    marks = reasoning.FORMATS["minimax_m2_append_think"]
    text = f"{again}hm</think>\n\nSoon.<think>"
    expected = ("", f"<think>{again.removesuffix('<think>')}hm</think>\n\nSoon.<think>")
    for pieces in ([text], [*text]):
        split = reasoning.splitter(marks, inside=True)
        parts = [*map(split.push, pieces), split.finish()]
        assert tuple("".join(part) for part in zip(*parts, strict=True)) == expected
    assert reasoning.splitter(marks, inside=True).finish() == ("", "<think>")
