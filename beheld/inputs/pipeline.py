"""The input pipeline: prompts, messages and media become sealed requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.core.config import EngineArgs, EngineConfig, MediaLimits, ModelInfo
from beheld.core.errors import ParamsError, PromptError, TemplateError
from beheld.core.media import MediaItem, MediaReceipt, MediaRef
from beheld.core.params import Sampling, SamplingParams, Thoughts
from beheld.core.request import Request
from beheld.families import registry
from beheld.inputs.draft import Draft, ItemsByModality, Made, Order
from beheld.inputs.fetch.fetch import FetchRules
from beheld.inputs.fetch.fetcher import Fetcher
from beheld.inputs.media.cache import CacheStats, MediaCache
from beheld.inputs.media.item_maker import ItemMaker, Prepared, Task, merge_size
from beheld.inputs.media.processor import ItemProcessor
from beheld.inputs.media.processor_options import merged
from beheld.inputs.media.workers import Workers
from beheld.inputs.prompt import chat, encoder_prompt, expand, special_tokens
from beheld.inputs.prompt.parse import ParsedPrompt, PromptType, parse, processor_options
from beheld.inputs.prompt.template import ChatTemplates, text_of
from beheld.inputs.prompt.tokenizer import SHORT_TEXT, PromptTokenizer, load_tokenizer
from beheld.inputs.request_checks import Checks
from beheld.inputs.sampling import option_checks
from beheld.inputs.sampling.resolve_sampling import Sealer, recommended
from beheld.structured.compile import Compiler
from beheld.structured.thoughts import after
from beheld.utils.cancellation import Departure
from beheld.utils.gil import in_turn

__all__ = ["InputPipeline", "PromptType"]

# Of a text that is read from its end, the first ids may be others than within the whole.
_SPARE_IDS = 16
# Conversations of fewer letters are rendered, and texts of fewer read as a whole, before their length is checked.
_MANY_LETTERS = 1 << 20


class InputPipeline:
    """Everything between what the user says and what the engine takes. Safe to use from several threads.

    The tokenizer is loaded at once, the processor with the first item.

    Args:
        info: what the checkpoint says.
        config: what was decided.
        args: what the user said.
        workers: that were begun before; None begins them.
        processor: transformers', if it was loaded before.

    Raises:
        ModelError: the tokenizer cannot be loaded.
        ConfigError, ParamsError, TemplateError: an option of the pipeline is wrong.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: EngineConfig,
        args: EngineArgs,
        workers: Workers | None = None,
        processor: Any = None,
    ) -> None:
        option_checks.check(args)
        self._info = info
        self._config = config
        self._args = args
        self._family = registry.inputs(info.family)
        self._tokenizer = PromptTokenizer(
            None if args.skip_tokenizer_init else load_tokenizer(info, args),
            info.placeholder_ids,
            self._family.places,
            self._family.pieces,
        )
        self._templates = ChatTemplates.of(self._tokenizer.inner, info, config, args, self._family.template_text)
        # Read once: what becomes of the file later concerns no request.
        self._template = text_of(args.chat_template) if args.chat_template else None
        self._sealer = Sealer(info, config, args, self._tokenizer.inner)
        self._processor = ItemProcessor(info, args, self._family, self._tokenizer, config.dtype, processor)
        option_checks.check_processor(args.mm_processor_kwargs, info, self._processor)
        self._cache = MediaCache(config.processor_cache_bytes)
        self._limits = MediaLimits.of(args.media_limits)
        self._rules = FetchRules.of(args.allowed_local_media_path, args.allowed_media_domains, self._limits)
        self._workers = workers or Workers.of(info, config, args)
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
        self._fetcher = Fetcher(self._rules)
        self._checks = Checks(info, config, args, self._family)
        self._merge_size = merge_size(info)

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, for reading; None with skip_tokenizer_init."""
        return self._tokenizer.inner

    def share_tokenizer(self) -> Any:
        """The same, for whoever may call it, too."""
        return self._tokenizer.share()

    @property
    def chat_template(self) -> str | None:
        """The template of conversations that bring tools; None if there is none."""
        try:
            return self._templates.resolve(self._template, ({},))
        except TemplateError:
            return None

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

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text by itself.

        Raises:
            PromptError: it is longer than a prompt may be, or there is no tokenizer.
        """
        most = self._config.max_model_len
        self._tokenizer.check_size(text, most)
        return self._tokenizer.encode(text, add_special_tokens=False, most=most)

    def seal(self, params: SamplingParams, num_prompt: int, seed: int) -> Sampling:
        """Sealed sampling parameters; see Sealer.seal."""
        return self._sealer.seal(params, num_prompt, seed)

    # ------------------------------------------------------------------ prompts

    def prepare(self, prompt: PromptType, params: SamplingParams, **order: Any) -> Request:
        """A request from a prompt with its media; `draft`, `made` and `sealed` at one go, which say what is raised."""
        return self._request(partial(self.draft, prompt, params, **order))

    def prepare_chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, **options: Any) -> Request:
        """A request from OpenAI messages; `draft_chat`, `made` and `sealed` at one go, which say what is raised."""
        return self._request(partial(self.draft_chat, messages, params, **options))

    def _request(self, draft: Callable[[], Draft]) -> Request:
        with in_turn():
            drafted = draft()
        made = self.made(drafted)
        with in_turn():
            return self.sealed(made)

    def draft(self, prompt: PromptType, params: SamplingParams, **order: Any) -> Draft:
        """A prompt, read and checked. Its text is trusted: markers in it are markers.

        Args:
            prompt: see PromptType.
            params: as the user gave them.
            **order: the fields of Order.

        Raises:
            UserError: the prompt or a parameter is at fault.
        """
        said = Order(**order)
        self._checks.order(said.lora, said.priority)
        parsed = parse(self._of_ids(prompt, params), self._info, self._merge_size)
        self._checks.modalities(parsed.media)
        counts = _count(parsed.media)
        self._check_text(parsed.text, params)
        encode = None
        if parsed.text is not None:
            encoder = partial(self._encoder_of, counts=counts, most=self._most(params))
            encode = self._reading(parsed.text, params, parsed.media, encoder)
        ids: Sequence[int] = encode({}) if encode is not None else parsed.token_ids or ()
        ids = self._truncated(ids, params, parsed.media)
        self._check_markers(ids, counts)
        if encode is None:
            plain = partial(self._tokenizer.encode, add_special_tokens=False)
            encode = partial(_edged, ids, self._tokenizer.marks, plain)
        return Draft(ids, parsed, encode, params, said)

    def _of_ids(self, prompt: PromptType, params: SamplingParams) -> PromptType:
        """A prompt; one of token ids is cut or refused before each of them is looked at.

        Raises:
            PromptTooLongError: there are too many.
        """
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(ids, list | tuple) or len(ids) < self._config.max_model_len or self._info.is_encoder_decoder:
            return prompt
        keep = params.truncate_prompt_tokens
        if keep is None:
            self._checks.length(ids, (), ())
        elif isinstance(prompt, Mapping):
            return prompt if prompt.get("multi_modal_data") else {**prompt, "prompt_token_ids": ids[-keep:]}
        return ids[-keep:] if keep is not None else prompt

    def _reading(
        self,
        text: str,
        params: SamplingParams,
        media: Sequence[MediaRef],
        encoder: Callable[[str], Callable[[ItemsByModality], list[int]]],
    ) -> Callable[[ItemsByModality], list[int]]:
        """How a text is encoded; of a long one whose last tokens are wanted, no more is read than holds them.

        Raises:
            PromptTooLongError: it is too long, and can only be read as a whole.
        """
        keep = params.truncate_prompt_tokens
        if keep is None or media or len(text) <= SHORT_TEXT:
            return encoder(text)
        size = SHORT_TEXT
        while (tail := self._tokenizer.tail(text, size)) is not None:
            ids = encoder(tail)({})
            if len(ids) > keep + _SPARE_IDS:
                return lambda items: ids
            size *= 4
        if len(text) > _MANY_LETTERS:
            self._tokenizer.check_size(text, self._config.max_model_len)
        return encoder(text)

    def _encoder_of(
        self, text: str, counts: Mapping[str, int], most: int | None
    ) -> Callable[[ItemsByModality], list[int]]:
        """How a trusted text is encoded once its items' own text stands around their markers."""
        ends = True
        if self._family.rewrite is not None:
            written = self._family.rewrite(text, counts)
            if not isinstance(written, str):
                # Items of these families have no text of their own around them.
                plain = partial(self._tokenizer.encode, add_special_tokens=False, most=most)
                ids = self._tokenizer.encode_pieces(written, plain)
                return lambda items: ids
            text = written
            ends = self._family.rewritten_ends == "added"
        text = self._family.begun(text, self._tokenizer.inner)

        def encode(items: ItemsByModality) -> list[int]:
            edged = expand.edged_text(text, items, self._tokenizer.marker) if items else text
            return self._tokenizer.encode(edged, add_special_tokens=ends, most=most)

        return encode

    def draft_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        chat_template: str | None = None,
        content_format: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        thoughts: Thoughts | None = None,
        **order: Any,
    ) -> Draft:
        """OpenAI messages, read, checked and rendered. Text in them is text, whatever it spells: see control.py.

        A grammar begins behind the `thoughts` that the model marks so, where the conversation has not ended them.

        Raises:
            UserError: a message, the template or a parameter is at fault.
        """
        said = Order(**order)
        self._checks.order(said.lora, said.priority)
        if continue_final_message and add_generation_prompt:
            raise PromptError(
                "continue_final_message and add_generation_prompt exclude each other.",
                "Set add_generation_prompt to false to continue the last message.",
                param="continue_final_message",
            )
        encode, media, text = self._render(
            messages,
            chat_template or self._template,
            content_format or self._args.chat_template_content_format,
            tools,
            template_kwargs,
            params,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        salt = b"" if cache_salt is None else cache_salt.encode()
        parsed = ParsedPrompt(text, None, media, processor_options(mm_processor_kwargs), salt)
        self._check_text(text, params)
        ids = self._truncated(encode({}), params, media)
        self._check_rendered(ids, media)
        return Draft(ids, parsed, encode, params, said, None if thoughts is None else after(thoughts, text))

    @asynccontextmanager
    async def fetched(self, draft: Draft) -> AsyncGenerator[Draft, None]:
        """The draft with its media fetched, as far as they lie on other machines; they have room within the block.

        Without it `made` fetches them, and holds a thread meanwhile.

        Raises:
            FetchError, LimitError: an item cannot be fetched, or is too large.
        """
        async with self._fetcher.fetched(draft.parsed.media) as media:
            yield replace(draft, parsed=replace(draft.parsed, media=media))

    def made(self, draft: Draft) -> Made:
        """The draft with its items.

        Raises:
            UserError: an item is at fault.
        """
        items, receipts = self._items(draft.ids, draft.parsed, draft.order.departure)
        ids = draft.encode(items) if expand.has_edges(items) else draft.ids
        return Made(draft, ids, items, receipts)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        given_template: str | None,
        content_format: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        params: SamplingParams,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> tuple[Callable[[ItemsByModality], list[int]], tuple[MediaRef, ...], str]:
        """How the rendered conversation is encoded, its media, and its text."""
        if continue_final_message and self._family.closes:
            raise PromptError(
                f"{self._info.architecture} cannot continue a message: {self._family.closes}.",
                "Leave continue_final_message out, and ask for the rest in words.",
                param="continue_final_message",
            )
        # Templates leave some of what is said out, but never most of it.
        letters, most = chat.num_letters(messages), self._most(params)
        if letters > _MANY_LETTERS:
            self._tokenizer.check_letters(letters, 4 * self._config.max_model_len)
        marks = self._tokenizer.control()
        template = self._templates.resolve(given_template, tools)
        as_list = self._templates.takes_list(template, content_format)
        form = chat.ChatForm(as_list, self._templates.forms(template)[1] or not as_list, self._example)
        talk = chat.read(messages, form, marks, self._limits)
        self._checks.modalities(talk.media)
        rendered = self._templates.render(
            talk.messages,
            template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=chat.sanitized(tools, marks, talk.stand_ins) if tools else None,
            variables=chat.sanitized(variables, marks, talk.stand_ins) if variables else None,
        )
        if self._family.rewrite_chat is not None:
            written = self._family.rewrite_chat(rendered, _count(talk.media))
            if not isinstance(written, str):
                stretch = partial(self._encode_rendered, stand_ins=talk.stand_ins, ends=False, most=most, items={})
                ids = self._tokenizer.encode_pieces(written, stretch)
                return lambda items: ids, talk.media, talk.stand_ins.restore(rendered)
            rendered = written
        rendered = self._family.begun(rendered, self._tokenizer.inner)
        # A processor adds the tokenizer's own ends unless the template wrote the first of them; a bare tokenizer never
        # does.
        bos = getattr(self._tokenizer.inner, "bos_token", None)
        ends = bool(self._info.modalities) and not (bos and rendered.startswith(bos))
        if self._family.rewrite_chat is not None:
            ends = ends and self._family.rewritten_ends == "added"

        def encoder(text: str) -> Callable[[ItemsByModality], list[int]]:
            return partial(self._encode_rendered, text, talk.stand_ins, ends, most)

        encode = self._reading(rendered, params, talk.media, encoder)
        return encode, talk.media, talk.stand_ins.restore(rendered)

    def _encode_rendered(
        self, rendered: str, stand_ins: special_tokens.StandIns, ends: bool, most: int | None, items: ItemsByModality
    ) -> list[int]:
        if items:
            rendered = expand.edged_text(rendered, items, self._tokenizer.marker)
        marks = self._tokenizer.control()
        if not len(stand_ins):
            whole = self._tokenizer.encode(rendered, add_special_tokens=ends, most=most)
            if not special_tokens.smuggled(whole, rendered, marks, self._tokenizer.ends() if ends else ((), ())):
                return whole
        ids = special_tokens.encode_rendered(
            rendered,
            stand_ins,
            marks,
            self._tokenizer.plain(),
            lambda text: self._tokenizer.encode(text, add_special_tokens=False, most=most),
            most,
        )
        if ends:
            before, after = self._tokenizer.ends()
            ids = [*before, *ids, *after]
        return ids

    def _example(self, modality: str) -> str:
        """How an item is written in a prompt of this family."""
        return self._family.placeholders.get(modality) or self._tokenizer.marker(modality)

    # ------------------------------------------------------------------ checks

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
                    or_engine="give a chat_template that writes one per item, or another chat_template_content_format",
                )

    def _most(self, params: SamplingParams) -> int | None:
        """How many ids of a text are of use; all, where the last of them are wanted."""
        return self._config.max_model_len if params.truncate_prompt_tokens is None else None

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
        self, ids: Sequence[int], parsed: ParsedPrompt, departure: Departure
    ) -> tuple[dict[str, list[MediaItem]], tuple[MediaReceipt, ...]]:
        """The items of a request by modality, and their receipts in the order of the prompt."""
        if not parsed.media:
            return {}, ()
        made = self._prepare_all(parsed.media, parsed.options, parsed.salt, departure)
        queues: dict[str, list[Prepared]] = {}
        for ref, prepared in zip(parsed.media, made, strict=True):
            queues.setdefault(ref.modality, []).append(prepared)
        items = {modality: [p.item for p in own] for modality, own in queues.items()}
        waiting = {self._tokenizer.marks[modality]: iter(own) for modality, own in queues.items()}
        in_order = [next(waiting[token]) for token in ids if token in waiting]
        return items, tuple(prepared.receipt for prepared in in_order)

    def _prepare_all(
        self, media: Sequence[MediaRef], options: Mapping[str, Any], salt: bytes, departure: Departure
    ) -> list[Prepared]:
        totals = _count(media)
        seen: dict[str, int] = {}
        tasks = []
        for ref in media:
            index = seen.get(ref.modality, 0)
            seen[ref.modality] = index + 1
            tasks.append(
                Task(
                    ref,
                    index,
                    merged(self._args.mm_processor_kwargs, options, ref.options),
                    self._family.setting(ref.modality, index + 1, totals),
                    salt,
                    departure,
                )
            )
        return self._workers.map(self._maker.make, tasks)

    def count(self, media: Sequence[MediaRef]) -> list[MediaReceipt]:
        """What the model would see of these media, and the tokens each would take, in one prompt with all of them.

        Raises:
            UserError: an item is at fault.
        """
        self._checks.modalities(media)
        made = self._prepare_all(media, {}, b"", Departure())
        return [prepared.receipt for prepared in made]

    # ------------------------------------------------------------------ sealing

    def sealed(self, made: Made) -> Request:
        """The request.

        Raises:
            UserError: it is too long, or a parameter is at fault.
        """
        items, ids, order = made.items, made.ids, made.draft.order
        if not items and not self._info.is_encoder_decoder:
            # Before anything is made of what is too long.
            self._checks.length(ids, (), ())
        token_ids, spans = expand.expand(ids, items, self._tokenizer.marks)
        salt = made.draft.parsed.salt
        if self._info.is_encoder_decoder:
            token_ids, spans = encoder_prompt.fold(token_ids, spans, self._info, salt)
        self._checks.length(token_ids, spans, made.draft.parsed.media)
        return Request(
            id=order.request_id,
            token_ids=token_ids,
            params=self._sealer.seal(
                made.draft.params, len(token_ids), order.seed, made.draft.thoughts, order.departure
            ),
            spans=spans,
            lora=order.lora or self._config.media_lora(items),
            salt=salt,
            priority=order.priority,
            arrival=order.arrival,
            receipts=made.receipts,
            prompt=made.draft.parsed.text,
        )


def _edged(
    ids: Sequence[int], marks: Mapping[str, int], plain: Callable[[str], list[int]], items: ItemsByModality
) -> list[int]:
    """Ids that were given as such, with the items' own text around their markers."""
    return expand.edged_ids(ids, items, marks, plain)


def _count(media: Sequence[MediaRef]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for ref in media:
        counts[ref.modality] = counts.get(ref.modality, 0) + 1
    return counts
