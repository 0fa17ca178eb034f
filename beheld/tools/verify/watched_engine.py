"""Beheld's side: one request through the input pipeline and the engine, recorded stage by stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.core.config import EngineArgs
from beheld.core.errors import EngineError
from beheld.core.params import SamplingParams
from beheld.core.request import Request
from beheld.engine.setup import start
from beheld.executor.executor import Executor
from beheld.inputs.pipeline import Chat, InputPipeline, RequestOrder
from beheld.tools.verify import decoding
from beheld.tools.verify.trace import Question, Trace


class WatchedEngine:
    """An engine in this process whose stages are recorded; `close` ends it.

    Raises:
        BeheldError: it cannot start; the message gives the reason.
    """

    def __init__(self, args: EngineArgs) -> None:
        # Without graphs and asynchronous steps, every stage passes where it is recorded.
        args = dataclasses.replace(
            args, enforce_eager=True, async_scheduling=False, enable_prefix_caching=False, max_num_seqs=1, seed=0
        )
        self._setup = start(args)
        try:
            self._pipeline = InputPipeline(self._setup.info, self._setup.config, args)
        except BaseException:
            self._setup.core.executor.close()
            raise

    def close(self) -> None:
        """End the engine and its workers."""
        self._pipeline.close()
        self._setup.core.executor.close()

    def trace(self, question: Question) -> Trace:
        """Answer the question and return the trace.

        Raises:
            BeheldError: it cannot answer; the message gives the reason.
        """
        made = Trace(media_ids=frozenset(self._setup.info.placeholder_ids.values()))
        decoding.note(question, made)
        request = _request(self._pipeline, question)
        made.rendered = request.prompt if question.templated == "chat" else None
        made.prompt_ids = tuple(request.token_ids)
        for span in request.spans:
            for name, feature in span.item.features.items():
                if isinstance(feature, Tensor):
                    made.features.setdefault(name, []).append(feature)
        self._answer(request, made)
        return made

    def logits_after(
        self, question: Question, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[list[Tensor], bool]:
        """Return the logits (V) at each position of an answer of these tokens, whatever this model would answer.

        Args:
            prompt_ids: of another model's prompt, which take the place of this model's own if it holds no media.

        Returns:
            The logits, and whether this model's own prompt has the same ids.

        Raises:
            BeheldError: it cannot answer; the message gives the reason.
        """
        found: list[Tensor] = []
        same = True
        for count in range(len(token_ids)):
            request = _request(self._pipeline, dataclasses.replace(question, max_tokens=1))
            same &= tuple(request.token_ids) == tuple(prompt_ids)
            # Where media stand is counted in this prompt's own ids.
            prompt = request.token_ids if request.spans else prompt_ids
            made = Trace()
            self._answer(dataclasses.replace(request, token_ids=(*prompt, *token_ids[:count])), made)
            found.append(made.logits[0])
        return found, same

    def _answer(self, request: Request, made: Trace) -> None:
        core = self._setup.core
        watch = _Watch(made, len(request.token_ids), core.executor)
        core.add(request)
        while core.scheduler.has_work:
            _, events = core.step(None)
            for event in events:
                if event.error is not None:
                    raise event.error
                made.token_ids += event.token_ids
        watch.finish(request)


def _request(pipeline: InputPipeline, question: Question) -> Request:
    params = SamplingParams(temperature=0, max_tokens=question.max_tokens, ignore_eos=True)
    if question.templated == "plain":
        data = {"multi_modal_data": {kind: list(items) for kind, items in question.media.items()}}
        return pipeline.prepare(RequestOrder({"prompt": question.text, **data}, params, request_id="verify"))
    parts = [{"type": kind, kind: item} for kind, items in question.media.items() for item in items]
    content = [*parts, {"type": "text", "text": question.text}] if parts else question.text
    return pipeline.prepare(RequestOrder(Chat([{"role": "user", "content": content}]), params, request_id="verify"))


class _Watch:
    """Records what the executor computes in a trace."""

    def __init__(self, made: Trace, num_prompt: int, executor: Executor) -> None:
        self._made, self._num_prompt, self._executor = made, num_prompt, executor
        self._embeds: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._logits: list[Tensor] = []
        executor.watch(self._take)

    def _take(self, stage: str, tensor: Tensor) -> None:
        kept = {"embeds": self._embeds, "positions": self._positions, "logits": self._logits}[stage]
        kept.append(tensor.detach().clone().cpu())

    def finish(self, request: Any) -> None:
        """Combine the prompt's steps into one entry, and keep one entry for each later step."""
        if not self._embeds:
            raise EngineError("The engine computed nothing.")
        self._executor.watch(None)
        made, steps, tokens = self._made, 0, 0
        while tokens < self._num_prompt:
            tokens += self._embeds[steps].shape[0]
            steps += 1
        embeds_TH = torch.cat(self._embeds[:steps])
        made.embeds_TH = embeds_TH
        made.positions = [torch.cat(self._positions[:steps], dim=-1), *self._positions[steps:]]
        made.logits = [logits[0].float() for logits in self._logits if logits.shape[0]]
        rows: dict[str, list[Tensor]] = {}
        for span in request.spans:
            found = self._executor.embeddings(span.item.digest)
            if found is not None:
                rows.setdefault(span.item.modality, []).append(found.cpu())
        made.encoded = {modality: torch.cat(parts) for modality, parts in rows.items()}
