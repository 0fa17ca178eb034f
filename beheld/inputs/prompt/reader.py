"""Reads prompts and conversations as token ids, with one placeholder per item."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from beheld.checkpoint.info import added_tokens
from beheld.core.config import EngineArgs, EngineConfig, MediaLimits, ModelInfo
from beheld.core.errors import ParamsError, PlaceholderError, PromptError, TemplateError
from beheld.core.media import AUDIO_IN_VIDEO, MediaRef, count_by_modality
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.core.structured_outputs import ReasoningFormat
from beheld.families.inputs import FamilyInputs, ItemPlace
from beheld.inputs.media import soundtracks
from beheld.inputs.media.processor_options import merged
from beheld.inputs.prompt import chat, embedded_prompt, expand, special_tokens
from beheld.inputs.prompt.parse import ParsedPrompt, PromptType, parse, processor_options
from beheld.inputs.prompt.rendering import Rendering
from beheld.inputs.prompt.template import ChatTemplates, text_of
from beheld.inputs.prompt.tokenizer import SHORT_TEXT, SPARE_IDS, PromptTokenizer
from beheld.inputs.prompt.truncation import Truncation
from beheld.inputs.request_checks import RequestChecks
from beheld.inputs.request_forms import Chat, ItemsByModality, Pair, PromptText, ReadPrompt
from beheld.structured.reasoning import reasoning_after
from beheld.utils.cancellation import CancelToken
from beheld.utils.part_fields import PartFields

# Shorter conversations are rendered, and shorter texts read whole, before their length is checked.
_MANY_LETTERS = 1 << 20


class PlainPrompt(NamedTuple):
    """A prompt without media: its ids, its text if it is one, and where the second text of a pair starts."""

    ids: tuple[int, ...]
    text: str | None
    second: int | None = None


class _Encode(Protocol):
    def __call__(self, piece: str, *, ends: bool) -> list[int]: ...


def plain_form(prompt: Any) -> str | list[Any] | tuple[Any, ...] | Pair | None:
    """Return the text, the unchecked ids or the pair of a prompt that is nothing else; None for other prompts."""
    kind = type(prompt)
    if kind is str or kind is list or kind is tuple or kind is Pair:
        return prompt
    if kind is dict and len(prompt) == 1:
        if type(text := prompt.get("prompt")) is str:
            return text
        if type(ids := prompt.get("prompt_token_ids")) is list:
            return ids
    return None


class PromptReader:
    """Reads the prompts of one engine. Thread-safe.

    Args:
        info: the model.
        config: the engine's configuration.
        args: the user's template options.
        family: the model's.
        tokenizer: the model's.
        templates: the model's.
        checks: limits on requests.
        merge_size: patches per embedding along each side, for embeddings with a grid.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: EngineConfig,
        args: EngineArgs,
        family: FamilyInputs,
        tokenizer: PromptTokenizer,
        templates: ChatTemplates,
        checks: RequestChecks,
        merge_size: int,
    ) -> None:
        self._info = info
        self._config = config
        self._family = family
        self._tokenizer = tokenizer
        self._truncation = Truncation(info, config, tokenizer)
        self._templates = templates
        self._checks = checks
        self._merge_size = merge_size
        self._limits = MediaLimits.of(args.media_limits)
        self._barred_ids = _ids_of(tuple(family.barred), tokenizer, info) if family.barred else {}
        self._processor_options = args.mm_processor_kwargs
        self._content_format = args.chat_template_content_format
        # Read once: later changes of the file affect no request.
        self._template = text_of(args.chat_template) if args.chat_template else None

    def template(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Return the template for conversations without their own.

        Raises:
            TemplateError: there is none.
        """
        return self._templates.resolve(self._template, tools)

    def _usual_template(self) -> str | None:
        try:
            return self.template(({},))
        except TemplateError:
            return None

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text alone.

        Raises:
            PromptError: it is longer than the limit, or there is no tokenizer.
        """
        most = self._config.max_model_len
        self._tokenizer.check_length(len(text), most)
        return self._tokenizer.encode(text, add_special_tokens=False, most=most)

    def token_places(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """See PromptTokenizer.token_places."""
        return self._tokenizer.token_places(text, add_special_tokens=add_special_tokens)

    def cut(self, text: str, most: int, *, end: bool = False) -> str:
        """Return the beginning of a text that is `most` ids long.

        With `end`, return its end instead; the tokenizer's special tokens count among the `most` then.

        Raises:
            PromptError: there is no tokenizer, or it does not say where its tokens stand.
        """
        # The tokens around a text count where what is left is the whole prompt.
        around = sum(map(len, self._tokenizer.ends())) if end else 0
        # More than the model reads is refused, however much more.
        most = min(most, self._config.max_model_len + SPARE_IDS)
        return self._tokenizer.cut(self._cased(text), max(1, most - around), end=end)

    # ------------------------------------------------------------------ prompts

    def read_prompt(self, prompt: PromptType, params: SamplingParams | PoolingParams) -> ReadPrompt:
        """Read and check a prompt. Its text is trusted: placeholder spellings are placeholders.

        Raises:
            UserError: the prompt or a parameter is wrong.
        """
        _check_budget(params, None)
        if isinstance(prompt, Mapping) and prompt.get(embedded_prompt.KEY) is not None:
            # Before they are read, which may take much memory.
            self._checks.embedded_prompt(params)
        if isinstance(prompt, Mapping):
            self._checks.embeddings(prompt.get("multi_modal_data"))
        parsed = parse(self._bounded_ids(prompt, params), self._info, self._merge_size, self._limits)
        if parsed.embeds:
            self._checks.length(parsed.token_ids or (), (), ())
            return ReadPrompt(parsed.token_ids or (), parsed)
        self._checks.modalities(parsed.media)
        counts = count_by_modality(parsed.media)
        text: PromptText | None = None
        if parsed.text is None:
            ids: Sequence[int] = parsed.token_ids or ()
        else:
            self._check_size(parsed.text, params)
            most = self._truncation.most(params)
            written = self._cased(parsed.text)
            whole = parsed.ends
            if self._family.rewrite is not None:
                rewritten = self._family.rewrite(written, counts)
                if isinstance(rewritten, str):
                    written, whole = rewritten, whole and self._family.rewritten_ends != "written"
                else:
                    # Items of these families have no text around them.
                    ids = self._of_pieces(
                        rewritten,
                        lambda piece, *, ends: self._tokenizer.encode(
                            piece, add_special_tokens=ends and parsed.ends, most=most
                        ),
                    )
                    return self._checked(ids, parsed, None, params, counts)
            text = PromptText(self._family.begun(written, self._tokenizer.inner), None, whole, most)
            ids = self._ids_of(text, params, parsed.media)
        return self._checked(ids, parsed, text, params, counts)

    def read_ahead(self, prompts: Sequence[Any], *, first: bool) -> None:
        """Tokenize those of the next prompts that are plain texts, together; see PromptTokenizer.read_ahead."""
        if self._family.rewrite is None and self._tokenizer.inner is not None:
            texts = [self._written(prompt) for prompt in prompts if isinstance(prompt, str)]
            self._tokenizer.read_ahead(texts, first=first)

    def read_plain(self, prompts: Sequence[object]) -> list[PlainPrompt | None]:
        """Read texts, ids and an encoder's pairs; the library's threads tokenize all texts together.

        None stands for a prompt that `read_prompt` or `read_pair` must read: another form, a long text, or a wrong one.
        Lengths are not checked.
        """
        made: list[PlainPrompt | None] = [None] * len(prompts)
        texts: list[str] = []
        of_text: list[int] = []
        pairs: list[Pair] = []
        of_pair: list[int] = []
        takes_texts = self._family.rewrite is None and self._tokenizer.inner is not None
        takes_pairs = takes_texts and self._info.pooler is not None and self._info.pooler.encodes
        for place, prompt in enumerate(prompts):
            form = plain_form(prompt)
            if type(form) is str:
                if takes_texts:
                    texts.append(form)
                    of_text.append(place)
            elif type(form) is Pair:
                if takes_pairs:
                    pairs.append(form)
                    of_pair.append(place)
            elif isinstance(form, list | tuple):
                made[place] = self._plain_ids(form)
        found = self._tokenizer.encode_together([self._written(text) for text in texts])
        for place, text, ids in zip(of_text, texts, found, strict=True):
            if ids is not None:
                made[place] = PlainPrompt(tuple(ids), text)
        if pairs:
            both = [(self._cased(pair.first), self._cased(pair.second)) for pair in pairs]
            for place, sides, read in zip(of_pair, both, self._tokenizer.encode_pairs(both), strict=True):
                if read is not None:
                    made[place] = PlainPrompt(tuple(read[0]), " ".join(sides), read[1])
        return made

    def _plain_ids(self, ids: Sequence[Any]) -> PlainPrompt | None:
        if self._tokenizer.places or not 0 < len(ids) <= self._config.max_model_len or set(map(type, ids)) != {int}:
            return None
        return PlainPrompt(tuple(ids), None) if min(ids) >= 0 and max(ids) < self._info.num_ids else None

    def read_before(self, prompt: str) -> list[int] | None:
        """Return the ids of a plain text that was read ahead, once; None of another. Nothing of it is checked."""
        return self._tokenizer.known(self._written(prompt))

    def _written(self, prompt: str) -> str:
        return self._family.begun(self._cased(prompt), self._tokenizer.inner)

    def read_pair(self, pair: Pair, params: SamplingParams | PoolingParams) -> ReadPrompt:
        """Read two texts as one prompt. An encoder's tokenizer writes its separators between them, a decoder's nothing.

        Raises:
            UserError: a text or a parameter is wrong.
        """
        assert self._info.pooler is not None
        if not self._info.pooler.encodes:
            joined: Any = {"prompt": pair.first + pair.second}
            return self.read_prompt(
                joined if pair.cache_salt is None else joined | {"cache_salt": pair.cache_salt}, params
            )
        texts = self._cased(pair.first), self._cased(pair.second)
        for text in texts:
            self._tokenizer.check_length(len(text), self._config.max_model_len)
        keep = self._truncation.keep(params)
        ids, second = self._tokenizer.encode_pair(*texts, keep)
        return ReadPrompt(ids, ParsedPrompt(" ".join(texts), None, (), {}, b""), second=second)

    def _bounded_ids(self, prompt: PromptType, params: SamplingParams | PoolingParams) -> PromptType:
        """Return a prompt; one of token ids is cut or refused before each id is checked.

        Raises:
            PromptTooLongError: there are too many.
        """
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(ids, list | tuple) or len(ids) < self._config.max_model_len or self._info.is_encoder_decoder:
            return prompt
        if self._truncation.keep(params) is None:
            self._checks.length(ids, (), ())
            return prompt
        if isinstance(prompt, Mapping):
            has_media = prompt.get("multi_modal_data")
            return prompt if has_media else {**prompt, "prompt_token_ids": self._truncation.cut(ids, params)}
        return list(self._truncation.cut(ids, params))

    def _ids_of(
        self, text: PromptText, params: SamplingParams | PoolingParams, media: Sequence[MediaRef]
    ) -> Sequence[int]:
        """Return a text's ids; if only its last tokens are needed, read no more of a long text than that.

        Raises:
            PromptTooLongError: it is too long, and can only be tokenized as a whole.
        """
        keep = self._truncation.keep(params)
        if keep is None or media or len(text.text) <= SHORT_TEXT:
            return self._encode(text, {})
        if isinstance(params, PoolingParams) or params.truncation_side == "right":
            # More than enough for the first ids, of which a cut within a word changes none.
            return self._encode(replace(text, text=text.text[: (keep + SPARE_IDS) * self._tokenizer.longest()]), {})
        size = SHORT_TEXT
        while (tail := self._tokenizer.tail(text.text, size)) is not None:
            ids = self._encode(replace(text, text=tail), {})
            if len(ids) > keep + SPARE_IDS:
                return ids
            size *= 4
        if len(text.text) > _MANY_LETTERS:
            self._tokenizer.check_length(len(text.text), self._config.max_model_len)
        return self._encode(text, {})

    def _checked(
        self,
        ids: Sequence[int],
        parsed: ParsedPrompt,
        text: PromptText | None,
        params: SamplingParams | PoolingParams,
        counts: Mapping[str, int],
    ) -> ReadPrompt:
        ids = self._truncation.truncated(ids, params, parsed.media, text)
        found = expand.count_placeholders(ids, self._tokenizer.places)
        if (media := self._with_audio(parsed.media, parsed.options, ids)) != parsed.media:
            parsed, counts = replace(parsed, media=media), count_by_modality(media)
        expand.check_counts(found, counts, self._tokenizer.placeholder, self._example)
        self._check_within(ids)
        if parsed.media:
            self._check_barred(ids)
        return ReadPrompt(ids, parsed, text)

    def _with_audio(
        self, media: tuple[MediaRef, ...], options: Mapping[str, Any], ids: Sequence[int]
    ) -> tuple[MediaRef, ...]:
        """Return a prompt's media, with the audio of its videos if the request or the engine asks for it.

        Raises:
            UserError: the model does not read both as one, or a video has no audio, or more than one item.
        """
        if not media:
            return media
        if self._family.interleave is None:
            if any(ref.of_video is not None for ref in media):
                raise ParamsError(
                    f"{self._info.architecture} does not read a video and its audio as one.",
                    f"Leave out {AUDIO_IN_VIDEO[0]}.",
                    param="mm_processor_kwargs",
                )
            return media
        _, wanted = soundtracks.split(merged(self._processor_options, options))
        written = [modality for modality, _, _ in expand.find_places(ids, self._tokenizer.places)]
        found = soundtracks.attached(media, written, wanted=wanted)
        if len(found) != len(media):
            self._checks.modalities(found)
        return found

    def _check_within(self, ids: Sequence[int]) -> None:
        """Check that a prompt has no token that stands for embeddings, where items are written with another one.

        Raises:
            PlaceholderError: it has one.
        """
        for token, modality in self._tokenizer.within.items():
            if token in ids:
                raise PlaceholderError(
                    f"The prompt has the token {self._tokenizer.spelled(token)!r}, which stands for a part of an item.",
                    f"Write {self._example(modality)!r} once for each {modality}, where it belongs in the text.",
                )

    def _check_barred(self, ids: Sequence[int]) -> None:
        """Check that a prompt with media has no token that the family bars from such.

        Raises:
            PromptError: it has one.
        """
        for token, reason in self._family.barred.items():
            if self._barred_ids.get(token) in ids:
                raise PromptError(
                    f"A prompt with media cannot have the token {token!r}: {reason}.",
                    "Leave the token out, or send one of the texts that it separates.",
                )

    def with_edges(self, prompt: ReadPrompt, items: ItemsByModality) -> Sequence[int]:
        """Return the prompt's ids with the items' texts around their placeholders."""
        if not expand.has_edges(items):
            return prompt.ids
        if prompt.text is not None:
            return self._encode(prompt.text, items)
        plain = partial(self._tokenizer.encode, add_special_tokens=False)
        return expand.edged_ids(prompt.ids, items, self._tokenizer.places, plain)

    # ------------------------------------------------------------------ conversations

    def read_chat(self, asked: Chat, params: SamplingParams | PoolingParams, cancel: CancelToken) -> ReadPrompt:
        """Read, check and render a conversation. Its text is only text, whatever it spells: see special_tokens.py.

        A grammar begins after the model's reasoning, unless the conversation has ended it.

        Raises:
            UserError: a message, the template or a parameter is wrong.
            Cancelled: the request was cancelled.
        """
        _check_budget(params, asked.reasoning)
        self._check_continuing(asked)
        # Templates leave out some of the messages' text, but never most of it.
        letters = chat.num_letters(asked.messages)
        if letters > _MANY_LETTERS:
            self._tokenizer.check_length(letters, 4 * self._config.max_model_len)
        control = self._tokenizer.control()
        template = self._templates.resolve(asked.chat_template or self._template, asked.tools)
        as_list = self._templates.takes_list(template, asked.content_format or self._content_format)
        strings_too = self._templates.forms(template)[1] or not as_list
        # What the usual template reads is never an option of the processor, whichever template a request chooses.
        fields = PartFields(template, self._usual_template())
        form = chat.ChatForm(as_list, strings_too, self._example, self._family.described_by, fields)
        talk = chat.read(asked.messages, form, control, self._limits)
        self._checks.modalities(talk.media)
        if talk.slots:
            self._checks.embedded_prompt(params)
        rendered = self._templates.render(
            Rendering(
                talk.messages,
                template,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                tools=chat.sanitized(asked.tools, control, talk.stand_ins) if asked.tools else None,
                variables=chat.sanitized(asked.template_kwargs, control, talk.stand_ins)
                if asked.template_kwargs
                else None,
            ),
            cancel,
        )
        _check_slots(rendered, talk.slots)
        text, ids = self._tokenized(rendered, talk, self._truncation.most(params), adds=asked.add_special_tokens)
        shown = talk.stand_ins.restore(rendered if text is None else text.text)
        salt = b"" if asked.cache_salt is None else asked.cache_salt.encode()
        parsed = ParsedPrompt(shown, None, talk.media, processor_options(asked.mm_processor_kwargs), salt)
        self._check_size(shown, params)
        if text is not None:
            ids = self._ids_of(text, params, talk.media)
        if not talk.media and (shorter := self._truncation.with_shorter_document(asked, len(ids), params)) is not None:
            return self.read_chat(shorter, params, cancel)
        ids = self._truncation.truncated(ids, params, talk.media, text)
        parsed = replace(parsed, media=self._with_audio(talk.media, parsed.options, ids))
        self._check_rendered(ids, parsed.media)
        if talk.media:
            self._check_barred(ids)
        if talk.slots:
            ids, placed = embedded_prompt.insert(ids, self._tensors(talk.slots), self._info)
            parsed = replace(parsed, embeds=placed)
        return ReadPrompt(
            ids, parsed, text, None if asked.reasoning is None else reasoning_after(asked.reasoning, shown)
        )

    def _slot_ids(self, letters: Iterable[str]) -> dict[str, int]:
        """Return an id for each letter of embeddings, which no token has."""
        first = max(self._info.vocab_size, self._info.num_ids)
        return {letter: first + index for index, letter in enumerate(letters)}

    def _tensors(self, slots: Mapping[str, chat.Slot]) -> dict[int, Any]:
        """Return the embeddings of a conversation, by the ids that stand for them.

        Raises:
            PromptError, LimitError: their shape, type or width is wrong, or they are too large, or too long together.
        """
        found: dict[int, Any] = {}
        count = 0
        for letter, token in self._slot_ids(slots).items():
            slot = slots[letter]
            found[token] = embedded_prompt.checked(slot.value, self._info, self._limits, slot.param)
            count += len(found[token])
            # Before the next one is decoded: a few bytes may be a tensor of a megabyte.
            self._checks.length(range(count), (), ())
        return found

    def _check_continuing(self, asked: Chat) -> None:
        if not asked.continue_final_message:
            return
        if asked.add_generation_prompt:
            raise PromptError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                "Set add_generation_prompt to false to continue the last message.",
                param="continue_final_message",
            )
        if self._family.closes:
            raise PromptError(
                f"{self._info.architecture} cannot continue a message: {self._family.closes}.",
                "Leave out continue_final_message, and ask for the rest in words.",
                param="continue_final_message",
            )

    def _tokenized(
        self, rendered: str, talk: chat.ParsedChat, most: int | None, *, adds: bool
    ) -> tuple[PromptText | None, Sequence[int]]:
        """Return the text to encode; or None and the ids, if the family writes ids.

        With `adds`, the text gets the tokenizer's special tokens, even if the template wrote them.
        """
        ends = True
        if self._family.rewrite_chat is not None:
            rewritten = self._family.rewrite_chat(rendered, count_by_modality(talk.media))
            if not isinstance(rewritten, str):
                ids = self._of_pieces(
                    rewritten,
                    lambda piece, *, ends: self._encode(PromptText(piece, talk.stand_ins, ends=ends, most=most), {}),
                    begun=self._begun(rendered),
                    adds=adds,
                )
                return None, ids
            rendered, ends = rewritten, self._family.rewritten_ends != "written"
        rendered = self._family.begun(rendered, self._tokenizer.inner)
        # A processor adds the tokenizer's special tokens unless the template wrote the first of them; a bare tokenizer
        # never does.
        ends = adds or (ends and bool(self._info.modalities) and not self._begun(rendered))
        return PromptText(rendered, talk.stand_ins, ends, most), ()

    def _begun(self, rendered: str) -> bool:
        """Whether a template wrote the token that begins texts."""
        bos = getattr(self._tokenizer.inner, "bos_token", None)
        return bool(bos and rendered.startswith(bos))

    def _of_pieces(
        self, pieces: Sequence[str | ItemPlace], encode: _Encode, begun: bool = False, *, adds: bool = False
    ) -> list[int]:
        """Return the ids of pieces of a text.

        Args:
            pieces: as FamilyInputs.rewrite returns them.
            encode: a piece, and whether it gets the tokenizer's special tokens -> its ids.
            begun: whether the text has the token that begins it.
            adds: whether the first piece gets the tokenizer's special tokens in any case.
        """
        each = self._family.rewritten_ends == "each piece"
        first = adds or each or (self._family.rewritten_ends == "first piece" and not begun)
        ids = self._tokenizer.encode_pieces(pieces[:1], partial(encode, ends=first))
        return ids + self._tokenizer.encode_pieces(pieces[1:], partial(encode, ends=each))

    # ------------------------------------------------------------------ text to ids

    def _encode(self, prompt: PromptText, items: ItemsByModality) -> list[int]:
        """Return the ids of a text, with the items' texts around their placeholders."""
        text, ends, most = prompt.text, prompt.ends, prompt.most
        if items:
            text = expand.edged_text(text, items, self._tokenizer.placeholder)
        if prompt.stand_ins is None:
            return self._tokenizer.encode(text, add_special_tokens=ends, most=most)
        control = self._tokenizer.control().with_slots(self._slot_ids(prompt.stand_ins.slots))
        around = self._tokenizer.ends() if ends else ((), ())
        if not len(prompt.stand_ins):
            whole = self._tokenizer.encode(text, add_special_tokens=ends, most=most)
            if not special_tokens.smuggled(whole, text, control, around):
                return whole
        ids = special_tokens.encode_rendered(
            text,
            prompt.stand_ins,
            control,
            self._tokenizer.plain(),
            partial(self._tokenizer.encode, add_special_tokens=False, most=most),
            most,
        )
        return [*around[0], *ids, *around[1]]

    def _example(self, modality: str, number: int = 1) -> str:
        """Return an item's text in a prompt of this family; `number` counts those of its modality, from 1."""
        return self._family.placeholder(modality, number) or self._tokenizer.placeholder(modality)

    # ------------------------------------------------------------------ checks

    def _check_rendered(self, ids: Sequence[int], media: Sequence[MediaRef]) -> None:
        """Check that the template wrote one placeholder per item, and that no other text became one."""
        found, given = expand.count_placeholders(ids, self._tokenizer.places), count_by_modality(media)
        for modality in set(found) | set(given):
            written, items = found.get(modality, 0), given.get(modality, 0)
            if written != items:
                raise TemplateError(
                    f"The chat template wrote {written} placeholders for {items} {modality} items.",
                    or_engine="set a chat_template that writes one per item, or another chat_template_content_format",
                )

    def _cased(self, text: str) -> str:
        """Return a text in lower case, if the checkpoint says that its texts are."""
        return text.lower() if self._info.pooler is not None and self._info.pooler.lowercase else text

    def _check_size(self, text: str, params: SamplingParams | PoolingParams) -> None:
        if params.truncate_prompt_tokens is None:
            self._tokenizer.check_length(len(text), self._config.max_model_len)


def _check_slots(rendered: str, slots: Mapping[str, chat.Slot]) -> None:
    """Check that the template wrote each part of embeddings once.

    Raises:
        TemplateError: it did not.
    """
    for letter, slot in slots.items():
        written = rendered.count(letter)
        if written > 1 or not (written or slot.optional):
            raise TemplateError(
                f"The chat template wrote the embeddings of {slot.param} {written} times.",
                or_engine="set a chat_template that writes them once",
            )


def _ids_of(tokens: Sequence[str], tokenizer: PromptTokenizer, info: ModelInfo) -> Mapping[str, int]:
    """Return the ids of added tokens, also where the engine runs without a tokenizer."""
    if tokenizer.inner is None:
        known = added_tokens(Path(info.path))
        return {token: known[token] for token in tokens if token in known}
    return {token: tokenizer.inner.convert_tokens_to_ids(token) for token in tokens}


def _check_budget(params: SamplingParams | PoolingParams, reasoning: ReasoningFormat | None) -> None:
    """Raise ParamsError if reasoning has a budget, and what delimits the model's reasoning is unknown."""
    budget = params.thinking_token_budget if isinstance(params, SamplingParams) else None
    if budget is not None and budget >= 0 and reasoning is None:
        raise ParamsError(
            "thinking_token_budget needs a conversation with a model whose reasoning is known.",
            "Use chat with a model that reasons, or bound the answer with max_tokens.",
            param="thinking_token_budget",
        )
