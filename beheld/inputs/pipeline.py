"""The input pipeline: prompts, messages and media become sealed requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from beheld.checkpoint.resolve import read_json
from beheld.core.config import EngineArgs, EngineConfig, MediaLimits, ModelInfo
from beheld.core.errors import (
    LimitError,
    LoRAError,
    MediaError,
    ParamsError,
    PromptError,
    PromptTooLongError,
    TemplateError,
)
from beheld.core.media import MediaItem, MediaReceipt, MediaRef, MediaSpan
from beheld.core.params import Sampling, SamplingParams, whole
from beheld.core.request import LoRARequest, Request
from beheld.inputs import chat, control, embeds, encoder_prompt, expand, told
from beheld.inputs.cache import CacheStats, MediaCache
from beheld.inputs.families import family_of
from beheld.inputs.fetch import FetchRules
from beheld.inputs.media import ItemMaker, Prepared, Task, indexed, merge_size
from beheld.inputs.options import merged
from beheld.inputs.processor import ItemProcessor
from beheld.inputs.prompt import ParsedPrompt, PromptType, parse
from beheld.inputs.seal import Sealer, recommended
from beheld.inputs.template import ChatTemplates
from beheld.inputs.tokens import PromptTokenizer, load_tokenizer
from beheld.inputs.workers import Workers
from beheld.structured.compile import Compiler

__all__ = ["InputPipeline", "PromptType"]

ItemsByModality = Mapping[str, Sequence[MediaItem]]


class InputPipeline:
    """Everything between what the user says and what the engine takes. Safe to use from several threads.

    The tokenizer is loaded at once, the processor with the first item.

    Args:
        info: what the checkpoint says.
        config: what was decided.
        args: what the user said.

    Raises:
        ModelError: the tokenizer cannot be loaded.
        ConfigError, ParamsError, TemplateError: an option of the pipeline is wrong.
    """

    def __init__(self, info: ModelInfo, config: EngineConfig, args: EngineArgs) -> None:
        told.check(args)
        self._info = info
        self._config = config
        self._args = args
        self._family = family_of(info)
        self._tokenizer = PromptTokenizer(
            None if args.skip_tokenizer_init else load_tokenizer(info, args), info.placeholder_ids, self._family.places
        )
        self._templates = ChatTemplates.of(self._tokenizer.inner, info, config, args, self._family.template)
        if args.chat_template:
            # A wrong one is told of now, not with the first conversation.
            self._templates.resolve(args.chat_template, None)
        self._sealer = Sealer(info, config, args, self._tokenizer.inner)
        self._processor = ItemProcessor(info, args, self._family, self._tokenizer, config.dtype)
        told.check_processor(args.mm_processor_kwargs, info, self._processor)
        self._cache = MediaCache(config.processor_cache_bytes)
        self._limits = MediaLimits()
        self._rules = FetchRules.of(args.allowed_local_media_path, args.allowed_media_domains, self._limits)
        self._workers = Workers.of(info, config, args, self._limits)
        self._maker = ItemMaker(
            info,
            self._processor,
            self._family,
            self._cache,
            self._rules,
            self._workers,
            args.media_io_kwargs or {},
            strict=args.strict_media,
        )
        self._merge_size = merge_size(info)

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer; None with skip_tokenizer_init."""
        return self._tokenizer.inner

    @property
    def compiler(self) -> Compiler:
        """Compiles grammars for this tokenizer."""
        return self._sealer.compiler

    def cache_stats(self) -> CacheStats:
        """Counters of the processed-media cache."""
        return self._cache.stats()

    def clear_cache(self) -> None:
        """Forget all processed media."""
        self._cache.clear()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The numbers of the processes that open media."""
        return self._workers.pids

    def close(self) -> None:
        """End the workers."""
        self._workers.close()
        self._sealer.close()
        self._templates.close()

    def default_params(self) -> SamplingParams:
        """The parameters that the checkpoint's generation_config.json recommends."""
        return recommended(read_json(Path(self._info.path) / "generation_config.json"), self._args)

    def seal(self, params: SamplingParams, num_prompt: int, seed: int) -> Sampling:
        """Sealed sampling parameters; see Sealer.seal."""
        return self._sealer.seal(params, num_prompt, seed)

    # ------------------------------------------------------------------ prompts

    def prepare(
        self,
        prompt: PromptType,
        params: SamplingParams,
        *,
        request_id: str,
        lora: LoRARequest | None = None,
        priority: int = 0,
        arrival: float = 0.0,
        seed: int = 0,
    ) -> Request:
        """A request from a prompt with its media. The prompt's text is trusted: markers in it are markers.

        Raises:
            UserError: the prompt, an item or a parameter is at fault; the message says what to do.
        """
        parsed = parse(prompt, self._info, self._merge_size)
        self._check_modalities(parsed.media)
        counts = _count(parsed.media)
        self._check_text(parsed.text, params)
        encode = self._encoder_of(parsed.text, counts) if parsed.text is not None else None
        ids: Sequence[int] = encode({}) if encode is not None else parsed.token_ids or ()
        ids = self._truncated(ids, params, parsed.media)
        self._check_markers(ids, counts)
        items, receipts = self._items(ids, parsed)
        if expand.has_edges(items):
            if encode is not None:
                ids = encode(items)
            else:
                plain = partial(self._tokenizer.encode, add_special_tokens=False)
                ids = expand.edged_ids(ids, items, self._tokenizer.marks, plain)
        return self._request(
            ids,
            items,
            receipts,
            params,
            request_id=request_id,
            prompt=parsed.text,
            lora=lora,
            salt=parsed.salt,
            priority=priority,
            arrival=arrival,
            seed=seed,
        )

    def _encoder_of(self, text: str, counts: Mapping[str, int]) -> Callable[[ItemsByModality], list[int]]:
        """How a trusted text is encoded once its items' own text stands around their markers."""
        ends = True
        if self._family.rewrite is not None:
            written = self._family.rewrite(text, counts)
            if not isinstance(written, str):
                # Items of these families have no text of their own around them.
                ids = self._tokenizer.encode_pieces(written)
                return lambda items: ids
            text = written
            ends = self._family.rewritten_ends == "added"
        text = self._family.begun(text, self._tokenizer.inner)

        def encode(items: ItemsByModality) -> list[int]:
            edged = expand.edged_text(text, items, self._tokenizer.marker) if items else text
            return self._tokenizer.encode(edged, add_special_tokens=ends)

        return encode

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        request_id: str,
        chat_template: str | None = None,
        content_format: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        lora: LoRARequest | None = None,
        priority: int = 0,
        arrival: float = 0.0,
        seed: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """A request from OpenAI messages. Text in them is text, whatever it spells: see control.py.

        Raises:
            UserError: a message, an item, the template or a parameter is at fault; the message says what to do.
        """
        if continue_final_message and add_generation_prompt:
            raise PromptError(
                "continue_final_message and add_generation_prompt exclude each other.",
                "Set add_generation_prompt=False to continue the last message.",
                param="continue_final_message",
            )
        encode, media, text = self._render(
            messages,
            chat_template or self._args.chat_template,
            content_format or self._args.chat_template_content_format,
            tools,
            template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        salt = b"" if cache_salt is None else cache_salt.encode()
        parsed = ParsedPrompt(text, None, media, dict(mm_processor_kwargs or {}), salt)
        self._check_text(text, params)
        ids = self._truncated(encode({}), params, media)
        self._check_rendered(ids, media)
        items, receipts = self._items(ids, parsed)
        if expand.has_edges(items):
            ids = encode(items)
        return self._request(
            ids,
            items,
            receipts,
            params,
            request_id=request_id,
            prompt=text,
            lora=lora,
            salt=salt,
            priority=priority,
            arrival=arrival,
            seed=seed,
        )

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        given_template: str | None,
        content_format: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> tuple[Callable[[ItemsByModality], list[int]], tuple[MediaRef, ...], str]:
        """How the rendered conversation is encoded, its media, and its text."""
        marks = self._tokenizer.control()
        template = self._templates.resolve(given_template, tools)
        as_list = self._templates.takes_list(template, content_format)
        form = chat.ChatForm(as_list, self._templates.forms(template)[1] or not as_list, self._example)
        talk = chat.read(messages, form, marks, self._limits)
        self._check_modalities(talk.media)
        rendered = self._templates.render(
            talk.messages,
            template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=chat.sanitized(tools, marks, talk.stand_ins) if tools else None,
            variables=chat.sanitized(variables, marks, talk.stand_ins) if variables else None,
        )
        rendered = self._family.begun(rendered, self._tokenizer.inner)
        # A processor adds the tokenizer's own ends unless the template wrote the first of them; a bare tokenizer never
        # does.
        bos = getattr(self._tokenizer.inner, "bos_token", None)
        ends = bool(self._info.modalities) and not (bos and rendered.startswith(bos))
        encode = partial(self._encode_rendered, rendered, talk.stand_ins, ends)
        return encode, talk.media, talk.stand_ins.restore(rendered)

    def _encode_rendered(
        self, rendered: str, stand_ins: control.StandIns, ends: bool, items: ItemsByModality
    ) -> list[int]:
        if items:
            rendered = expand.edged_text(rendered, items, self._tokenizer.marker)
        marks = self._tokenizer.control()
        if not len(stand_ins):
            whole = self._tokenizer.encode(rendered, add_special_tokens=ends)
            if not control.smuggled(whole, rendered, marks, self._tokenizer.ends() if ends else ((), ())):
                return whole
        ids = control.encode_rendered(
            rendered,
            stand_ins,
            marks,
            self._tokenizer.plain(),
            lambda text: self._tokenizer.encode(text, add_special_tokens=False),
        )
        if ends:
            before, after = self._tokenizer.ends()
            ids = [*before, *ids, *after]
        return ids

    def _example(self, modality: str) -> str:
        """How an item is written in a prompt of this family."""
        return self._family.markers.get(modality) or self._tokenizer.marker(modality)

    # ------------------------------------------------------------------ checks

    def _check_modalities(self, media: Sequence[MediaRef]) -> None:
        if any(embeds.given(ref.source) for ref in media):
            if not self._args.enable_mm_embeds:
                raise MediaError(
                    "Embeddings are switched off (enable_mm_embeds=False).", "Give the media.", param="enable_mm_embeds"
                )
            if self._info.cross is not None:
                raise MediaError(
                    f"{self._info.architecture} has no embeddings in its text: it attends to media beside it.",
                    "Give the media.",
                )
        for modality in {ref.modality: None for ref in media}:
            if modality not in self._info.modalities:
                takes = " and ".join(self._info.modalities) or "text only"
                raise PromptError(f"The model {self._info.name!r} does not take {modality}; it takes {takes}.")
            count = sum(ref.modality == modality for ref in media)
            limit = self._config.limit_per_prompt.get(modality, 0)
            if count > limit:
                off = f"The modality {modality} is switched off (limit_mm_per_prompt is 0)."
                many = f"There are {count} {modality} items; limit_mm_per_prompt allows {limit}."
                raise LimitError(
                    off if limit == 0 else many, "Raise the limit, or send fewer.", param="limit_mm_per_prompt"
                )
            most = self._family.most.get(modality, count)
            if count > most:
                raise PromptError(
                    f"There are {count} {modality} items; {self._info.name!r} takes at most {most} in a prompt.",
                    "Ask about each of them in a prompt of its own.",
                )

    def _check_markers(self, ids: Sequence[int], given: Mapping[str, int]) -> None:
        found = expand.count_markers(ids, self._tokenizer.marks)
        expand.check_counts(found, given, self._tokenizer.marker, self._example)

    def _check_rendered(self, ids: Sequence[int], media: Sequence[MediaRef]) -> None:
        """The template must write one marker per item, and no other way leads to one."""
        found, given = expand.count_markers(ids, self._tokenizer.marks), _count(media)
        for modality in set(found) | set(given):
            written, items = found.get(modality, 0), given.get(modality, 0)
            if written != items:
                raise TemplateError(
                    f"The chat template wrote {written} markers for {items} {modality} items.",
                    "Give a chat_template that writes one per item, or another chat_template_content_format.",
                )

    def _check_text(self, text: str | None, params: SamplingParams) -> None:
        if text is not None and params.truncate_prompt_tokens is None:
            self._tokenizer.check_size(text, self._config.max_model_len)

    def _truncated(self, ids: Sequence[int], params: SamplingParams, media: Sequence[MediaRef]) -> Sequence[int]:
        keep = params.truncate_prompt_tokens
        if keep is None or keep >= len(ids):
            return ids
        if media:
            raise ParamsError("truncate_prompt_tokens cannot cut a prompt with media.", param="truncate_prompt_tokens")
        return ids[len(ids) - keep :]

    # ------------------------------------------------------------------ items

    def _items(
        self, ids: Sequence[int], parsed: ParsedPrompt
    ) -> tuple[dict[str, list[MediaItem]], tuple[MediaReceipt, ...]]:
        """The items of a request by modality, and their receipts in the order of the prompt."""
        if not parsed.media:
            return {}, ()
        made = self._prepare_all(parsed.media, parsed.options)
        queues: dict[str, list[Prepared]] = {}
        for ref, prepared in zip(parsed.media, made, strict=True):
            queues.setdefault(ref.modality, []).append(prepared)
        items = {modality: [p.item for p in own] for modality, own in queues.items()}
        waiting = {self._tokenizer.marks[modality]: iter(own) for modality, own in queues.items()}
        in_order = [next(waiting[token]) for token in ids if token in waiting]
        return items, tuple(indexed(prepared, index) for index, prepared in enumerate(in_order))

    def _prepare_all(self, media: Sequence[MediaRef], options: Mapping[str, Any]) -> list[Prepared]:
        totals = _count(media)
        seen: dict[str, int] = {}
        tasks = []
        for ref in media:
            seen[ref.modality] = seen.get(ref.modality, 0) + 1
            tasks.append(
                Task(
                    ref,
                    f"{ref.modality} {seen[ref.modality]}",
                    merged(self._args.mm_processor_kwargs, options, ref.options),
                    self._family.setting(ref.modality, seen[ref.modality], totals),
                )
            )
        return self._workers.map(self._maker.make, tasks)

    def count(self, media: Sequence[MediaRef]) -> list[MediaReceipt]:
        """What the model would see of these media, and the tokens each would take, in one prompt with all of them.

        Raises:
            UserError: an item is at fault.
        """
        self._check_modalities(media)
        return [indexed(prepared, index) for index, prepared in enumerate(self._prepare_all(media, {}))]

    # ------------------------------------------------------------------ sealing

    def _request(
        self,
        ids: Sequence[int],
        items: Mapping[str, Sequence[MediaItem]],
        receipts: tuple[MediaReceipt, ...],
        params: SamplingParams,
        *,
        request_id: str,
        prompt: str | None,
        lora: LoRARequest | None,
        salt: bytes,
        priority: int,
        arrival: float,
        seed: int,
    ) -> Request:
        self._check_order(lora, priority)
        if not items and not self._info.is_encoder_decoder:
            # Before anything is made of what is too long.
            self._check_length(ids, ())
        token_ids, spans = expand.expand(ids, items, self._tokenizer.marks)
        if self._info.is_encoder_decoder:
            token_ids, spans = encoder_prompt.fold(token_ids, spans, self._info)
        self._check_length(token_ids, spans)
        return Request(
            id=request_id,
            token_ids=token_ids,
            params=self.seal(params, len(token_ids), seed),
            spans=spans,
            lora=lora or self._config.media_lora(items),
            salt=salt,
            priority=priority,
            arrival=arrival,
            receipts=receipts,
            prompt=prompt,
        )

    def _check_order(self, lora: LoRARequest | None, priority: int) -> None:
        """Refuse an adapter or a priority that would change nothing."""
        if lora is not None and not isinstance(lora, LoRARequest):
            raise LoRAError(
                f"lora_request must be a LoRARequest, not {type(lora).__name__}.",
                "Write LoRARequest(name, number, folder).",
                param="lora_request",
            )
        if lora is not None and not self._config.max_loras:
            raise LoRAError(
                "This engine takes no LoRA adapters.", "Start it with enable_lora=True.", param="lora_request"
            )
        whole("priority", priority, -(2**63), 2**63 - 1)
        if priority != 0 and self._config.policy != "priority":
            raise ParamsError(
                "A priority means nothing with scheduling_policy='fcfs'.",
                "Start the engine with scheduling_policy='priority'.",
                param="priority",
            )

    def _check_length(self, token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> None:
        if not token_ids:
            raise PromptError("The prompt is empty.", "Give at least one token.")
        count, limit = len(token_ids), self._config.max_model_len
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
            if span.item.num_kept > self._config.max_encoder_tokens:
                raise LimitError(
                    f"The {span.item.modality} takes {span.item.num_kept} embeddings; "
                    f"the engine keeps at most {self._config.max_encoder_tokens}.",
                    "Send a smaller one, or raise mm_encoder_budget.",
                )


def _count(media: Sequence[MediaRef]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for ref in media:
        counts[ref.modality] = counts.get(ref.modality, 0) + 1
    return counts
