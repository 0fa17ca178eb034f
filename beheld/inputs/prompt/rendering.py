"""Renders chat templates, in this process or, for untrusted templates, in the sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.config import MODEL_CLASSES, EngineArgs, ModelInfo
from beheld.core.errors import TemplateError, WorkerError, first_line
from beheld.inputs.prompt.tokenizer import load_tokenizer
from beheld.sandbox.task_type import Fault, TaskType, WorkerFault
from beheld.wire.codec import Codec

MAX_S = 2.0
# The stage of errors about a stopped template.
LIMIT = "limit"
MAX_CHARACTERS = 1 << 20
_MAX_BYTES = 512 << 20
_MAX_WORKERS = 2
# Exceptions from values that a template did not expect.
_OF_VALUES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


@dataclass(frozen=True, eq=False)
class Rendering:
    """A template to render, and its input. The result is the text.

    Attributes:
        messages: the conversation's.
        template: the template's source.
        add_generation_prompt, continue_final_message, tools: see transformers' apply_chat_template.
        variables: further variables of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    template: str
    add_generation_prompt: bool
    continue_final_message: bool = False
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class RendererSettings:
    """The model whose tokenizer defines a template's special token variables."""

    info: ModelInfo
    args: EngineArgs


CODEC = Codec((RendererSettings, Rendering, *MODEL_CLASSES))


def render(tokenizer: Any, task: Rendering) -> str:
    """Return the prompt's text, rendered in this process.

    Raises:
        TemplateError: the template fails on these messages, or is invalid.
    """
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in task.messages],
            chat_template=str(task.template),
            tools=list(task.tools) if task.tools else None,
            add_generation_prompt=task.add_generation_prompt,
            continue_final_message=task.continue_final_message,
            tokenize=False,
            **(task.variables or {}),
        )
    except _jinja_error() as error:
        # The template's message is written for the authors of messages.
        raise TemplateError(
            f"The chat template fails on these messages: {first_line(error)}.",
            "Change the messages.",
            or_engine="set another chat_template",
        ) from error
    except _OF_VALUES as error:
        raise TemplateError(
            "The chat template fails on these messages.",
            "Change the messages.",
            or_engine="set another chat_template",
            detail=first_line(error),
        ) from error
    except SyntaxError as error:
        # A break outside of a loop, or more loops within each other than Python takes.
        raise TemplateError(
            f"The chat template cannot be translated: {error.msg}.", "Change the template.", param="chat_template"
        ) from error
    return str(text)


def load_renderer(settings: RendererSettings) -> Callable[[Rendering], str]:
    """Return the function that renders.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(settings.info, settings.args)
    # Rendering's dependencies are loaded now, for all workers.
    render(tokenizer, Rendering([{"role": "user", "content": ""}], "{{ messages }}", add_generation_prompt=False))

    def within_limits(task: Rendering) -> str:
        text = render(tokenizer, task)
        if len(text) > MAX_CHARACTERS:
            raise _stopped(f"writes more than {MAX_CHARACTERS} characters")
        return text

    return within_limits


def render_type(info: ModelInfo, args: EngineArgs) -> TaskType[Rendering, str]:
    """Return the sandbox's rendering task, limited in time, memory and output."""
    return TaskType(
        load=load_renderer,
        settings=lambda: RendererSettings(info, args),
        answer=str,
        timeout_s=lambda task: MAX_S,
        memory_bytes=_MAX_BYTES,
        max_workers=_MAX_WORKERS,
        error=_error,
    )


def _error(task: Rendering, fault: WorkerFault) -> Exception:
    if fault.fault is Fault.ENDED:
        return WorkerError(f"The process that rendered the chat template ended ({fault.how}).", "Send it again.")
    return _stopped(f"takes more than {MAX_S:g} s" if fault.fault is Fault.TIME else "takes too much memory")


def _stopped(why: str) -> TemplateError:
    return TemplateError(f"The chat template {why}.", "Give another.", stage=LIMIT)


def _jinja_error() -> type[Exception]:
    from jinja2 import TemplateError as JinjaError

    return JinjaError
