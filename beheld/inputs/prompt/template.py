"""Selects a chat template and the content form that it takes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CHAT_TEMPLATE, read_json
from beheld.core.errors import ConfigError, ModelError, TemplateError
from beheld.core.request import ForeignTemplate
from beheld.families.registry import further_template
from beheld.inputs.prompt.rendering import LIMIT, Rendering, render
from beheld.inputs.prompt.template_cost import is_bounded
from beheld.sandbox.sandbox import Sandbox
from beheld.sandbox.task_type import TaskType
from beheld.utils.cancellation import CancelToken
from beheld.utils.log import get_logger, once
from beheld.utils.lru import LRU

logger = get_logger(__name__)

FORMATS = ("auto", "openai", "string")
# Templates of rerankers know no user.
_PROBED_ROLES = ("user", "document")
_PROBE = "beheld7probe"
_FOREIGN_BYTES = 4 << 20
_ENTRY_BYTES = 256


class ChatTemplates:
    """Finds and renders the templates of one checkpoint.

    Args:
        tokenizer: transformers' tokenizer.
        folder: the checkpoint's.
        fallback: the family's template, or "".
        only: the family's counts even where the checkpoint has one.
        sandbox: renders untrusted templates as tasks of `render_type`; None renders them here.
        render_type: see rendering.render_type.
    """

    def __init__(
        self,
        tokenizer: Any,
        folder: Path,
        fallback: str,
        sandbox: Sandbox | None = None,
        render_type: TaskType[Rendering, str] | None = None,
        *,
        only: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._only = only
        self._folder = folder
        self._fallback = fallback
        self._sandbox = sandbox
        self._render_type = render_type
        self._forms: dict[str, tuple[bool, bool]] = {}
        self._judged: dict[str, str] = {}
        # Clients may send any number of templates, so this cache is bounded.
        self._foreign: LRU[str, tuple[bool, bool]] = LRU(_FOREIGN_BYTES)
        self._lock = threading.Lock()

    def resolve(self, given: str | None, tools: Sequence[Any] | None) -> str:
        """Return the template's source: the given one (text or a file), the checkpoint's, or the family's.

        Raises:
            TemplateError: there is none.
        """
        if isinstance(given, ForeignTemplate):
            return given
        if given:
            return text_of(given)
        own = self._own(tools)
        if own:
            return self._trusted_if_bounded(own)
        if self._fallback:
            if not self._only:
                once(logger, logging.INFO, "The checkpoint has no chat template; using its family's.")
            return self._fallback
        raise TemplateError(
            "The checkpoint has no chat template.",
            or_engine="set chat_template to a template or to a file that contains one",
        )

    def check_own(self) -> None:
        """Refuse a checkpoint whose own template takes too much for the shortest conversation.

        Raises:
            ModelError: it does.
        """
        own = self._own(None)
        template = self._trusted_if_bounded(own) if own else ""
        if not isinstance(template, ForeignTemplate):
            return
        logger.info("The checkpoint's chat template may take long: it is rendered in a process of its own.")
        try:
            self.forms(template)
        except TemplateError as error:
            raise ModelError(
                f"The checkpoint's chat template cannot be used: {error.reason}",
                "Give another with chat_template, or fetch the checkpoint again.",
            ) from error

    def _trusted_if_bounded(self, template: str) -> str:
        """The checkpoint's template; as a stranger's if its source does not show that rendering it takes a moment."""
        with self._lock:
            if template not in self._judged:
                self._judged[template] = template if is_bounded(template) else ForeignTemplate(template)
            return self._judged[template]

    @cached_property
    def _legacy(self) -> str | None:
        """The template of a checkpoint that has it in a JSON file alone, read once: each request asks for it."""
        legacy = self._folder / CHAT_TEMPLATE
        if (self._folder / "chat_template.jinja").is_file() or not legacy.is_file():
            return None
        found = read_json(legacy).get("chat_template")
        return found if isinstance(found, str) else None

    def _own(self, tools: Sequence[Any] | None) -> str | None:
        if self._only:
            return None
        if self._legacy is not None:
            return self._legacy
        template = getattr(self._tokenizer, "chat_template", None)
        if isinstance(template, Mapping):
            name = "tool_use" if tools and "tool_use" in template else "default"
            template = template.get(name)
        return template if isinstance(template, str) else None

    def forms(self, template: str) -> tuple[bool, bool]:
        """Return whether the template takes content as a list of parts, and whether it takes it as a string."""
        if isinstance(template, ForeignTemplate):
            known = self._foreign.get(template)
            if known is None:
                known = self._probe(template, [{"type": "text", "text": _PROBE}]), self._probe(template, _PROBE)
                self._foreign.put(template, known, _ENTRY_BYTES + len(template))
            return known
        with self._lock:
            if template not in self._forms:
                as_list = self._probe(template, [{"type": "text", "text": _PROBE}])
                self._forms[template] = (as_list, self._probe(template, _PROBE))
                name = "openai" if as_list else "string"
                once(
                    logger,
                    logging.INFO,
                    f"Detected the chat template content format to be {name!r}. "
                    "You can set `--chat-template-content-format` to override this.",
                )
            return self._forms[template]

    def _probe(self, template: str, content: Any) -> bool:
        """Return whether content of this form is rendered as its text, not as a printed Python list."""
        return any(self._probe_role(template, content, role) for role in _PROBED_ROLES)

    def _probe_role(self, template: str, content: Any, role: str) -> bool:
        try:
            text = self.render(Rendering([{"role": role, "content": content}], template, add_generation_prompt=True))
        except TemplateError as error:
            if error.stage == LIMIT:
                raise
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text

    def takes_list(self, template: str, content_format: str | None) -> bool:
        """Return whether messages should have lists of parts.

        Raises:
            ConfigError: the format is unknown.
        """
        if content_format not in (None, *FORMATS):
            raise ConfigError(
                f"Unknown chat template content format {content_format!r}.",
                f"Known: {', '.join(FORMATS)}.",
                param="chat_template_content_format",
            )
        if content_format in (None, "auto"):
            return self.forms(template)[0]
        return content_format == "openai"

    def render(self, task: Rendering, cancel: CancelToken | None = None) -> str:
        """Render the prompt's text; untrusted templates run in the sandbox.

        Raises:
            TemplateError: the template fails on these messages, is invalid, or takes too much.
            WorkerError: the process that rendered it ended.
            Cancelled: the request was cancelled.
        """
        if isinstance(task.template, ForeignTemplate) and self._sandbox is not None and self._render_type is not None:
            # The wire format supports text, lists and mappings, not subclasses of them.
            plain = replace(task, template=str(task.template), messages=[dict(message) for message in task.messages])
            return self._sandbox.run(self._render_type, plain, cancel)
        return render(self._tokenizer, task)


def text_of(given: str) -> str:
    """Return a template given as text (with braces or lines), as a file's path, or by the name of a family's file.

    Raises:
        TemplateError: it is neither, or the file cannot be read.
    """
    if any(mark in given for mark in ("{%", "{{", "\n")):
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        path = further_template(path.name) or path
    if not path.is_file():
        raise TemplateError(
            f"chat_template {given!r} is neither a template nor a file.",
            "A template holds {{ }} or {% %}; a file must exist.",
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TemplateError(f"The file of chat_template {given!r} cannot be read as text.") from error
