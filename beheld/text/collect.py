"""Collects token events into outputs: the whole answer, or its new part."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from beheld.core.errors import BeheldError, ParamsError
from beheld.core.flat_logprobs import FlatLogprobs
from beheld.core.grounding import AnswerGrounding, GroundedObject
from beheld.core.media import MediaReceipt
from beheld.core.outputs import CompletionOutput, Logprob, RequestOutput, TokenEvent
from beheld.core.params import SamplingParams
from beheld.core.plan import PromptLogprobs, TokenLogprobs
from beheld.core.request import FinishReason, Request
from beheld.core.sampling import Sampling
from beheld.text import grounding
from beheld.text.detokenize import Detokenizer
from beheld.text.logprob_entries import AnswerColumns, AnswerEntries, Candidates, PromptColumnEntries
from beheld.text.stop import StopFinder

if TYPE_CHECKING:
    import numpy as np

# Tokens whose text is not needed yet are decoded in batches of this size: a decoder's calls cost more than their
# tokens, and larger batches would delay the end of many simultaneous answers.
_AT_A_TIME = 16
# Size of an answer's first batch: answers that started together decode at different steps.
_first_time = itertools.cycle(range(1, _AT_A_TIME + 1))
_REPEATS = "an answer was ended because its end repeats itself"


class Answer:
    """One of a request's answers while it grows."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Any | None,
        marks: Collection[str] = (),
        places: AnswerGrounding | None = None,
        prompt: str | None = None,
        *,
        lazy: bool = False,
        num_top: int = 0,
    ) -> None:
        self._params = params
        # Candidates of each token besides itself; -1 in the user's parameters is resolved.
        self._num_top = max(num_top, params.logprobs or 0)
        self._reports = params.logprobs is not None or bool(params.logprob_token_ids)
        self._tokenizer = tokenizer
        self._lazy = lazy
        self._places = places
        self._prompt = prompt
        self._located: list[GroundedObject] | None = None
        # Writes the texts of tokens.
        self._shown_by = tokenizer if params.detokenize else None
        self._columns = AnswerColumns()
        # Of tokens from `_first_entry` on, those that were made.
        self._entries: list[dict[int, Logprob]] = []
        self._first_entry = 0
        self._candidates = self._new_candidates()
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, marks=marks)
            if params.detokenize and tokenizer is not None
            else None
        )
        self._finder = StopFinder(params.stop or (), include=params.include_stop_str_in_output)
        self._index = index
        self._text = ""
        self._token_ids: list[int] = []
        self._undecoded: list[int] = []
        self._most_undecoded = next(_first_time)
        self._cumulative = 0.0
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        # What `delta` has returned so far: numbers of characters and tokens, and whether the end.
        self._reported = (0, 0, False)

    @property
    def begun(self) -> bool:
        """True once there is a token, or the answer is complete without one."""
        return bool(self._token_ids) or self.finished

    @property
    def finished(self) -> bool:
        """True once the answer is complete."""
        return self._finish_reason is not None

    @property
    def repeats(self) -> bool:
        """True once the answer was ended because its end repeats itself."""
        return self._finish_reason == FinishReason.REPETITION

    def push(self, event: TokenEvent) -> bool:
        """Add an event; True if it completes a stop string and the engine has not ended the answer itself."""
        if self.finished:
            return False
        if self._params.max_tokens == 0 and event.token_ids:
            # The engine computes one, as only that ends a request.
            event = event._replace(token_ids=(), logprobs=(), finish=FinishReason.LENGTH, stop_id=None)
        ids = event.token_ids
        if self._params.stop and len(ids) > 1:
            # The answer ends with the token that completes a stop string.
            for count in range(1, len(ids)):
                found = self._take(ids[count - 1 : count], event.logprobs[count - 1 : count], None)
                if found is not None:
                    return self._end_with(found, event)
            found = self._take(ids[-1:], event.logprobs[-1:], event.finish)
        else:
            found = self._take(ids, event.logprobs, event.finish)
        if event.finish is not None:
            self._finish_reason = str(event.finish)
            repeats = event.finish is FinishReason.REPETITION
            self._stop_reason = "repetition_detected" if repeats else event.stop_id
        return found is not None and self._end_with(found, event)

    def _end_with(self, found: str, event: TokenEvent) -> bool:
        """End the answer at a stop string; True unless the engine has ended it too."""
        self._finish_reason = str(FinishReason.STOP)
        self._stop_reason = found
        return event.finish is None

    def _take(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], finish: FinishReason | None
    ) -> str | None:
        """Append tokens and decode them if a batch is complete; returns the stop string that was found, or None."""
        self._token_ids += token_ids
        if logprobs and self._reports:
            for entry in logprobs:
                self._columns.append(entry)
                self._cumulative += entry.logprob
        if self._detokenizer is None:
            return None
        # The token that ended the answer stays in the ids; its text is included only if the user asked for it.
        silent = finish is FinishReason.STOP and not self._params.include_stop_str_in_output
        self._undecoded += token_ids[:-1] if silent else token_ids
        if finish is None and not self._params.stop and len(self._undecoded) < self._most_undecoded:
            return None
        return self._decode(last=finish is not None)

    def _decode(self, *, last: bool = False) -> str | None:
        """Decode the pending tokens; returns the stop string that was found, or None."""
        if self._detokenizer is None:
            return None
        text = self._detokenizer.push(*self._undecoded)
        self._undecoded.clear()
        self._most_undecoded = _AT_A_TIME
        if last:
            text += self._detokenizer.finish()
        certain, found = self._finder.push(text, watch=len(self._token_ids) > self._params.min_tokens)
        self._text += certain
        if last and found is None:
            self._text += self._finder.finish()
        return found

    def _decode_rest(self) -> None:
        if self._undecoded:
            found = self._decode()
            assert found is None, "with stop strings, every token is decoded at once"

    def output(self) -> CompletionOutput:
        """The whole answer so far."""
        self._decode_rest()
        return self._output(0, 0, self._whole_logprobs())

    def delta(self) -> CompletionOutput | None:
        """The new part since the last call, or None."""
        self._decode_rest()
        now = (len(self._text), len(self._token_ids), self.finished)
        if now == self._reported:
            return None
        num_characters, num_tokens, _ = self._reported
        self._reported = now
        if not self._reports:
            return self._output(num_characters, num_tokens, None)
        fresh = self._made(num_tokens)
        # A later part does not need them again.
        self._first_entry, self._entries = len(self._columns), []
        return self._output(num_characters, num_tokens, fresh)

    def _new_candidates(self) -> Candidates:
        return Candidates(self._shown_by, ranked=not self._params.logprob_token_ids)

    def _whole_logprobs(self) -> Any:
        """Entries of all tokens; of a finished answer they are made when they are read, if the caller wants that."""
        if self._lazy and self.finished:
            ranked = not self._params.logprob_token_ids
            return AnswerEntries(self._columns, self._num_top, self._shown_by, ranked=ranked)
        return self._made(0)

    def _made(self, start: int) -> Any:
        """Entries of the tokens from `start` on; each is made once, unless it was let go."""
        if self._params.flat_logprobs:
            return self._flat(start)
        if start < self._first_entry:
            self._first_entry, self._entries, self._candidates = 0, [], self._new_candidates()
        next_entry = self._first_entry + len(self._entries)
        for entry in self._columns.rows(next_entry, len(self._columns)):
            self._entries.append(self._candidates.of(entry, self._num_top))
        return self._entries[start - self._first_entry :]

    def _flat(self, start: int) -> FlatLogprobs:
        """The same in a flat container, which the caller has for itself."""
        made = FlatLogprobs()
        if start == 0:
            self._candidates = self._new_candidates()
        for entry in self._columns.rows(start, len(self._columns)):
            self._candidates.append_to(made, entry, self._num_top)
        return made

    def _output(self, num_characters: int, num_tokens: int, logprobs: Any) -> CompletionOutput:
        wanted = self._reports
        return CompletionOutput(
            index=self._index,
            text=self._text[num_characters:],
            token_ids=self._token_ids[num_tokens:],
            cumulative_logprob=self._cumulative if wanted else None,
            logprobs=logprobs if wanted else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            grounding=self._grounding(),
        )

    def _grounding(self) -> list[GroundedObject] | None:
        """What the finished answer located; None if it is not finished, or nobody asks.

        Its ids are decoded anew: some notations are made of special tokens, which the text may leave out.
        """
        if self._places is None or self._tokenizer is None or not self.finished:
            return None
        if self._located is None:
            text = str(self._tokenizer.decode(self._token_ids, skip_special_tokens=False))
            self._located = grounding.read(text, self._places, self._prompt)
        return self._located


