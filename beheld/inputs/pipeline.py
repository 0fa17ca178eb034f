"""The input pipeline: turns a user's order into a request for the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.core.config import EngineArgs, EngineConfig, MediaLimits, ModelInfo, longer_prompts
from beheld.core.errors import ConfigError, ModelError, PromptError, TemplateError, UserError, first_line
from beheld.core.media import MediaItem, MediaReceipt, MediaRef, MediaSpan
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import Pooling, PoolingParams
from beheld.core.request import Request
from beheld.core.sampling import Sampling
from beheld.core.speech import SpeechForm, SpeechTokens
from beheld.encoders.client import RemoteEncoders
from beheld.encoders.connect import connected
from beheld.families import registry
from beheld.inputs.fetch.fetch import FetchRules, is_remote
from beheld.inputs.fetch.fetcher import Fetcher, Reserve
from beheld.inputs.grounding import places_of
from beheld.inputs.media import soundtracks
from beheld.inputs.media.document import DocumentFacts, PageWish
from beheld.inputs.media.item_maker import ItemMaker, PreparedItem, merge_size
from beheld.inputs.media.processor import ItemProcessor
from beheld.inputs.media.samples import first_rows, sample_items
from beheld.inputs.media.workers import MediaWorkers
from beheld.inputs.prompt import decoder_prompt, documents, embedded_prompt, encoder_prompt, expand, item_words
from beheld.inputs.prompt.documents import FoundDocument
from beheld.inputs.prompt.parse import PromptType
from beheld.inputs.prompt.reader import PromptReader, plain_form
from beheld.inputs.prompt.rendering import render_type
from beheld.inputs.prompt.template import ChatTemplates
from beheld.inputs.prompt.tokenizer import PromptTokenizer, for_workers, load_tokenizer
from beheld.inputs.prompt.tokenizer_trial import try_tokenizer
from beheld.inputs.request_checks import RequestChecks
from beheld.inputs.request_forms import Chat, Pair, ReadPrompt, ReadRequest, RequestOrder, RequestWithItems
from beheld.inputs.sampling import option_checks, resolve_pooling
from beheld.inputs.sampling.resolve_sampling import SamplingResolver, recommended
from beheld.utils.cancellation import CancelToken
from beheld.utils.gil import in_turn

__all__ = ["Chat", "InputPipeline", "Pair", "PromptType", "RequestOrder"]

_TEXT = "What is in this image?"


class InputPipeline:
    """Turns user orders into engine requests. Safe to use from several threads.

    The tokenizer is loaded at once, the processor with the first item.

    Args:
        info: the checkpoint's properties.
        config: the engine's configuration.
        args: the user's options.
        workers: workers that were started before; None starts them. Their sandbox also runs templates and grammars.
        processor: transformers' processor, if already loaded.

    Attributes:
        reader: reads prompts and conversations.
        workers: decode and process media.
        cache: processed media.
        compiler: compiles grammars for this tokenizer.

    Raises:
        ModelError: the tokenizer cannot be loaded.
        ConfigError, ParamsError, TemplateError: an option of the pipeline is wrong.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: EngineConfig,
        args: EngineArgs,
        workers: MediaWorkers | None = None,
        processor: Any = None,
    ) -> None:
        option_checks.check(args)
        self._info, self._config, self._args = info, config, args
        self._family = registry.inputs_of(info.family, Path(info.path))
        inner = None if args.skip_tokenizer_init else load_tokenizer(info, args)
        self._tokenizer = PromptTokenizer.of(inner, info, self._family, longer_prompts(config, info))
        self._processor = ItemProcessor(info, args, self._family, self._tokenizer, config.dtype, processor)
        option_checks.check_processor(args.mm_processor_kwargs, info, self._processor)
        limits = MediaLimits.of(args.media_limits)
        self._rules = rules = FetchRules.of(args.allowed_local_media_path, args.allowed_media_domains, limits)
        self._checks = RequestChecks(info, config, args, self._family)
        self.workers = workers or MediaWorkers(info, config, args)
        self._sandbox = self.workers.sandbox
        foreign = None if inner is None else render_type(info, for_workers(info, args))
        written, only = self._family.template_text, self._family.only_template
        templates = ChatTemplates(inner, Path(info.path), written, self._sandbox, foreign, only=only)
        if inner is not None:
            self._check_tokenizer()
            if not args.chat_template:
                templates.check_own()
        self.reader = PromptReader(
            info, config, args, self._family, self._tokenizer, templates, self._checks, merge_size(info)
        )
        self._long: tuple[PromptReader, RequestChecks] | None = None
        if info.pooler is not None and info.pooler.longest is not None:
            self._long = self._reader_of_long_texts(info, config, args, templates, info.pooler.longest)
        self._fetcher = Fetcher(rules)
        self._maker = ItemMaker(info, config, args, self._processor, self._family, rules, self.workers)
        self.cache = self._maker.cache
        self._encoders: RemoteEncoders | None = connected(args.encoder_urls or (), info, config)
        self._pooling = None if info.pooler is None else resolve_pooling.CommonPooling(info.pooler)
        self._sampling = SamplingResolver(info, config, args, inner, self._sandbox)
        self.compiler = self._sampling.compiler
        if workers is None:
            # Processes start after everything that may raise.
            self.workers.warm()

    def _reader_of_long_texts(
        self, info: ModelInfo, config: EngineConfig, args: EngineArgs, templates: ChatTemplates, longest: int
    ) -> tuple[PromptReader, RequestChecks]:
        """Return what reads and checks texts of up to `longest` tokens.

        Raises:
            ConfigError: that is less than the model reads.
        """
        if longest < config.max_model_len:
            raise ConfigError(
                f"max_embed_len={longest} is below max_model_len={config.max_model_len}.",
                "Raise it, or lower max_model_len.",
                param="override_pooler_config",
            )
        longer = replace(config, max_model_len=longest)
        checks = RequestChecks(info, longer, args, self._family)
        family, tokenizer = self._family, self._tokenizer
        return PromptReader(info, longer, args, family, tokenizer, templates, checks, merge_size(info)), checks

    def ids_of_long(self, prompt: PromptType, params: PoolingParams) -> Sequence[int]:
        """Return the ids of a text, or given ids, of which there may be more than the model reads.

        Raises:
            UserError: the prompt is wrong, or longer than what is read in parts, too.
        """
        assert self._long is not None
        reader, checks = self._long
        ids = reader.read_prompt(prompt, params).ids
        checks.length(ids, (), ())
        return ids

    def _check_tokenizer(self) -> None:
        """Refuse a tokenizer that makes nothing of a text, or far too much.

        Raises:
            ModelError: it does.
        """
        try_tokenizer(self._tokenizer.inner)
        reason = ""
        try:
            nothing = any(not self._tokenizer.encode(_TEXT, add_special_tokens=ends) for ends in (False, True))
        except Exception as error:
            nothing, reason = True, first_line(error)
        if nothing:
            raise ModelError(
                f"The tokenizer of {self._info.name!r} makes nothing of {_TEXT!r}.",
                "Check post_processor and normalizer in tokenizer.json, or fetch the checkpoint again.",
                detail=reason,
            )

    # ------------------------------------------------------------------ the way of a request

    def prepare(self, order: RequestOrder) -> Request:
        """Make the whole request in the calling thread.

        Raises:
            UserError: the prompt, an item or a parameter is wrong.
        """
        if (plain := self._plain(order)) is not None:
            return plain
        if found := self.documents(order):
            order = self.open_documents(order, found)
        with in_turn():
            read = self.read(order)
        return self.completed(read)

    def prepare_group(self, orders: Sequence[RequestOrder]) -> list[Request | BaseException]:
        """Make the requests of texts to be pooled in the calling thread, which tokenizes them together.

        An error stands in the place of its text's request, and hurts no other.
        """
        if len(orders) > 1:
            self.reader.read_ahead([order.prompt for order in orders], first=False)
        made: list[Request | BaseException] = []
        for order in orders:
            try:
                made.append(self.prepare(order))
            except BaseException as error:
                # A tokenizer's panics are no exceptions of the usual kind.
                made.append(error)
                if isinstance(order.prompt, str):
                    # It may have failed before its ids were asked for, which would be kept.
                    self.reader.read_before(order.prompt)
        return made

    def plain_group(
        self,
        prompts: Sequence[object],
        params: PoolingParams,
        names: Sequence[str],
        priorities: Sequence[int],
        arrival: float,
    ) -> list[Request | None]:
        """Make the requests of plain prompts in the calling thread: texts, ids, and pairs of an encoder.

        They are what `prepare` makes, in a fraction of the time. None stands for a prompt that `prepare` must be asked
        about: it is of another kind, or something is wrong with it.

        Args:
            params: of all of them.
            names, priorities: of each.
            arrival: of all of them.
        """
        made: list[Request | None] = [None] * len(prompts)
        if self._info.modalities or self._pooling is None:
            return made
        if params.truncate_prompt_tokens is not None:
            # `prepare` cuts them, and need not tokenize each.
            self.reader.read_ahead([plain_form(prompt) for prompt in prompts], first=False)
            return made
        try:
            # Types, too: True equals 1, and only one of them is right.
            for priority in {(type(each), each): each for each in priorities}.values():
                self._checks.order(None, priority)
            pooling = self._pooling.resolve(params)
        except UserError:
            return made
        like, most = Request("", (), pooling, arrival=arrival), self._config.max_model_len
        for place, found in enumerate(self.reader.read_plain(prompts)):
            if found is None or not 0 < len(found.ids) <= most:
                continue
            request = like.of_text(names[place], found.ids, found.text)
            if priorities[place] or found.second is not None:
                own = replace(pooling, second=found.second)
                request = replace(request, priority=priorities[place], params=own)
            made[place] = request
        return made

    def _plain(self, order: RequestOrder) -> Request | None:
        """Return the request of a text that was read ahead and is to be pooled by a model without media; else None.

        It is what the steps of `prepare` would make, in a quarter of the time, which most embeddings spend here.
        """
        prompt, params, pooling = order.prompt, order.params, self._pooling
        if self._info.modalities or pooling is None or order.lora is not None or type(prompt) is not str:
            return None
        if not isinstance(params, PoolingParams) or params.truncate_prompt_tokens is not None:
            return None
        ids = self.reader.read_before(prompt)
        if ids is None:
            return None
        self._checks.order(None, order.priority)
        self._checks.length(ids, (), ())
        return Request(
            id=order.request_id,
            token_ids=tuple(ids),
            params=pooling.resolve(params),
            priority=order.priority,
            arrival=order.arrival,
            client=order.client,
            prompt=prompt,
        )

    def documents(self, order: RequestOrder) -> tuple[FoundDocument, ...]:
        """Return the documents of a conversation, which `open_documents` replaces by their pages before it is read.

        Raises:
            UserError: there are too many, or one is named or wanted in a wrong way.
        """
        if not isinstance(order.prompt, Chat):
            return ()
        found = documents.find(order.prompt.messages)
        if found:
            limit = self._config.limit_per_prompt.get("image", 0)
            documents.check_count(found, self._info.modalities, limit)
        return found

    async def fetched_documents(
        self, found: Sequence[FoundDocument], client: str, reserve: Reserve
    ) -> tuple[FoundDocument, ...]:
        """Return the same documents with remote ones fetched.

        Args:
            found: the documents.
            client: the request's.
            reserve: the request's room, of `fetch_room`.

        Raises:
            FetchError, LimitError: one cannot be fetched, or is too large.
        """
        async with self._fetcher.fetched([one.ref for one in found], client, reserve) as refs:
            return tuple(replace(one, ref=ref) for one, ref in zip(found, refs, strict=True))

    def open_documents(self, order: RequestOrder, found: Sequence[FoundDocument]) -> RequestOrder:
        """Fetch and inspect documents, and return the order with their pages in their places.

        Raises:
            UserError: a document is wrong.
        """
        assert isinstance(order.prompt, Chat)

        def inspect(data: bytes, wish: PageWish) -> DocumentFacts:
            return self.workers.inspect(data, wish, order.cancel, order.client)

        files = documents.files(found, self._rules)
        made = documents.replaced(order.prompt.messages, found, files, self._info.modalities, inspect)
        return replace(order, prompt=replace(order.prompt, messages=made))

    def read(self, order: RequestOrder) -> ReadRequest:
        """Check the order, render a conversation, and tokenize.

        Raises:
            UserError: the prompt, a message, the template or a parameter is wrong.
        """
        self._checks.order(order.lora, order.priority)
        self._checks.answers(order.params)
        if isinstance(order.prompt, Chat):
            prompt = self.reader.read_chat(order.prompt, order.params, order.cancel)
        elif isinstance(order.prompt, Pair):
            prompt = self.reader.read_pair(order.prompt, order.params)
        else:
            prompt = self.reader.read_prompt(order.prompt, order.params)
        if order.grounding:
            self._checks.grounding(prompt.parsed.media)
        return ReadRequest(order, prompt)

    def fetch_room(self) -> AbstractContextManager[Reserve]:
        """Reserve the bytes of one request's remote documents and media until the block ends."""
        return self._fetcher.request()

    @asynccontextmanager
    async def fetched(self, read: ReadRequest, reserve: Reserve | None = None) -> AsyncGenerator[ReadRequest, None]:
        """Yield the same request with remote media fetched; their bytes are reserved within the block.

        Without this step, `make_items` fetches them and holds a thread meanwhile.

        Raises:
            FetchError, LimitError: an item cannot be fetched, or is too large.
        """
        parsed = read.prompt.parsed
        if not _is_to_fetch(read):
            yield read
            return
        async with self._fetcher.fetched(parsed.media, read.order.client, reserve) as media:
            yield replace(read, prompt=replace(read.prompt, parsed=replace(parsed, media=media)))

    def make_items(self, read: ReadRequest) -> RequestWithItems:
        """Fetch, decode, hash, look up and process the media.

        Raises:
            UserError: an item is wrong.
        """
        prompt = read.prompt
        media = soundtracks.resolved(prompt.parsed.media)
        if prompt.parsed.embeds:
            most = self._config.max_encoder_tokens
            spans = embedded_prompt.spans(prompt.parsed.embeds, self._info, most)
            return RequestWithItems(read, prompt.ids, {}, (), spans)
        if not media:
            return RequestWithItems(read, prompt.ids, {}, ())
        order = read.order
        made = self._maker.make_all(media, prompt.parsed.options, prompt.parsed.salt, order.cancel, order.client)
        by_modality: dict[str, list[PreparedItem]] = {}
        audio_by_video: dict[int, PreparedItem] = {}
        for ref, prepared in zip(media, made, strict=True):
            if ref.of_video is not None:
                audio_by_video[ref.of_video] = prepared
            else:
                by_modality.setdefault(ref.modality, []).append(prepared)
        for index, audio in audio_by_video.items():
            video = by_modality["video"][index]
            of_video, of_audio = soundtracks.receipts(video.receipt, audio.receipt)
            whole = self._processor.interleaved(video.item, audio.item)
            by_modality["video"][index] = PreparedItem(whole, of_video, (of_audio,))
        waiting = {modality: iter(own) for modality, own in by_modality.items()}
        places = {modality: self._tokenizer.places[modality] for modality in waiting}
        in_order = [next(waiting[modality]) for modality, _, _ in expand.find_places(prompt.ids, places)]
        items: dict[str, list[MediaItem]] = {kind: [one.item for one in own] for kind, own in by_modality.items()}
        if self._family.reads_prompt is not None:
            items = item_words.joined(items, prompt.parsed.text, self._family.reads_prompt, self._processor.loaded())
        if self._encoders is not None:
            items = self._encoders.replaced_all(items)
        ids = self.reader.with_edges(prompt, items)
        receipts = tuple(receipt for prepared in in_order for receipt in (prepared.receipt, *prepared.further))
        return RequestWithItems(read, ids, items, receipts)

    def completed(self, read: ReadRequest) -> Request:
        """`make_items`, then `seal`, in the calling thread.

        Raises:
            UserError: an item or a parameter is wrong, or the prompt is too long.
        """
        made = self.make_items(read)
        with in_turn():
            return self.seal(made)

    def read_and_completed(self, order: RequestOrder) -> Request | ReadRequest:
        """`read`, then `completed` in the same thread, unless there are media to fetch.

        Raises:
            UserError: the prompt, an item or a parameter is wrong.
        """
        read = self.read(order)
        return read if _is_to_fetch(read) else self.completed(read)

    def seal(self, made: RequestWithItems) -> Request:
        """Insert the items into the prompt, check its length, and resolve the sampling parameters.

        Raises:
            UserError: it is too long, or a parameter is wrong.
        """
        order, prompt = made.read.order, made.read.prompt
        if not made.items and not self._info.is_encoder_decoder:
            # Checked before anything is made of a prompt that is too long.
            self._checks.length(made.ids, (), ())
        token_ids, spans = expand.expand(made.ids, made.items, self._tokenizer.places)
        spans = made.spans or spans
        if self._info.encoder_reads == "prompt":
            token_ids, spans = encoder_prompt.fold(token_ids, spans, self._info, prompt.parsed.salt)
        elif self._info.encoder_reads:
            token_ids, spans = decoder_prompt.join(token_ids, spans, self._info)
        self._checks.length(token_ids, spans, prompt.parsed.media)
        return Request(
            id=order.request_id,
            token_ids=token_ids,
            params=self._resolved(order, prompt, token_ids, self._room(token_ids, spans)),
            spans=spans,
            lora=order.lora or self._config.media_lora(made.items),
            salt=prompt.parsed.salt,
            priority=order.priority,
            arrival=order.arrival,
            client=order.client,
            receipts=made.receipts,
            prompt=prompt.parsed.text,
            grounding=places_of(self._info, made.receipts, prompt.parsed.text or "") if order.grounding else None,
        )

    def _room(self, token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> int | None:
        """How many tokens of an answer an item has states for; None if that limits no answer.

        Raises:
            PromptError: the prompt itself is longer.
        """
        if not spans or not self._family.answer_within_states:
            return None
        states = spans[0].item.num_states
        if states <= len(token_ids):
            raise PromptError(
                f"The prompt has {len(token_ids)} tokens, and its {spans[0].item.modality} is over after {states}.",
                "Write less text, or send a longer one.",
            )
        return states - len(token_ids)

    def _resolved(
        self, order: RequestOrder, prompt: ReadPrompt, token_ids: Sequence[int], room: int | None
    ) -> Sampling | Pooling:
        """The engine's form of a request's parameters; `token_ids` are its whole prompt, and `room` as of _room."""
        if isinstance(order.params, SamplingParams):
            return self._sampling.resolve(order.params, token_ids, order.seed, prompt.reasoning, order.cancel, room)
        assert self._info.pooler is not None, "the kind of parameters was not checked"
        return resolve_pooling.resolve(order.params, self._info.pooler, prompt.second)

    # ------------------------------------------------------------------ parts

    @property
    def reads_extra_args(self) -> bool:
        """Whether a loaded class may read the `extra_args` of requests."""
        return self._sampling.reads_extra_args

    def default_params(self) -> SamplingParams:
        """Return the parameters that the checkpoint's generation_config.json recommends."""
        return recommended(read_json(Path(self._info.path) / "generation_config.json"), self._args)

    def receipts(self, media: Sequence[MediaRef]) -> list[MediaReceipt]:
        """Return what the model would see of these media, and the tokens each would take, all in one prompt.

        Raises:
            UserError: an item is wrong.
        """
        self._checks.modalities(media)
        return [prepared.receipt for prepared in self._maker.make_all(media, {}, b"", CancelToken())]

    @asynccontextmanager
    async def fetched_audio(self, source: Any, client: str) -> AsyncGenerator[Any, None]:
        """Yield an audio, with bytes in place of another machine's URL; inside the block they have room.

        Raises:
            UserError: the model hears none, or it cannot be fetched.
        """
        ref = MediaRef("audio", source)
        self._checks.modalities([ref])
        async with self._fetcher.fetched([ref], client) as (fetched,):
            yield fetched.source

    def waveform(self, source: Any, cancel: CancelToken, client: str = "") -> Any:
        """Return an audio's samples at the rate that the model hears: bytes of a file, a URL, a path, (samples, rate).

        Raises:
            UserError: it cannot be read.
        """
        self._checks.modalities([MediaRef("audio", source)])
        return self._maker.waveform(source, cancel, client)

    @cached_property
    def speech(self) -> tuple[SpeechForm, SpeechTokens | None] | None:
        """Return how the model is asked for transcripts, and its tokens if it is asked by tokens; None if it is not.

        Raises:
            ModelError: its files lack one of these tokens.
        """
        form = self._family.speech
        if form is None or "audio" not in self._info.modalities:
            return None
        return form, None if form.tokens is None else form.tokens(Path(self._info.path))

    def warm_grammars(self) -> None:
        """Let the process that compiles grammars load what it needs now, in the background."""
        self._sampling.warm()

    def sample_items(self, *, large: bool = False) -> list[MediaItem]:
        """Make one item of each modality, for the engine's self-test.

        Args:
            large: images of the usual size instead of small ones, of which a tower's grid is cut to a few rows.

        Raises:
            ModelError: the checkpoint's processor cannot make one.
        """
        items = sample_items(
            self._info, self._config, self._args, self._processor, self._family, self._rules, self.workers, large=large
        )
        if items and self._family.reads_prompt is not None:
            words, processor = self._family.reads_prompt, self._processor.loaded()
            return [item_words.with_words(item, words(processor, item.modality, _TEXT)) for item in items]
        if not items or self._info.encoder_reads != "prompt":
            return items if large else [first_rows(item) for item in items]
        # The encoder reads the prompt with its items.
        by_modality = {item.modality: [item] for item in items}
        ids = [token for modality in by_modality for token in self._tokenizer.places[modality]]
        _, spans = encoder_prompt.fold(*expand.expand(ids, by_modality, self._tokenizer.places), self._info, b"")
        return [span.item for span in spans]

    # ------------------------------------------------------------------ resources

    @property
    def tokenizer(self) -> Any:
        """Return transformers' tokenizer for reading; None with skip_tokenizer_init."""
        return self._tokenizer.inner

    def share_tokenizer(self) -> Any:
        """Return the tokenizer for callers that may also call it."""
        return self._tokenizer.share()

    @property
    def chat_template(self) -> str | None:
        """Return the template for conversations with tools; None if there is none."""
        try:
            return self.reader.template(({},))
        except TemplateError:
            return None

    def close(self) -> None:
        """Stop threads and workers."""
        self._maker.close()
        self._sandbox.close()


def _is_to_fetch(read: ReadRequest) -> bool:
    """Whether other machines have some of its media."""
    return any(is_remote(ref.source) for ref in read.prompt.parsed.media)
