"""Seeds for requests without one, and for several answers to one request."""

from __future__ import annotations

from dataclasses import replace

from beheld.core.params import SamplingParams
from beheld.core.pooling_params import PoolingParams
from beheld.core.request import Request
from beheld.core.sampling import Sampling


def mix(seed: int, number: int) -> int:
    """A 63-bit seed from two numbers (the finalizer of SplitMix64: Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def seed_of(params: SamplingParams | PoolingParams, seed: int, number: int) -> int:
    """The seed of a request: its own, or one made of the engine's and the request's number."""
    own = params.seed if isinstance(params, SamplingParams) else None
    return mix(seed, number) if own is None else own


def answers(first: Request, params: SamplingParams | PoolingParams, seed: int) -> list[Request]:
    """One request per answer: the same prompt, with a different seed for each but the first.

    The first alone reports on the prompt: the others find it in the cache, where it has no logits.
    """
    if not isinstance(params, SamplingParams) or params.n == 1:
        return [first]
    return [_numbered(first, number, seed) for number in range(params.n)]


def _numbered(request: Request, number: int, seed: int) -> Request:
    params = request.params
    assert isinstance(params, Sampling), "several answers need sampling"
    if number:
        params = replace(params, seed=mix(seed, number), prompt_logprobs=None, prompt_ids=None)
    return replace(request, id=f"{request.id}#{number}", params=params)
