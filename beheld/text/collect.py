"""From token events to what users see: whole outputs, or what is new since the last look."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from beheld.core.errors import BeheldError, ParamsError
from beheld.core.outputs import CompletionOutput, Logprob, RequestOutput, TokenEvent
from beheld.core.params import SamplingParams
from beheld.core.plan import TokenLogprobs
from beheld.core.request import FinishReason, Request
from beheld.text.detokenize import Detokenizer, known_texts, token_text
from beheld.text.stop import StopFinder

# Tokens whose text nobody waits for are decoded so many at a time: a decoder's calls cost more than their tokens, and
# more would hold up the end of a crowd of answers.
_AT_A_TIME = 16
# After how many tokens an answer's first are decoded: answers that began together take their turns at different steps.
_first_time = itertools.cycle(range(1, _AT_A_TIME + 1))


class Answer:
    """One of a request's answers while it grows."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Any | None, marks: Collection[str] = ()) -> None:
        self._params = params
        self._candidates = _Candidates(tokenizer)
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
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        # How much of text and tokens `delta` has told, and whether of the end.
        self._told = (0, 0, False)

    @property
    def finished(self) -> bool:
        """True once the answer is complete."""
        return self._finish_reason is not None

    def push(self, event: TokenEvent) -> bool:
        """Take an event in; True if it completed a stop string and the engine does not know yet of the end."""
        if self.finished:
            return False
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
            self._stop_reason = event.stop_id
        return found is not None and self._end_with(found, event)

    def _end_with(self, found: str, event: TokenEvent) -> bool:
        """The answer has ended with a stop string; True unless the engine has ended it too."""
        self._finish_reason = str(FinishReason.STOP)
        self._stop_reason = found
        return event.finish is None

    def _take(
        self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], finish: FinishReason | None
    ) -> str | None:
        """Append tokens, and decode them if it is time to; the stop string that was found, if one was."""
        self._token_ids += token_ids
        if logprobs and self._params.logprobs is not None:
            for entry in logprobs:
                self._logprobs.append(self._candidates.of(entry, self._params.logprobs))
                self._cumulative += entry.logprob
        if self._detokenizer is None:
            return None
        # The token that ended the answer is kept as an id; its text is shown only where the user asked for it.
        silent = finish is FinishReason.STOP and not self._params.include_stop_str_in_output
        self._undecoded += token_ids[:-1] if silent else token_ids
        if finish is None and not self._params.stop and len(self._undecoded) < self._most_undecoded:
            return None
        return self._decode(last=finish is not None)

    def _decode(self, *, last: bool = False) -> str | None:
        """Bring the text up to date with the tokens; the stop string that was found, if one was."""
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
            assert found is None, "with stop strings, every token is decoded as it comes"

    def output(self) -> CompletionOutput:
        """Everything so far."""
        self._decode_rest()
        return self._output(0, 0)

    def delta(self) -> CompletionOutput | None:
        """What came since the last call; None if nothing did."""
        self._decode_rest()
        now = (len(self._text), len(self._token_ids), self.finished)
        if now == self._told:
            return None
        num_characters, num_tokens, _ = self._told
        self._told = now
        return self._output(num_characters, num_tokens)

    def _output(self, num_characters: int, num_tokens: int) -> CompletionOutput:
        wanted = self._params.logprobs is not None
        return CompletionOutput(
            index=self._index,
            text=self._text[num_characters:],
            token_ids=self._token_ids[num_tokens:],
            cumulative_logprob=self._cumulative if wanted else None,
            logprobs=self._logprobs[num_tokens:] if wanted else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )


