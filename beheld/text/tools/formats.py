"""The formats by name, what distinguishes them, and which one a chat template teaches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from beheld.text.channels import CALLED
from beheld.text.tools import gemma, headed, mistral, nested
from beheld.text.tools.bare import PythonCalls, json_reader, listed_json_reader, python_reader, worded_json_reader
from beheld.text.tools.call import CallBody, Schemas, ToolReader
from beheld.text.tools.json_calls import JsonCalls
from beheld.text.tools.marked import MarkedReader, Region
from beheld.text.tools.tagged import (
    CDATA,
    GLM,
    HUNYUAN,
    MINICPM5,
    MINICPM5_CALLS,
    MINIMAX,
    MUSE,
    QWEN3,
    STEP3,
    TaggedCalls,
    deepseek,
)


@dataclass(frozen=True)
class CallFormat:
    """How a model writes tool calls.

    Attributes:
        reader: makes a reader of one answer.
        openings: the marks with which calls begin, where marks separate them from words.
        marks: marks without which the format cannot be read. If one is a special token, texts keep special tokens.
        template: what a chat template that teaches the format contains; nothing if no text shows it.
        short_ids: its templates take back only ids of nine letters and digits.
        holds_inputs: its grammar of calls (structured/calls.py) writes the inputs of custom tools as JSON, so that they
            can follow grammars of their own.
    """

    reader: Callable[[Schemas], ToolReader]
    openings: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    short_ids: bool = False
    holds_inputs: bool = False


def _marked(
    open: str, close: str, body: Callable[[Schemas], CallBody], frame: Sequence[str] = (), template: str = ""
) -> CallFormat:
    """Calls between two marks.

    Args:
        open, close: the marks.
        body: makes the reader of the text between them.
        frame: marks around all calls.
        template: what the chat template contains, if not the opening mark.
    """
    region = {open: Region(close)}
    return CallFormat(
        # Templates that write calls in a frame add nothing between it and the words before.
        lambda schemas: MarkedReader(region, lambda: body(schemas), frame=frame, blanks=bool(frame)),
        openings=(*frame, open),
        marks=(open, close),
        template=(template or open,),
    )


def _dsml(frame: str, blank: str = "") -> CallFormat:
    """DeepSeek's calls in tags with attributes, in a frame of this name, with these blanks in the tags."""
    marks = f"<｜DSML｜{blank}{frame}>", f"</｜DSML｜{blank}{frame}>"
    opening = f'<｜DSML｜{blank}invoke name="'
    region, tags = {opening: Region(f"</｜DSML｜{blank}invoke>", opening)}, deepseek(blank)
    return CallFormat(
        lambda schemas: MarkedReader(region, lambda: TaggedCalls(tags, schemas), frame=marks, blanks=True),
        (marks[0], opening),
        template=(marks[0],),
    )


def _coder(prefix: str, template: tuple[str, ...]) -> CallFormat:
    """Qwen3-Coder's calls, with this prefix in the names of the outer tags."""
    outer, close = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    # Models often omit the outer mark, or write only the closing one.
    regions = {outer: Region(close), "<function=": Region("</function>", "<function=")}
    return CallFormat(
        lambda schemas: MarkedReader(regions, lambda: TaggedCalls(QWEN3, schemas), close),
        (outer, "<function="),
        (outer, "<function=", "<parameter="),
        template,
    )


def _json(schemas: Schemas) -> CallBody:
    return JsonCalls()


_HERMES = {"<tool_call>": Region("</tool_call>")}
# Phi-4-mini writes a word, which nothing closes.
_PHI4 = {"<|tool_call|>": Region("<|/tool_call|>"), "functools[": Region("<|/tool_call|>", "[")}
_HUNYUAN = {"<tool_calls>": Region("</tool_calls>")}
_LFM2 = {"<|tool_call_start|>": Region("<|tool_call_end|>")}
_MINIMAX = {'<invoke name="': Region("</invoke>", '<invoke name="')}
_MINIMAX_ALL = "<minimax:tool_call>", "</minimax:tool_call>"
_M3 = {nested.INVOKE: Region(f"{nested.MARK}</invoke>")}
_M3_ALL = f"{nested.MARK}<tool_call>", f"{nested.MARK}</tool_call>"
_MINICPM5 = {mark: Region("</function>", mark, CDATA) for mark in MINICPM5_CALLS}
_MUSE = {CALLED[0]: Region(CALLED[1])}
# GigaChat's calls are a message of their own to another, or follow a mark.
_GIGACHAT_ROLE, _GIGACHAT_CALL = "function call<|role_sep|>\n", "<|function_call|>"
_GIGACHAT_ENDS = "<|message_sep|>\n\n", "<|message_sep|>"
_GIGACHAT = {mark: Region(_GIGACHAT_ENDS[1]) for mark in (_GIGACHAT_ROLE, _GIGACHAT_CALL)}
_GRANITE_20B = "<function_call>"
_STEP3_CALL = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_STEP3_ALL = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
# Some of its models spell the mark out.
_GRANITE = "<|tool_call|>", "<tool_call>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ALL = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

