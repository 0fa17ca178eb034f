"""The client's names of the fields that errors mention."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from beheld.core.errors import BeheldError, LoRAError, MediaError, ParamsError, PlaceholderError, TemplateError
from beheld.server.embed_schema import EmbedRequest
from beheld.server.generate_schema import GenerateParams, GenerateRequest, GenerativeScoringRequest
from beheld.server.pooling_schema import ClassifyRequest, RerankRequest, ScoreRequest
from beheld.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Sampled, TokenizeRequest


@dataclass(frozen=True)
class FieldNames:
    """The field names of one request body.

    Attributes:
        prompt: the field with the prompt.
        template: the field with a template, if the client sent one.
        fields: the engine's name of a field -> the client's.
        places: for each chat message that was made of a request of another API, the path of what it was made of, and
            those of its content parts.
    """

    prompt: str | None = None
    template: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    places: Sequence[tuple[str, Sequence[str]]] = ()

    def param(self, error: BeheldError) -> str | None:
        """The field at fault: the error's own, else that of the prompt."""
        if isinstance(error, LoRAError):
            # Its `param` names a field of the adapter's files.
            return "model"
        if isinstance(error, TemplateError) and self.template is not None:
            return self.template
        return self.prompt if error.param is None else self.placed(self.fields.get(error.param, error.param))

    def placed(self, param: str | None) -> str | None:
        """A path into the chat messages as one into the client's own; others as they are."""
        path = (param or "").split(".")
        if not self.places or len(path) < 2 or path[0] != "messages" or not path[1].isdigit():
            return param
        if int(path[1]) >= len(self.places):
            return self.prompt
        whole, parts = self.places[int(path[1])]
        inside = path[2:3] == ["content"] and len(path) > 3 and path[3].isdigit() and int(path[3]) < len(parts)
        return parts[int(path[3])] if inside else whole

    def translated(self, text: str, error: BeheldError) -> str:
        """An error's text with the client's field names."""
        if isinstance(error, ParamsError):
            for engines, own in self.fields.items():
                text = re.sub(rf"\b{engines}\b", own, text)
        return text

    def remedy(self, error: BeheldError) -> str:
        """What the client can do, and what the operator can do."""
        if isinstance(error, PlaceholderError):
            # In chat requests media are message parts, and the template writes their placeholders.
            return "Send media as parts of messages, to /v1/chat/completions, and no placeholders in a prompt."
        if isinstance(error, TemplateError) and self.template is not None:
            return "Send another template, or other messages."
        remedy = self.translated(error.remedy, error)
        if error.or_engine:
            return f"{remedy} The operator may {error.or_engine}.".strip()
        if remedy:
            return remedy
        if error.item is not None and isinstance(error, MediaError):
            modality = error.item.split()[0]
            return f"Send another {'audio clip' if modality == 'audio' else modality}."
        return "Send another value, or leave it out." if error.param else "Send another request."


NO_NAMES = FieldNames()


def field_names_of(body: BaseModel) -> FieldNames:
    """The field names of a checked body."""
    if isinstance(body, Sampled):
        fields = _grammar(body) | {"extra_args": "vllm_xargs", "lora_request": "model", "beam_width": "n"}
        if isinstance(body, ChatRequest):
            fields["logprobs"] = "top_logprobs"
            if body.max_tokens is None:
                fields["max_tokens"] = "max_completion_tokens"
            return FieldNames("messages", None if body.chat_template is None else "chat_template", fields)
        if isinstance(body, CompletionRequest) and body.max_completion_tokens is not None:
            fields["max_tokens"] = "max_completion_tokens"
        return FieldNames("prompt", fields=fields | {"prompt_token_ids": "prompt"})
    if isinstance(body, GenerateRequest):
        return FieldNames("token_ids", fields=_of_params())
    if isinstance(body, GenerativeScoringRequest):
        return FieldNames("items", fields={"logprob_token_ids": "label_token_ids", "prompt_token_ids": "items"})
    if isinstance(body, DetokenizeRequest):
        return FieldNames("tokens")
    if isinstance(body, TokenizeRequest | ClassifyRequest) and body.messages is not None:
        return FieldNames("messages", _template(body))
    if isinstance(body, EmbedRequest):
        given = next((name for name in ("images", "inputs") if getattr(body, name) is not None), "texts")
        return FieldNames(given, fields={"dimensions": "output_dimension"})
    if isinstance(body, RerankRequest):
        return FieldNames("documents", fields={"data_1": "query"})
    if isinstance(body, ScoreRequest):
        return FieldNames(next((name for name in _PAIRS if getattr(body, name) is not None), "text_2"))
    if isinstance(body, ClassifyRequest):
        return FieldNames("input", fields={"prompt_token_ids": "input"})
    return FieldNames("prompt")


def _of_params() -> dict[str, str]:
    """The parameters of an object of their own."""
    return {
        **{name: f"sampling_params.{name}" for name in GenerateParams.model_fields},
        **dict.fromkeys(("prompt", "prompt_token_ids"), "token_ids"),
        "lora_request": "model",
    }


# Names of the second side of a pair.
_PAIRS = ("text_2", "data_2", "documents")


def _template(body: BaseModel) -> str | None:
    return None if getattr(body, "chat_template", None) is None else "chat_template"


def _grammar(body: Sampled) -> dict[str, str]:
    """Maps the grammar to the field that requested it."""
    if body.structured_outputs is not None:
        return {}
    form = body.response_format
    return {"structured_outputs": "tools" if form is None or form.type == "text" else "response_format"}
