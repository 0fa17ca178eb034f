"""Requests that can never run are refused when they are added."""

from __future__ import annotations

from beheld.core.config import EngineConfig, ModelInfo, longer_prompts
from beheld.core.errors import CapacityError, LoRAError, PromptError, PromptTooLongError
from beheld.core.media import item_name
from beheld.core.request import Request
from beheld.core.sampling import Sampling
from beheld.scheduler.atomic_ranges import atomic_ranges, joint_range
from beheld.scheduler.cache.coordinator import CacheCoordinator


def refuse(
    request: Request, config: EngineConfig, info: ModelInfo, cache: CacheCoordinator, max_encoder_tokens: int
) -> None:
    """Raise if the request could not run even alone on the device.

    Raises:
        LoRAError: it has an adapter, and the engine accepts none.
        PromptError: the prompt is empty.
        PromptTooLongError: the prompt leaves no room for an answer, or must be computed in one step and is too long.
        CapacityError: its keys and values, or the embeddings of one item, do not fit.
    """
    length = len(request.token_ids)
    if request.lora is not None and config.max_loras == 0:
        raise LoRAError(
            "This engine takes no LoRA adapters.", param="lora_request", or_engine="start it with enable_lora=True"
        )
    if length == 0:
        raise PromptError("The prompt is empty.")
    longest, answer = config.max_model_len, ""
    if isinstance(request.params, Sampling):
        longest, answer = longest - 1, "with at least one token of answer, "
    if length > longest:
        raise PromptTooLongError(
            f"The prompt has {length} tokens; {answer}max_model_len allows {longest}.",
            "Shorten the prompt, or use smaller or fewer media.",
            or_engine=longer_prompts(config, info),
        )
    if not config.chunked_prefill and length > config.max_num_batched_tokens:
        raise PromptTooLongError(
            f"The prompt has {length} tokens; without chunked prefill a step computes {config.max_num_batched_tokens}.",
            "Shorten it.",
            or_engine="raise max_num_batched_tokens or set enable_chunked_prefill=True",
        )
    joint = joint_range(request, info)
    if request.spans and (not config.chunked_prefill or joint is not None):
        _refuse_media_at_once(request, max_encoder_tokens)
    if joint is not None and joint[1] - joint[0] > config.max_num_batched_tokens:
        raise PromptTooLongError(
            f"From the first of its media to the last there are {joint[1] - joint[0]} tokens, which this model "
            f"computes in one step; a step computes {config.max_num_batched_tokens}.",
            "Send fewer or smaller media.",
            or_engine="raise max_num_batched_tokens",
        )
    if request.spans:
        _refuse_states(request, max_encoder_tokens)
        _refuse_media(request, config, info, max_encoder_tokens)
    if cache.groups:
        _refuse_blocks(request, config, info, cache)


def _refuse_media(request: Request, config: EngineConfig, info: ModelInfo, max_encoder_tokens: int) -> None:
    position = 0
    seen: dict[str, int] = {}
    for span in request.spans:
        assert position <= span.start < span.stop <= len(request.token_ids), "spans are ordered and within the prompt"
        position = span.stop
        item = span.item
        seen[item.modality] = seen.get(item.modality, 0) + 1
        name = item_name(item.modality, seen[item.modality])
        if item.num_embeds > max_encoder_tokens:
            raise CapacityError(
                f"It takes {item.num_embeds} embeddings; the device keeps at most {max_encoder_tokens}.",
                "Make it smaller.",
                item=name,
                or_engine="raise mm_encoder_budget",
            )
        longest = max((high - low for low, high in span.runs()), default=0)
        if info.atomic_spans and longest > config.max_num_batched_tokens:
            raise PromptTooLongError(
                f"It takes {longest} tokens without a gap, which this model computes in one step; a step computes "
                f"{config.max_num_batched_tokens}.",
                "Make it smaller.",
                item=name,
                or_engine="raise max_num_batched_tokens",
            )


def _refuse_states(request: Request, max_encoder_tokens: int) -> None:
    sizes = {span.item.digest: span.item.num_states for span in request.spans}
    if sum(sizes.values()) > max_encoder_tokens:
        raise CapacityError(
            f"Its media take {sum(sizes.values())} states, all of which it needs at once; the device keeps at most "
            f"{max_encoder_tokens}.",
            "Send fewer.",
            or_engine="give the cache more memory (kv_cache_memory_bytes, mm_encoder_budget)",
        )


def _refuse_media_at_once(request: Request, max_encoder_tokens: int) -> None:
    sizes = {span.item.digest: span.item.num_embeds for span in request.spans}
    if sum(sizes.values()) > max_encoder_tokens:
        raise CapacityError(
            f"The media take {sum(sizes.values())} embeddings, all of which one step needs; the device keeps at most "
            f"{max_encoder_tokens}.",
            "Send fewer.",
            or_engine="raise mm_encoder_budget, or set enable_chunked_prefill=True where the model allows it",
        )


def _refuse_blocks(request: Request, config: EngineConfig, info: ModelInfo, cache: CacheCoordinator) -> None:
    length = len(request.token_ids)
    most = cache.most_positions()
    if most is not None and length > most:
        raise CapacityError(
            f"The prompt has {length} tokens; the KV cache holds {most}.",
            "Shorten the prompt.",
            or_engine="give the cache more memory",
        )
    piece = length if not config.chunked_prefill else 1
    for low, high in atomic_ranges(request, info):
        piece = max(piece, high - low)
    params = request.params
    total = length + (params.max_tokens if isinstance(params, Sampling) else 0)
    if not cache.fits(piece, total):
        raise CapacityError(
            f"The KV cache is too small to compute {piece} tokens in one step.",
            "Send less at once.",
            or_engine="give the cache more memory (kv_cache_memory_bytes, num_gpu_blocks_override)",
        )
