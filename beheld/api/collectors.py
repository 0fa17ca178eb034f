"""What collects a request's events into its output: text of a request that samples, numbers of one that pools."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from beheld.core.errors import BeheldError
from beheld.core.outputs import PooledRequestOutput, PoolingOutput, PoolingRequestOutput, RequestOutput, TokenEvent
from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.core.request import FinishReason, Request
from beheld.text.collect import Collector

if TYPE_CHECKING:
    import numpy as np

Params = SamplingParams | PoolingParams
PooledOutput = PooledRequestOutput[Any]
# RequestOutput or PooledRequestOutput, as the request's parameters say.
Output = Any


class RequestCollector(Protocol):
    """Collects the events of one user request."""

    def push(self, event: TokenEvent) -> bool:
        """Add an event; True if the caller must stop the engine's request."""

    @property
    def finished(self) -> bool:
        """True once the output is complete, or the request has failed."""

    def output(self) -> Any:
        """The whole output so far."""

    def delta(self) -> Any:
        """The output with only the new parts since the last call."""


class PooledCollector:
    """Collects the one event of a request that pools.

    Args:
        request_id: the id of the user request.
        request: the resolved request.
    """

    def __init__(self, request_id: str, request: Request) -> None:
        self._request_id = request_id
        self._request = request
        self._event: TokenEvent | None = None

    def push(self, event: TokenEvent) -> bool:
        """See RequestCollector; the engine ends the request itself."""
        self._event = self._event or event
        return False

    @property
    def finished(self) -> bool:
        """See RequestCollector."""
        return self._event is not None

    def output(self) -> PoolingRequestOutput:
        """See RequestCollector."""
        made: PoolingRequestOutput = pooled(self._request_id, self._request, self._event)
        return made

    def delta(self) -> PoolingRequestOutput:
        """See RequestCollector."""
        return self.output()


def pooled(
    request_id: str, request: Request, event: TokenEvent | None, kind: type[PooledOutput] = PoolingRequestOutput
) -> Any:
    """The output of a request that pools, of this kind, from its one event; None: it has not come."""
    values = None if event is None else event.pooled
    return kind(
        request_id=request_id,
        # Without values: not finished, failed or aborted.
        outputs=None if values is None else _outputs(kind, values),
        prompt_token_ids=list(request.token_ids),
        num_cached_tokens=0 if event is None else event.num_cached,
        finished=event is not None,
        prompt=request.prompt,
        lora_request=request.lora,
        media=list(request.receipts),
        error=event.error if event is not None and event.finish is FinishReason.ERROR else None,
    )


def _outputs(kind: Any, values: np.ndarray) -> Any:
    """What `outputs` is of these values, which are a view of those of their whole step."""
    if kind is not PoolingRequestOutput:
        return kind.of_values(values)
    import torch

    return PoolingOutput(torch.from_numpy(values.copy()))


def collector_of(
    request_id: str,
    params: Params,
    requests: Sequence[Request],
    tokenizer: Any | None,
    marks: Collection[str] = (),
    *,
    lazy_prompt: bool = False,
) -> RequestCollector:
    """The collector of a request with these parameters; arguments as for Collector."""
    if isinstance(params, SamplingParams):
        return Collector(request_id, params, requests, tokenizer, marks, lazy_prompt=lazy_prompt)
    return PooledCollector(request_id, requests[0])


def failed(
    request_id: str, params: Params, error: BeheldError, kind: type[PooledOutput] = PoolingRequestOutput
) -> Output:
    """The output of a request that could not be prepared; `kind` is the class if it pools."""
    if isinstance(params, SamplingParams):
        return RequestOutput(request_id, None, None, [], finished=True, error=error)
    return kind(request_id, None, [], error=error)
