"""What a request must keep within: modalities, counts, lengths, adapters, priorities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.errors import LimitError, LoRAError, MediaError, ParamsError, PromptError, PromptTooLongError
from beheld.core.media import MediaRef, MediaSpan
from beheld.core.params import whole
from beheld.core.request import LoRARequest
from beheld.inputs import embeds
from beheld.inputs.families import Family


@dataclass(frozen=True, eq=False)
class Checks:
    """The bounds of one engine on requests."""

    info: ModelInfo
    config: EngineConfig
    args: EngineArgs
    family: Family

    def modalities(self, media: Sequence[MediaRef]) -> None:
        """Refuse media that the model does not take, or that are too many.

        Raises:
            PromptError, MediaError, LimitError: see there.
        """
        if any(embeds.given(ref.source) for ref in media):
            if not self.args.enable_mm_embeds:
                raise MediaError(
                    "Embeddings are switched off (enable_mm_embeds=False).", "Give the media.", param="enable_mm_embeds"
                )
            if self.info.cross is not None:
                raise MediaError(
                    f"{self.info.architecture} has no embeddings in its text: it attends to media beside it.",
                    "Give the media.",
                )
        for modality in {ref.modality: None for ref in media if embeds.given(ref.source)}:
            if isinstance(reason := self.family.embedded.get(modality), str):
                raise MediaError(
                    f"Embeddings of {modality} cannot be given to {self.info.architecture}: "
                    f"{reason.format(modality=modality)}.",
                    f"Give the {modality} itself.",
                )
        for modality in {ref.modality: None for ref in media}:
            if modality not in self.info.modalities:
                takes = " and ".join(self.info.modalities) or "text only"
                raise PromptError(f"This model does not take {modality}; it takes {takes}.")
            count = sum(ref.modality == modality for ref in media)
            limit = self.config.limit_per_prompt.get(modality, 0)
            if count > limit:
                off = f"The modality {modality} is switched off (limit_mm_per_prompt is 0)."
                many = f"There are {count} {modality} items; limit_mm_per_prompt allows {limit}."
                raise LimitError(
                    off if limit == 0 else many, "Raise the limit, or send fewer.", param="limit_mm_per_prompt"
                )
            most = self.family.most.get(modality, count)
            if count > most:
                raise PromptError(
                    f"There are {count} {modality} items; this model takes at most {most} in a prompt.",
                    "Ask about each of them in a prompt of its own.",
                )

    def order(self, lora: LoRARequest | None, priority: int) -> None:
        """Refuse an adapter or a priority that would change nothing.

        Raises:
            LoRAError, ParamsError: see there.
        """
        if lora is not None and not isinstance(lora, LoRARequest):
            raise LoRAError(
                f"lora_request must be a LoRARequest, not {type(lora).__name__}.",
                "Write LoRARequest(name, number, folder).",
                param="lora_request",
            )
        if lora is not None and not self.config.max_loras:
            raise LoRAError(
                "This engine takes no LoRA adapters.", "Start it with enable_lora=True.", param="lora_request"
            )
        whole("priority", priority, -(2**63), 2**63 - 1)
        if priority != 0 and self.config.policy != "priority":
            raise ParamsError(
                "A priority means nothing with scheduling_policy='fcfs'.",
                "Start the engine with scheduling_policy='priority'.",
                param="priority",
            )

    def length(self, token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> None:
        """Refuse what is empty or too long.

        Raises:
            PromptError, PromptTooLongError, LimitError: see there.
        """
        if not token_ids:
            raise PromptError("The prompt is empty.", "Give at least one token.")
        count, limit = len(token_ids), self.config.max_model_len
        if count >= limit:
            media = sum(span.stop - span.start for span in spans)
            remedy = "Shorten it, or raise max_model_len."
            if media * 2 > count:
                remedy = "Send fewer or smaller items (mm_processor_kwargs), or raise max_model_len."
            of_media = f", {media} of them for media" if media else ""
            raise PromptTooLongError(
                f"The prompt has {count} tokens{of_media}; with at least one for the answer the limit is {limit}.",
                remedy,
            )
        for span in spans:
            if span.item.num_kept > self.config.max_encoder_tokens:
                raise LimitError(
                    f"The {span.item.modality} takes {span.item.num_kept} embeddings; "
                    f"the engine keeps at most {self.config.max_encoder_tokens}.",
                    "Send a smaller one, or raise mm_encoder_budget.",
                )