class Collector:
    """Gathers the events of one user's request: `params.n` answers, each a request of the engine.

    Args:
        request_id: the user's id of it all.
        params: what the user asked for.
        requests: the sealed requests, one per answer, in the order of the answers.
        tokenizer: of transformers; None leaves texts empty.
        marks: special tokens that texts show where they come first, even if they skip special tokens.

    Raises:
        ParamsError: stop strings were given, but there is no tokenizer.
    """

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        requests: Sequence[Request],
        tokenizer: Any | None,
        marks: Collection[str] = (),
    ) -> None:
        assert len(requests) == params.n
        if params.stop and tokenizer is None:
            raise ParamsError("Stop strings need a tokenizer.", "Use stop_token_ids instead.", param="stop")
        self._request_id = request_id
        self._params = params
        self._request = requests[0]
        self._tokenizer = tokenizer
        self._answers = {request.id: Answer(index, params, tokenizer, marks) for index, request in enumerate(requests)}
        assert len(self._answers) == len(requests), "two answers have the same id"
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._told_prompt_logprobs = False
        self._num_cached = 0
        self._error: BeheldError | None = None
        # One list for all deltas: a copy of a long prompt for each token would cost more than the token.
        self._prompt_ids = list(requests[0].token_ids)

    def push(self, event: TokenEvent) -> bool:
        """Take in an event of one of the answers.

        Returns True if a stop string was found: the answer is complete here, and the engine must be told to stop.
        Events that come after an answer's end change nothing.
        """
        if event.finish is FinishReason.ERROR:
            assert event.error is not None
            self._error = self._error or event.error
            return False
        if event.request_id == self._request.id:
            # The other answers find the first one's prompt in the cache; that says nothing about the user's prompt.
            self._num_cached = max(self._num_cached, event.num_cached)
        if event.prompt_logprobs is not None and self._prompt_logprobs is None:
            wanted = self._params.prompt_logprobs or 0
            candidates = _Candidates(self._tokenizer)
            positions = (candidates.of(entry, wanted) for entry in event.prompt_logprobs)
            self._prompt_logprobs = [None, *positions]
        return self._answers[event.request_id].push(event)

    @property
    def finished(self) -> bool:
        """True once every answer is complete, or the request has failed."""
        return self._error is not None or all(answer.finished for answer in self._answers.values())

    def output(self) -> RequestOutput:
        """Everything so far."""
        answers = [] if self._error is not None else [answer.output() for answer in self._answers.values()]
        return self._output(answers, self._prompt_logprobs, self._prompt_ids.copy())

    def delta(self) -> RequestOutput:
        """What came since the last call: only answers with something new, and of them only that.

        `cumulative_logprob` stays that of the whole answer; the prompt's log-probabilities come once, and its
        ids are the same list each time.
        """
        fresh = [] if self._error is not None else [answer.delta() for answer in self._answers.values()]
        prompt_logprobs = None if self._told_prompt_logprobs else self._prompt_logprobs
        self._told_prompt_logprobs = self._prompt_logprobs is not None
        return self._output([answer for answer in fresh if answer is not None], prompt_logprobs, self._prompt_ids)

    def _output(
        self,
        answers: list[CompletionOutput],
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
        prompt_token_ids: list[int],
    ) -> RequestOutput:
        request = self._request
        for answer in answers:
            answer.lora_request = request.lora
        return RequestOutput(
            request_id=self._request_id,
            prompt=request.prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=answers,
            finished=self.finished,
            prompt_logprobs=None if prompt_logprobs is None else list(prompt_logprobs),
            num_cached_tokens=self._num_cached,
            lora_request=request.lora,
            media=list(request.receipts),
            error=self._error,
        )


class _Candidates:
    """Makes of the device's report of a position what users see."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._known = {} if tokenizer is None else known_texts(tokenizer)

    def of(self, entry: TokenLogprobs, num_top: int) -> dict[int, Logprob]:
        """The token itself and the best `num_top`, the token first."""
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._text(entry.token_id))}
        known = self._known
        top = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        for rank, (token_id, logprob) in enumerate(top, start=1):
            if token_id not in found:
                found[token_id] = Logprob(logprob, rank, known.get(token_id) or self._text(token_id))
        return found

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else token_text(self._tokenizer, token_id)