def _resolved(request: Request) -> Sampling:
    assert isinstance(request.params, Sampling), "a request that pools has no answers"
    return request.params


class Collector:
    """Collects the events of one user request, which has `params.n` answers; each is an engine request.

    Args:
        request_id: the id of the user request.
        params: the user's sampling parameters.
        requests: the resolved requests, one per answer, in order.
        tokenizer: from transformers; None leaves texts empty.
        marks: special tokens whose first occurrence is in the text even if special tokens are skipped.
        lazy_prompt: outputs have `prompt_entries` in place of `prompt_logprobs`, and the log-probabilities of a whole
            answer are made when they are read.

    Raises:
        ParamsError: there are stop strings but no tokenizer.
    """

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        requests: Sequence[Request],
        tokenizer: Any | None,
        marks: Collection[str] = (),
        *,
        lazy_prompt: bool = False,
    ) -> None:
        assert len(requests) == params.n
        if params.stop and tokenizer is None:
            raise ParamsError("Stop strings need a tokenizer.", "Use stop_token_ids instead.", param="stop")
        self._request_id = request_id
        self._params = params
        self._request = requests[0]
        self._tokenizer = tokenizer
        self._marks = marks
        self._lazy_prompt = lazy_prompt
        self._requests = {request.id: (index, request) for index, request in enumerate(requests)}
        assert len(self._requests) == len(requests), "two answers with the same id"
        self._answers = {name: self._new_answer(name) for name in self._requests}
        # Columns, until they are asked for: as objects they take far more memory.
        self._prompt: PromptLogprobs | None = None
        self._prompt_entries: PromptColumnEntries | None = None
        self._prompt_logprobs: Any = None
        self._reported_prompt_logprobs = False
        # The first answer alone brings it, and others may be ahead of that one.
        self._awaits_prompt = params.n > 1 and _resolved(self._request).reports_from is not None
        self._num_cached = 0
        self._num_external = 0
        self._error: BeheldError | None = None
        # One list for all deltas: copying a long prompt for each token would cost more than the token.
        self._prompt_ids = list(requests[0].token_ids)

    def _new_answer(self, request_id: str) -> Answer:
        """The answer of one of the requests, without a token."""
        index, request = self._requests[request_id]
        return Answer(
            index,
            self._params,
            self._tokenizer,
            self._marks,
            request.grounding,
            request.prompt,
            lazy=self._lazy_prompt,
            num_top=_resolved(request).logprobs or 0,
        )

    def push(self, event: TokenEvent) -> bool:
        """Add an event of one of the answers.

        Returns True if it completes a stop string: the caller must then stop the engine's request. Events after an
        answer's end are ignored. An event with `restarted` empties an answer that has not ended.
        """
        if event.restarted:
            if not self._answers[event.request_id].finished:
                self._answers[event.request_id] = self._new_answer(event.request_id)
                if event.request_id == self._request.id:
                    self._num_cached = self._num_external = 0
            return False
        if event.finish is FinishReason.ERROR:
            assert event.error is not None
            self._error = self._error or event.error
            return False
        if event.request_id == self._request.id:
            # The other answers always hit the first one's prompt in the cache, which says nothing about the user's
            # prompt.
            self._num_cached = max(self._num_cached, event.num_cached)
            self._num_external = max(self._num_external, event.num_external)
        if event.prompt_logprobs is not None and self._prompt is None:
            self._prompt = event.prompt_logprobs
            if self._params.prompt_logprobs is not None:
                tokenizer = self._tokenizer if self._params.detokenize else None
                num_top = max(_resolved(self._request).prompt_logprobs or 0, self._params.prompt_logprobs)
                self._prompt_entries = PromptColumnEntries(event.prompt_logprobs, num_top, tokenizer)
        return self._answers[event.request_id].push(event)

    @property
    def finished(self) -> bool:
        """True once every answer is complete, or the request has failed."""
        if self._error is not None:
            return True
        # Asked at each token: a generator would cost more than the question.
        for answer in self._answers.values():  # noqa: SIM110
            if not answer.finished:
                return False
        return True

    def output(self) -> RequestOutput:
        """The whole output so far."""
        answers = [] if self._error is not None else [answer.output() for answer in self._answers.values()]
        return self._output(answers, self._prompt_ids.copy(), tells_prompt=True)

    def delta(self) -> RequestOutput:
        """The output with only the new parts since the last call, and only of answers that have one.

        `cumulative_logprob` is that of the whole answer. The prompt's log-probabilities come once, before any
        answer; its ids are the same list each time.
        """
        answers: Iterable[Answer] = self._answers.values()
        if self._awaits_prompt:
            first = self._answers[self._request.id]
            self._awaits_prompt = self._prompt is None and not first.begun
            if self._awaits_prompt:
                answers = ()
        fresh = [] if self._error is not None else [answer.delta() for answer in answers]
        tells_prompt = not self._reported_prompt_logprobs
        self._reported_prompt_logprobs = self._prompt is not None
        present = [answer for answer in fresh if answer is not None]
        return self._output(present, self._prompt_ids, tells_prompt=tells_prompt)

    def _of_named(self) -> np.ndarray | None:
        """Log-probabilities of the tokens that are named at positions of the prompt, without earlier positions."""
        named = _resolved(self._request).prompt_ids
        if named is None or self._prompt is None or self._prompt.named_logprobs is None:
            return None
        return self._prompt.named_logprobs[-len(named.ids_TN) :].copy()

    def _receipts(self) -> list[MediaReceipt]:
        """What the model saw; they also say if an answer was ended because it repeats itself."""
        receipts = self._request.receipts
        if not receipts:
            return []
        if any(answer.repeats for answer in self._answers.values()):
            return [replace(receipt, lost=(*receipt.lost, _REPEATS)) for receipt in receipts]
        return list(receipts)

    def _output(
        self, answers: list[CompletionOutput], prompt_token_ids: list[int], *, tells_prompt: bool
    ) -> RequestOutput:
        """The output with these answers, and the prompt's log-probabilities if there are any and it tells them."""
        request = self._request
        entries = self._prompt_entries if tells_prompt else None
        if entries is not None and not self._lazy_prompt and self._prompt_logprobs is None:
            self._prompt_logprobs = entries.flat() if self._params.flat_logprobs else list(entries)
        for answer in answers:
            answer.lora_request = request.lora
        return RequestOutput(
            request_id=self._request_id,
            prompt=request.prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=answers,
            finished=self.finished,
            prompt_logprobs=None if entries is None or self._prompt_logprobs is None else self._prompt_logprobs[:],
            num_cached_tokens=self._num_cached,
            num_external_tokens=self._num_external,
            lora_request=request.lora,
            media=self._receipts(),
            error=self._error,
            prompt_entries=entries if self._lazy_prompt else None,
            prompt_token_id_logprobs=self._of_named() if tells_prompt else None,
        )
