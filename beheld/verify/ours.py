"""Our side: one request through the input pipeline and the engine, watched at its stages."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from beheld.core.config import EngineArgs
from beheld.core.errors import EngineError
from beheld.core.params import SamplingParams
from beheld.engine.setup import start
from beheld.inputs.pipeline import InputPipeline
from beheld.verify.trace import Question, Trace


def trace(args: EngineArgs, question: Question) -> Trace:
    """Record what beheld makes of the question.

    Raises:
        BeheldError: it cannot answer; the message says why.
    """
    # One step for the prompt, no graphs and no steps ahead: every stage passes by where it is watched.
    args = dataclasses.replace(
        args, enforce_eager=True, async_scheduling=False, enable_prefix_caching=False, max_num_seqs=1, seed=0
    )
    setup = start(args)
    args.max_num_batched_tokens = setup.config.max_model_len
    pipeline = InputPipeline(setup.info, setup.config, args)
    made = Trace()
    try:
        request = _request(pipeline, question)
        made.rendered = request.prompt if question.templated == "chat" else None
        made.prompt_ids = tuple(request.token_ids)
        made.features = _features([span.item for span in request.spans])
        executor: Any = setup.core.executor
        watch = _Watch(made, len(request.token_ids), executor.runner)
        setup.core.add(request)
        while setup.core.has_work:
            _, events = setup.core.step(None)
            for event in events:
                if event.error is not None:
                    raise event.error
                if event.token_id is not None:
                    made.token_ids.append(event.token_id)
        watch.finish(request)
    finally:
        pipeline.close()
        setup.core.executor.close()
    return made


def _request(pipeline: InputPipeline, question: Question) -> Any:
    params = SamplingParams(temperature=0, max_tokens=question.max_tokens, ignore_eos=True)
    if question.templated == "plain":
        data = {"multi_modal_data": {"image": list(question.images)}} if question.images else {}
        return pipeline.prepare({"prompt": question.text, **data}, params, request_id="verify")
    content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in question.images]
    content.append({"type": "text", "text": question.text})
    messages = [{"role": "user", "content": content if question.images else question.text}]
    return pipeline.prepare_chat(messages, params, request_id="verify")


def _features(items: list[Any]) -> dict[str, Tensor]:
    """The items' tensors one after the other, where they can be."""
    made = {}
    for name in dict.fromkeys(name for item in items for name in item.features):
        parts = [item.features[name] for item in items if name in item.features]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if tensors and len(tensors) == len(parts) and len({part.shape[1:] for part in tensors}) == 1:
            made[name] = torch.cat(tensors)
    return made


class _Watch:
    """Writes what the runner computes into a trace."""

    def __init__(self, made: Trace, num_prompt: int, runner: Any) -> None:
        self._made, self._num_prompt, self._runner = made, num_prompt, runner
        self._embeds: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._logits: list[Tensor] = []
        runner.watch = self._take

    def _take(self, stage: str, tensor: Tensor) -> None:
        kept = {"embeds": self._embeds, "positions": self._positions, "logits": self._logits}[stage]
        kept.append(tensor.detach().clone().cpu())

    def finish(self, request: Any) -> None:
        """Put the steps together: those of the prompt are one entry, each later one its own."""
        if not self._embeds:
            raise EngineError("Nothing was computed.")
        self._runner.watch = None
        made, steps, tokens = self._made, 0, 0
        while tokens < self._num_prompt:
            tokens += self._embeds[steps].shape[0]
            steps += 1
        embeds_TH = torch.cat(self._embeds[:steps])
        made.embeds_TH = embeds_TH
        made.positions = [torch.cat(self._positions[:steps], dim=-1), *self._positions[steps:]]
        made.logits = [logits[0].float() for logits in self._logits if logits.shape[0]]
        made.encoded_EH = self._encoded(request)

    def _encoded(self, request: Any) -> Tensor | None:
        """What the tower gave for the items; None if it is not kept by itself."""
        rows = []
        for span in request.spans:
            found = self._runner.encoder.known(span.item.digest)
            if found is None:
                return None
            rows.append(found.cpu())
        return torch.cat(rows) if rows else None
