"""The sampler's rules written out slowly, one row at a time, in float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from beheld.core.sampling import Sampling


def edited(logits_V: Tensor, params: Sampling, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """The logits that a greedy row takes its argmax of."""
    x = logits_V.double().clone()
    if params.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in params.allowed_token_ids:
                x[token] = -math.inf
    for word in params.bad_words_ids:
        begin = list(word[:-1])
        if len(begin) <= len(output) and list(output[len(output) - len(begin) :]) == begin:
            x[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in params.stop_ids:
            x[token] = -math.inf
    for token, bias in params.logit_bias:
        x[token] += bias
    counts = Counter(output)
    for token in {*prompt, *output}:
        if token < len(x):
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in counts.items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def probabilities(logits_V: Tensor, params: Sampling) -> Tensor:
    """What a row is drawn from, after `edited`."""
    x = logits_V.double() / params.temperature
    p = x.softmax(-1)
    if params.min_p > 0:
        x = x.masked_fill(p < params.min_p * p.max() * (1 - 1e-7), -math.inf)
    if params.top_k > 0:
        kth = x.sort(descending=True).values[min(params.top_k, len(x)) - 1]
        x = x.masked_fill(x < kth, -math.inf)
    if params.top_p < 1:
        p = x.softmax(-1)
        reached = 0.0
        for value in p.sort(descending=True).values.tolist():
            reached += value
            if reached >= params.top_p:
                x = x.masked_fill(p < value, -math.inf)
                break
    return x.softmax(-1)