# Keys are the names of vLLM's --tool-call-parser, where it has the format; "json" is our name for JSON without marks.
# Of the formats that a template may teach, the first counts.
FORMATS: dict[str, CallFormat] = {
    "minimax_m3": CallFormat(
        lambda schemas: MarkedReader(_M3, lambda: nested.NestedCall(schemas), frame=_M3_ALL, blanks=True),
        (_M3_ALL[0], *_M3),
        _M3_ALL,
        (nested.MARK,),
    ),
    "minimax_m2": CallFormat(
        lambda schemas: MarkedReader(_MINIMAX, lambda: TaggedCalls(MINIMAX, schemas), frame=_MINIMAX_ALL, blanks=True),
        (_MINIMAX_ALL[0], *_MINIMAX),
        _MINIMAX_ALL,
        (_MINIMAX_ALL[0],),
    ),
    "seed_oss": _coder("seed:", ("<seed:tool_call>",)),
    "hy_v3": CallFormat(
        lambda schemas: MarkedReader(
            _HERMES, lambda: TaggedCalls(HUNYUAN, schemas), frame=("<tool_calls>", "</tool_calls>"), blanks=True
        ),
        ("<tool_calls>", "<tool_call>"),
        ("<tool_calls>", "<tool_sep>", "<arg_key>"),
        ("<tool_call>", "<tool_sep>"),
    ),
    "muse": CallFormat(
        # The reader of its reasoning leaves only calls in these messages.
        lambda schemas: MarkedReader(_MUSE, lambda: TaggedCalls(MUSE, schemas)),
        marks=("<|start|>", "<|message|>"),
        template=("<atem:invoke name=",),
    ),
    "minicpm5": CallFormat(
        lambda schemas: MarkedReader(_MINICPM5, lambda: TaggedCalls(MINICPM5, schemas)),
        tuple(_MINICPM5),
        template=("<function name=", "<param name="),
    ),
    "apertus": _marked("<|tools_prefix|>", "<|tools_suffix|>", lambda schemas: JsonCalls(keyed=True)),
    "longcat": _marked("<longcat_tool_call>", "</longcat_tool_call>", _json),
    "functiongemma": _marked(
        "<start_function_call>", "<end_function_call>", lambda schemas: gemma.GemmaCall(gemma.ESCAPE, schemas)
    ),
    "gigachat3": CallFormat(
        # The end token has a text where it does not end the answer (`ignore_eos`).
        lambda schemas: MarkedReader(_GIGACHAT, JsonCalls, "</s>", _GIGACHAT_ENDS[:1]),
        (_GIGACHAT_ENDS[0], *_GIGACHAT),
        (_GIGACHAT_CALL, "<|role_sep|>"),
        ("<|role_sep|>", "function"),
    ),
    "step3": _marked(*_STEP3_CALL, lambda schemas: TaggedCalls(STEP3, schemas), _STEP3_ALL),
    "glm45": CallFormat(
        lambda schemas: MarkedReader(_HERMES, lambda: TaggedCalls(GLM, schemas)),
        ("<tool_call>",),
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        ("<tool_call>", "<arg_key>"),
    ),
    "qwen3_coder": _coder("", ("<function=", "<parameter=")),
    "hermes": CallFormat(
        lambda schemas: MarkedReader(_HERMES, JsonCalls),
        ("<tool_call>",),
        ("<tool_call>",),
        ("<tool_call>",),
        holds_inputs=True,
    ),
    # The same, with every blank as vLLM's parser of that name leaves it.
    "granite4": CallFormat(
        lambda schemas: MarkedReader(_HERMES, JsonCalls, verbatim=True),
        ("<tool_call>",),
        ("<tool_call>",),
        holds_inputs=True,
    ),
    "mistral": CallFormat(
        lambda schemas: MarkedReader({mistral.MARK: Region(mistral.MARK)}, mistral.MistralCalls),
        (mistral.MARK,),
        (mistral.MARK, "[ARGS]"),
        (mistral.MARK,),
        short_ids=True,
        holds_inputs=True,
    ),
    "deepseek_v3": _marked(*_DEEPSEEK_CALL, lambda schemas: headed.deepseek(), _DEEPSEEK_ALL),
    # V3.2's, and V4's, which have other frames, V4.1's with blanks in the tags.
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "kimi_k2": _marked(*_KIMI_CALL, lambda schemas: headed.kimi(), _KIMI_ALL),
    # The reader of its reasoning leaves only calls between these.
    "openai": CallFormat(
        lambda schemas: MarkedReader({"<|channel|>": Region("<|call|>")}, headed.harmony),
        marks=("<|channel|>", "<|message|>"),
        template=("<|channel|>", "functions."),
    ),
    "gemma4": _marked("<|tool_call>", "<tool_call|>", lambda schemas: gemma.GemmaCall()),
    "phi4_mini_json": CallFormat(
        lambda schemas: MarkedReader(_PHI4, JsonCalls),
        ("<|tool_call|>", "functools["),
        ("<|tool_call|>", "<|/tool_call|>"),
        ("<|tool|>",),
    ),
    "jamba": _marked("<tool_calls>", "</tool_calls>", _json),
    # The same, whose template writes the words before calls again as they were.
    "hunyuan_a13b": CallFormat(
        lambda schemas: MarkedReader(_HUNYUAN, JsonCalls, blanks=True),
        ("<tool_calls>",),
        ("<tool_calls>",),
        ("<tool_calls>",),
    ),
    "internlm": _marked("<|action_start|><|plugin|>", "<|action_end|>", _json, template="<|plugin|>"),
    "cohere": _marked("<|START_ACTION|>", "<|END_ACTION|>", _json),
    "nemotron": _marked("<TOOLCALL>", "</TOOLCALL>", _json),
    # Its models may repeat a call's text after the closing mark.
    "lfm2": CallFormat(
        lambda schemas: MarkedReader(_LFM2, lambda: PythonCalls(schemas), echoes=True),
        openings=("<|tool_call_start|>",),
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
        template=("<|tool_list_start|>",),
    ),
    "granite": CallFormat(
        lambda schemas: MarkedReader({mark: Region(mark) for mark in _GRANITE}, JsonCalls),
        _GRANITE,
        ("<|tool_call|>",),
        ("<|tool_call|>",),
    ),
    "granite-20b-fc": CallFormat(
        lambda schemas: MarkedReader({_GRANITE_20B: Region(_GRANITE_20B)}, JsonCalls),
        (_GRANITE_20B,),
        (_GRANITE_20B,),
        (_GRANITE_20B,),
    ),
    "olmo3": _marked("<function_calls>", "</function_calls>", lambda schemas: PythonCalls(schemas, listed=False)),
    "pythonic": CallFormat(python_reader, template=("[func_name1(",), holds_inputs=True),
    "llama3_json": CallFormat(worded_json_reader, template=('"parameters": ', "tools"), holds_inputs=True),
    "xlam": CallFormat(listed_json_reader),
    "json": CallFormat(json_reader, holds_inputs=True),
}
# Formats of operators' plug-ins.
PLUGGED: dict[str, CallFormat] = {}


def format_named(name: str) -> CallFormat:
    """The format of that name, be it a plug-in's."""
    return PLUGGED[name] if name in PLUGGED else FORMATS[name]


def form_of(template: str | None, stated: Collection[str] = ()) -> str | None:
    """The format that a chat template teaches its model; None if it has none.

    Args:
        template: the text of the template.
        stated: the formats of the model's family, which are tried first.
    """
    if template is None:
        return None
    for name in (*stated, *FORMATS):
        if _teaches(template, name):
            own = FORMATS[name]
            # A template may show all marks of a format and be of one that has more: Qwen3-Coder's has Hermes'.
            finer = (
                other
                for other, form in FORMATS.items()
                if own.marks and {*form.marks} > {*own.marks} and form.template != own.template
            )
            return next((other for other in finer if _teaches(template, other)), name)
    return None


def _teaches(template: str, name: str) -> bool:
    marks = FORMATS[name].template
    return bool(marks) and all(mark in template for mark in marks)
