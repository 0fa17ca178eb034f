"""Checks a request's limits: modalities, counts, lengths, adapters, priorities."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.config import EngineArgs, EngineConfig, ModelInfo, longer_prompts
from beheld.core.errors import LimitError, LoRAError, MediaError, ParamsError, PromptError, PromptTooLongError
from beheld.core.media import MediaRef, MediaSpan, item_name
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.core.request import LoRARequest
from beheld.core.value_checks import whole
from beheld.families.inputs import FamilyInputs
from beheld.inputs.media import embeds
from beheld.inputs.prompt.chunked_tokenize import REDUCE
from beheld.utils.log import get_logger, once

logger = get_logger(__name__)
NO_PRIORITY = "A priority has no effect with scheduling_policy='fcfs'; the engine can be started with 'priority'."


@dataclass(frozen=True, eq=False)
class RequestChecks:
    """The limits of one engine on requests."""

    info: ModelInfo
    config: EngineConfig
    args: EngineArgs
    family: FamilyInputs

    def embeddings(self, data: Any) -> None:
        """Refuse a prompt's `multi_modal_data` with embeddings, before they are looked at, if the engine takes none.

        Raises:
            MediaError: it does.
        """
        values = data.values() if isinstance(data, Mapping) else ()
        for value in values:
            if embeds.given(value) or (isinstance(value, list | tuple) and any(map(embeds.given, value))):
                self._embeddings(None)

    def _embeddings(self, place: str | None) -> None:
        if not self.args.enable_mm_embeds:
            raise MediaError(
                "Embeddings are disabled (enable_mm_embeds=False).",
                "Send the media.",
                param=place or "enable_mm_embeds",
                or_engine="start with --enable-mm-embeds, which is on unless it is said otherwise",
            )

    def modalities(self, media: Sequence[MediaRef]) -> None:
        """Refuse media that the model does not accept, or that are too many.

        Raises:
            PromptError, MediaError, LimitError: they are refused.
        """
        embedded = [ref for ref in media if embeds.given(ref.source)]
        for ref in embedded[:1]:
            self._embeddings(ref.place)
            if self.info.cross is not None:
                raise MediaError(
                    f"{self.info.architecture} has no media embeddings in its text: its layers cross-attend to media.",
                    "Send the media.",
                    param=ref.place,
                )
        for ref in embedded:
            if isinstance(reason := self.family.embedded.get(ref.modality), str):
                raise MediaError(
                    f"{self.info.architecture} does not accept embeddings of {ref.modality}: "
                    f"{reason.format(modality=ref.modality)}.",
                    f"Send the {ref.modality} itself.",
                    param=ref.place,
                )
        for modality in {ref.modality: None for ref in media}:
            self._count(modality, [ref for ref in media if ref.modality == modality])

    def embedded_prompt(self, params: SamplingParams | PoolingParams) -> None:
        """Refuse a prompt of embeddings if the engine takes none, and what only ids could answer.

        Raises:
            PromptError, ParamsError: it is refused.
        """
        if not self.config.prompt_embeds:
            raise PromptError(
                "Prompts of embeddings are disabled.",
                "Send text or token ids.",
                param="prompt_embeds",
                or_engine="start it with enable_prompt_embeds=True, with a model of text",
            )
        for name in ("prompt_logprobs", "prompt_logprob_token_ids", "truncate_prompt_tokens"):
            if getattr(params, name, None) is not None:
                raise ParamsError(f"A prompt of embeddings has no ids for {name}.", "Leave it out.", param=name)

    def _count(self, modality: str, given: Sequence[MediaRef]) -> None:
        """Refuse a modality that the model does not accept, or the first item beyond its limit."""
        if modality not in self.info.modalities:
            takes = " and ".join(self.info.modalities) or "text input only"
            raise PromptError(
                f"This model does not accept {modality}; it takes {takes}.", "Leave it out.", param=given[0].place
            )
        count, limit = len(given), self.config.limit_per_prompt.get(modality, 0)
        if count > limit:
            allowed = f"At most {limit} {modality}(s) may be provided in one prompt"
            off = f"The modality {modality} is switched off (limit_mm_per_prompt is 0, or language_model_only is set)"
            many = f"There are {count} {modality} items; limit_mm_per_prompt allows {limit}"
            raise LimitError(
                f"{many if limit else off}. {allowed}.",
                "Send fewer." if limit else "Leave it out.",
                param=given[limit].place or "limit_mm_per_prompt",
                or_engine="raise limit_mm_per_prompt",
            )
        most = self.family.most.get(modality, count)
        if count > most:
            raise PromptError(
                f"The prompt has {count} {modality} items; this model accepts at most {most}.",
                "Ask about each of them in a separate prompt.",
                param=given[most].place,
            )

    def order(self, lora: LoRARequest | None, priority: int) -> None:
        """Refuse an adapter that would have no effect; tell once of a priority that has none.

        Raises:
            LoRAError, ParamsError: it is refused.
        """
        if lora is not None and not isinstance(lora, LoRARequest):
            raise LoRAError(
                f"lora_request must be a LoRARequest, not {type(lora).__name__}.",
                "Write LoRARequest(name, number, folder).",
                param="lora_request",
            )
        if lora is not None and not self.config.max_loras:
            raise LoRAError(
                "This engine does not accept LoRA adapters.",
                param="lora_request",
                or_engine="start it with enable_lora=True",
            )
        whole("priority", priority, -(2**63), 2**63 - 1)
        if priority != 0 and self.config.policy != "priority":
            once(logger, logging.WARNING, NO_PRIORITY)

    def grounding(self, media: Sequence[MediaRef]) -> None:
        """Refuse to give the places that an answer names, if it is not known how they are written or what they mean.

        Raises:
            ParamsError: the model has no notation, or it is not clear which image an answer would mean.
        """
        rules = self.info.grounding
        if rules is None:
            raise ParamsError(
                f"{self.info.architecture} ({self.info.name}) has no known notation for places in images.",
                "Leave grounding out, or ask a model that points, such as Qwen3-VL.",
                param="grounding",
            )
        if self.args.skip_tokenizer_init:
            raise ParamsError("Places are read in the answer's text, and there is no tokenizer.", param="grounding")
        images = [ref for ref in media if ref.modality == "image"]
        if not images:
            raise ParamsError("The request holds no image to point at.", "Send one.", param="grounding")
        if len(media) > len(images) or (len(images) > 1 and not rules.names_images):
            raise ParamsError(
                f"The request holds {len(media)} media items, and {self.info.architecture} does not write which of "
                "them it points at.",
                "Send one image in each request with grounding.",
                param="grounding",
            )

    def answers(self, params: SamplingParams | PoolingParams) -> None:
        """Refuse to generate with a model that pools, and to pool with one that generates.

        Raises:
            ParamsError: it is refused.
        """
        pools = isinstance(params, PoolingParams)
        if pools and self.info.pooler is None:
            raise ParamsError(
                f"{self.info.name!r} generates text here and gives neither vectors nor scores.",
                "Use generate or chat.",
                param="model",
                or_engine="start it with runner='pooling'",
            )
        if not pools and self.info.pooler is not None:
            known = " or ".join(repr(task) for task in self.info.pooler.tasks)
            raise ParamsError(
                f"{self.info.name!r} is a pooling model here (task {known}) and generates no text.",
                "Use embed, encode, classify or score.",
                param="model",
                or_engine="start it with runner='generate', if its checkpoint can generate",
            )

    def length(self, token_ids: Sequence[int], spans: Sequence[MediaSpan], media: Sequence[MediaRef]) -> None:
        """Refuse a prompt that is empty or too long. `media` are the spans' items, in the given order.

        Raises:
            PromptError, PromptTooLongError, LimitError: it is refused.
        """
        if not token_ids:
            raise PromptError("The prompt is empty.", "Send at least one token.")
        count, limit = len(token_ids), self.config.max_model_len
        answer = 1 if self.info.pooler is None else 0
        if count + answer > limit:
            taken = sum(span.stop - span.start for span in spans)
            of_media = f", {taken} of them for media" if taken else ""
            sparse = self.info.sparse_reach is not None and limit == self.info.max_model_len
            why = ", of which its indexer picks all (attention to a choice of more cannot be run yet)" if sparse else ""
            raise PromptTooLongError(
                # Clients look for the first words.
                f"This model's maximum context length is {limit} tokens{why}; the prompt has {count} tokens{of_media}"
                f"{', and the answer needs at least one' if answer else ''}.",
                "Send fewer or smaller items." if taken * 2 > count else REDUCE,
                or_engine=longer_prompts(self.config, self.info),
            )
        seen: dict[str, int] = {}
        for span in spans:
            modality, kept = span.item.modality, span.item.num_kept
            seen[modality] = seen.get(modality, 0) + 1
            if kept > self.config.max_encoder_tokens:
                own = [ref.place for ref in media if ref.modality == modality]
                raise LimitError(
                    f"It has {kept} embeddings; the engine keeps at most {self.config.max_encoder_tokens}.",
                    "Send a smaller one.",
                    item=item_name(modality, seen[modality]),
                    param=own[seen[modality] - 1] if own else None,
                    or_engine="raise mm_encoder_budget",
                )
