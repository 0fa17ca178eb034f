"""Templates that strangers sent are rendered where that can be killed: in time, within memory, and not without end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beheld.core.config import EngineArgs, KVGroup, ModelInfo
from beheld.core.errors import TemplateError, WorkerError
from beheld.sandbox.codec import Codec
from beheld.sandbox.pool import Fault, PoolSettings, WorkerFault, WorkerPool

MAX_S = 2.0
# The stage of errors that say that a template was stopped.
LIMIT = "limit"
MAX_CHARACTERS = 1 << 20
_MAX_BYTES = 512 << 20
_COUNT = 2


@dataclass(frozen=True, eq=False)
class Settings:
    """Whose tokenizer brings the names of special tokens into a template."""

    info: ModelInfo
    args: EngineArgs


@dataclass(frozen=True, eq=False)
class Rendering:
    """Render a template; the answer is the text. `options` are keywords of ChatTemplates.render."""

    messages: list[Any]
    template: str
    options: Mapping[str, Any]


CODEC = Codec((Settings, Rendering, ModelInfo, KVGroup, EngineArgs))


def load(settings: Settings) -> Callable[[Rendering], str]:
    """The function that renders.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    from beheld.inputs.prompt.template import ChatTemplates
    from beheld.inputs.prompt.tokenizer import load_tokenizer

    templates = ChatTemplates(load_tokenizer(settings.info, settings.args), Path(settings.info.path), "")
    # What rendering needs is loaded now, for all workers.
    templates.render([{"role": "user", "content": ""}], "{{ messages }}", add_generation_prompt=False)

    def render(task: Rendering) -> str:
        text = templates.render(task.messages, task.template, **task.options)
        if len(text) > MAX_CHARACTERS:
            raise _stopped(f"writes more than {MAX_CHARACTERS} characters")
        return text

    return render


class Renderers:
    """The processes that render, which begin with the first template. Safe to use from several threads."""

    def __init__(self, info: ModelInfo, args: EngineArgs) -> None:
        self._settings = Settings(info, args)
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        self._closed = False

    def render(self, messages: list[Any], template: str, options: Mapping[str, Any]) -> str:
        """The text.

        Raises:
            TemplateError: the template fails, or takes too long, too much memory or too many characters.
            WorkerError: the process ended.
        """
        try:
            answer = self._living().run(Rendering(messages, str(template), options), MAX_S)
        except WorkerFault as fault:
            if fault.fault is Fault.ENDED:
                reason = f"The process that rendered the chat template ended ({fault.how})."
                raise WorkerError(reason, "Send it again.") from fault
            raise _stopped(
                f"takes more than {MAX_S:g} s" if fault.fault is Fault.TIME else "takes too much memory"
            ) from fault
        return str(answer)

    def close(self) -> None:
        """End them."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.close()

    def _living(self) -> WorkerPool:
        with self._lock:
            if self._closed:
                raise WorkerError("The engine was closed.")
            if self._pool is None:
                self._pool = WorkerPool(PoolSettings(__name__, self._settings, CODEC, _MAX_BYTES), _COUNT)
            return self._pool


def _stopped(why: str) -> TemplateError:
    return TemplateError(f"The chat template {why}.", "Give another.", stage=LIMIT)
