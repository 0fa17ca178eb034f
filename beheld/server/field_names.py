"""What a client calls the things that errors speak of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from beheld.core.errors import BeheldError, LoRAError, MediaError, ParamsError, PlaceholderError, TemplateError
from beheld.server.schema import (
    ChatRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Sampled,
    TokenizeRequest,
)


@dataclass(frozen=True)
class FieldNames:
    """How one body says things.

    Attributes:
        prompt: the field that holds the prompt.
        template: the field that holds a template, if the client sent one.
        fields: what the engine calls a field -> the field that the client sent.
    """

    prompt: str | None = None
    template: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    def param(self, error: BeheldError) -> str | None:
        """The field that an error is about: its own, else that of the prompt."""
        if isinstance(error, LoRAError):
            # Its params are those of the adapter's own files.
            return "model"
        if isinstance(error, TemplateError) and self.template is not None:
            return self.template
        return self.prompt if error.param is None else self.fields.get(error.param, error.param)

    def said(self, text: str, error: BeheldError) -> str:
        """What an error says of parameters, under the names of the client's fields."""
        if isinstance(error, ParamsError):
            for engines, own in self.fields.items():
                text = re.sub(rf"\b{engines}\b", own, text)
        return text

    def remedy(self, error: BeheldError) -> str:
        """What somebody who can only send requests can do, and what the operator may."""
        if isinstance(error, PlaceholderError):
            # Media come as parts of messages, whose markers nobody has to write.
            return "Send media as parts of messages, to /v1/chat/completions, and no markers in a prompt."
        if isinstance(error, TemplateError) and self.template is not None:
            return "Send another template, or other messages."
        remedy = self.said(error.remedy, error)
        if error.or_engine:
            return f"{remedy} The operator may {error.or_engine}.".strip()
        if remedy:
            return remedy
        if error.item is not None and isinstance(error, MediaError):
            modality = error.item.split()[0]
            return f"Send another {'sound' if modality == 'audio' else modality}."
        return "Send another value, or leave it out." if error.param else "Send another request."


NO_NAMES = FieldNames()


def field_names_of(body: BaseModel) -> FieldNames:
    """How a checked body says things."""
    if isinstance(body, Sampled):
        fields = _grammar(body) | {"lora_request": "model"}
        if isinstance(body, ChatRequest):
            fields["logprobs"] = "top_logprobs"
            if body.max_tokens is None:
                fields["max_tokens"] = "max_completion_tokens"
            return FieldNames("messages", None if body.chat_template is None else "chat_template", fields)
        return FieldNames("prompt", fields=fields | {"prompt_token_ids": "prompt"})
    if isinstance(body, DetokenizeRequest):
        return FieldNames("tokens")
    if isinstance(body, TokenizeRequest | EmbeddingRequest) and body.messages is not None:
        return FieldNames("messages")
    return FieldNames("input" if isinstance(body, EmbeddingRequest) else "prompt")


def _grammar(body: Sampled) -> dict[str, str]:
    """A grammar under the name of the field that asked for it."""
    if body.structured_outputs is not None:
        return {}
    form = body.response_format
    return {"structured_outputs": "tools" if form is None or form.type == "text" else "response_format"}
