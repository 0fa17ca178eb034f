"""Cross-attention to states of media items, such as images, or of an encoder.

Tokens that attend to the same states form a run, whichever sequences they belong to. Every token of a run sees every
state of the run, so no mask is needed.

Shapes: T tokens of the step, P tokens of a run, H query heads, K key-value heads, C head size, E states, L layers of
the cross group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from beheld.attention.backend import Further


@dataclass(frozen=True)
class CrossView:
    """The positions of a sequence that attend to an item.

    Attributes:
        start, stop: the positions; to the end of the answer if `stop` is None.
        count: how many of its first states they see.
    """

    start: int
    stop: int | None
    count: int

    def covers(self, position: int) -> bool:
        """Return whether the token at `position` attends to the item."""
        return self.start <= position and (self.stop is None or position < self.stop)


@dataclass(eq=False)
class CrossRun:
    """Tokens of a step that attend to the same states.

    Attributes:
        ranges: start and stop of one or more ranges of the step's tokens.
        states: keys and values of each item, (E, L, 2, K, C); per layer, keys are contiguous, and so are values.
    """

    ranges: tuple[tuple[int, int], ...]
    states: tuple[Tensor, ...]
    _index_P: Tensor | None = field(default=None, init=False)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in the run."""
        return sum([stop - start for start, stop in self.ranges])

    def place(self, device: torch.device) -> slice | Tensor:
        """Return the tokens as an index: a slice if contiguous, else int64 indices on `device`, made once."""
        if len(self.ranges) == 1:
            return slice(*self.ranges[0])
        if self._index_P is None:
            index_P = torch.cat([torch.arange(start, stop) for start, stop in self.ranges])
            self._index_P = index_P.to(device, non_blocking=True)
        return self._index_P


@dataclass(eq=False)
class CrossMetadata:
    """The states that the tokens of one step attend to.

    Attributes:
        runs: every token that attends to states is in one of them.
        sighted_T: float32, 1.0 for tokens with an item to see; 0.0 for tokens of sequences without items, and for
            tokens that attend to all items because none precedes them.
        extra: what a backend prepares once per step for all layers of the group.
    """

    runs: tuple[CrossRun, ...]
    sighted_T: Tensor
    extra: dict[str, Any] = field(default_factory=dict)


def read_states(runs: Sequence[CrossRun], index: int, places_T: Tensor) -> Tensor:
    """Return the state at each token's place, (T, 2, K, C), in layer `index` of the group; zero where there is none.

    Args:
        runs: of one item each.
        places_T: indices into the states of the token's item.
    """
    first = runs[0].states[0]
    out = first.new_zeros((len(places_T), *first.shape[2:]))
    for run in runs:
        (states,) = run.states
        tokens = run.place(places_T.device)
        wanted_P = places_T[tokens]
        found = states[wanted_P.clamp(max=len(states) - 1), index]
        out[tokens] = found * (wanted_P < len(states))[:, None, None, None]
    return out


class CrossBackend(Protocol):
    """Computes attention to states."""

    name: str

    def attend(self, q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Tensor:
        """Attend every token to its run's states in layer `index` of the group; zero for tokens without a run."""

    def attend_with_sums(self, q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Further:
        """Attend likewise, for a layer whose softmax also covers positions."""


class SDPACross:
    """Cross-attention by one scaled_dot_product_attention call per run, without copying states."""

    name = "sdpa"

    def attend(self, q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Tensor:
        """See CrossBackend; returns (T, H, C)."""
        out_THC = torch.zeros_like(q_THC)
        _attend_runs(q_THC, out_THC, metadata.runs, index, scale)
        return out_THC

    def attend_with_sums(self, q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Further:
        """See CrossBackend."""
        return attend_with_sums(q_THC, index, metadata, scale)


@dataclass(frozen=True, eq=False)
class _Stack:
    """States of B one-token runs, padded to one length and copied into one tensor.

    Attributes:
        states: those of each run; kept, so that no other tensor can be allocated at their addresses.
        keys_LBKCE, values_LBKEC: of all L layers.
        mask_B11E: added to scores: 0, or minus infinity for padding; None if all runs are equally long.
    """

    states: tuple[tuple[Tensor, ...], ...]
    keys_LBKCE: Tensor
    values_LBKEC: Tensor
    mask_B11E: Tensor | None

    def holds(self, runs: Sequence[CrossRun]) -> bool:
        """Return whether the stack was made of the states that these runs attend to."""
        return len(runs) == len(self.states) and all(
            len(own) == len(run.states) and all(map(_same, own, run.states))
            for own, run in zip(self.states, runs, strict=True)
        )


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two views show the same states."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


# Memory that a stack may take in addition to the states themselves.
_STACK_BYTES = 64 << 20


class StackedCross:
    """Cross-attention on a CPU: decoding tokens attend in one call, over a stacked copy of their states.

    The copy is kept while the states stay the same. Separate calls for eight such runs took a seventh of a small
    Florence-2's time. Where the copy would be large, each call is long enough by itself, and runs are computed as in
    SDPACross.
    """

    name = "stacked"

    def __init__(self) -> None:
        self._kept: _Stack | None = None

    def attend(self, q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Tensor:
        """See CrossBackend; returns (T, H, C)."""
        stack, tokens_B, rest = self._stack_of(metadata, len(q_THC))
        if stack is None:
            out_THC = torch.zeros_like(q_THC)
        else:
            out_BHC = _attend_stack(q_THC if tokens_B is None else q_THC[tokens_B], stack, index, scale)
            out_THC = out_BHC if tokens_B is None else torch.zeros_like(q_THC).index_copy_(0, tokens_B, out_BHC)
        _attend_runs(q_THC, out_THC, rest, index, scale)
        return out_THC

    def attend_with_sums(self, q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Further:
        """See CrossBackend."""
        if q_THC.dtype != torch.float32:
            # Products of 16-bit numbers would round the scores of a stack otherwise than those of a run.
            return attend_with_sums(q_THC, index, metadata, scale)
        stack, tokens_B, rest = self._stack_of(metadata, len(q_THC))
        if stack is None:
            return attend_with_sums(q_THC, index, metadata, scale)
        made = _attend_stack_with_sums(q_THC if tokens_B is None else q_THC[tokens_B], stack, index, scale)
        if tokens_B is None:
            return made
        further = _nothing_further(q_THC)
        further.sums_TH[tokens_B], further.values_THC[tokens_B] = made.sums_TH, made.values_THC
        _attend_runs_with_sums(q_THC, further, rest, index, scale)
        return further

    def _stack_of(
        self, metadata: CrossMetadata, num_tokens: int
    ) -> tuple[_Stack | None, Tensor | None, Sequence[CrossRun]]:
        """Return what `_prepared` makes, once for all layers of a step."""
        if "stack" not in metadata.extra:
            metadata.extra["stack"] = self._prepared(metadata.runs, num_tokens)
        made: tuple[_Stack | None, Tensor | None, Sequence[CrossRun]] = metadata.extra["stack"]
        return made

    def _prepared(
        self, runs: Sequence[CrossRun], num_tokens: int
    ) -> tuple[_Stack | None, Tensor | None, Sequence[CrossRun]]:
        """Return the stack, its tokens (None for all of the step's, in order), and the runs outside it."""
        single = [run for run in runs if run.num_tokens == 1]
        if self._kept is None or not self._kept.holds(single):
            # Dropped before the new stack is made: two never exist at once.
            self._kept = None
            if len(single) < 2 or _stacked_bytes(single) > _STACK_BYTES:
                return None, None, runs
            self._kept = _stacked(single)
        tokens = [run.ranges[0][0] for run in single]
        rest = [run for run in runs if run.num_tokens != 1]
        return self._kept, None if tokens == list(range(num_tokens)) else torch.tensor(tokens), rest


def _stacked_bytes(runs: Sequence[CrossRun]) -> int:
    longest = max(sum(len(item) for item in run.states) for run in runs)
    first = runs[0].states[0]
    return len(runs) * longest * first[0].numel() * first.element_size()


def _stacked(runs: Sequence[CrossRun]) -> _Stack:
    lengths = [sum(len(item) for item in run.states) for run in runs]
    longest, first = max(lengths), runs[0].states[0]
    L, _, K, C = first.shape[1:]
    keys_LBKCE = first.new_zeros((L, len(runs), K, C, longest))
    values_LBKEC = first.new_zeros((L, len(runs), K, longest, C))
    for b, run in enumerate(runs):
        begin = 0
        for item in run.states:
            end = begin + len(item)
            keys_LBKCE[:, b, ..., begin:end] = item[:, :, 0].permute(1, 2, 3, 0)
            values_LBKEC[:, b, :, begin:end] = item[:, :, 1].permute(1, 2, 0, 3)
            begin = end
    mask_B11E = None
    if min(lengths) < longest:
        hidden_BE = torch.arange(longest) >= torch.tensor(lengths).unsqueeze(1)
        mask_B11E = torch.zeros(hidden_BE.shape, dtype=first.dtype).masked_fill_(hidden_BE, float("-inf"))[
            :, None, None
        ]
    return _Stack(tuple(run.states for run in runs), keys_LBKCE, values_LBKEC, mask_B11E)


def _attend_stack(q_BHC: Tensor, stack: _Stack, index: int, scale: float) -> Tensor:
    """Attend one token per run; returns (B, H, C)."""
    k_BKCE, v_BKEC, mask_B11E = stack.keys_LBKCE[index], stack.values_LBKEC[index], stack.mask_B11E
    q_BKGC = q_BHC.unflatten(1, (k_BKCE.shape[1], -1))
    if q_BHC.dtype == torch.float32:
        # PyTorch's scaled_dot_product_attention takes up to twice as long for one query.
        return torch.matmul(torch.softmax(_stack_scores(q_BKGC, stack, index, scale), dim=-1), v_BKEC).flatten(1, 2)
    # Products of 16-bit numbers would round the scores.
    mask = None if mask_B11E is None else mask_B11E.expand(-1, -1, q_BKGC.shape[2], -1)
    k_BKEC = k_BKCE.transpose(2, 3)
    return F.scaled_dot_product_attention(q_BKGC, k_BKEC, v_BKEC, attn_mask=mask, scale=scale).flatten(1, 2)


def _stack_scores(q_BKGC: Tensor, stack: _Stack, index: int, scale: float) -> Tensor:
    """Return scores (B, K, G, E) of float32."""
    scores_BKGE = torch.matmul(q_BKGC * scale, stack.keys_LBKCE[index])
    return scores_BKGE if stack.mask_B11E is None else scores_BKGE.add_(stack.mask_B11E)


def _attend_stack_with_sums(q_BHC: Tensor, stack: _Stack, index: int, scale: float) -> Further:
    """Attend one token of float32 per run."""
    v_BKEC = stack.values_LBKEC[index]
    scores_BKGE = _stack_scores(q_BHC.unflatten(1, (v_BKEC.shape[1], -1)), stack, index, scale)
    values_BKGC = torch.matmul(torch.softmax(scores_BKGE, dim=-1), v_BKEC)
    return Further(torch.logsumexp(scores_BKGE, dim=-1).flatten(1), values_BKGC.flatten(1, 2))


def _attend_runs(q_THC: Tensor, out_THC: Tensor, runs: Sequence[CrossRun], index: int, scale: float) -> None:
    """Fill these runs' rows of `out_THC`, one run after another."""
    for run in runs:
        k_EKC, v_EKC = (_joined(run.states, index, part) for part in (0, 1))
        place = run.place(q_THC.device)
        out_THC[place] = _attend(q_THC[place], k_EKC, v_EKC, scale)


def attend_with_sums(q_THC: Tensor, index: int, metadata: CrossMetadata, scale: float) -> Further:
    """Attend every token to its run's states, for a layer whose softmax also covers positions.

    It computes whole scores: a run's tokens times its states.
    """
    further = _nothing_further(q_THC)
    _attend_runs_with_sums(q_THC, further, metadata.runs, index, scale)
    return further


def _nothing_further(q_THC: Tensor) -> Further:
    sums_TH = torch.full(q_THC.shape[:2], float("-inf"), dtype=torch.float32, device=q_THC.device)
    return Further(sums_TH, torch.zeros_like(q_THC))


def _attend_runs_with_sums(q_THC: Tensor, further: Further, runs: Sequence[CrossRun], index: int, scale: float) -> None:
    """Fill these runs' rows of `further`, one run after another."""
    for run in runs:
        k_EKC, v_EKC = (_joined(run.states, index, part) for part in (0, 1))
        place = run.place(q_THC.device)
        q_PKGC = q_THC[place].unflatten(1, (k_EKC.shape[1], -1))
        scores_PKGE = torch.einsum("pkgc,ekc->pkge", q_PKGC * scale, k_EKC).float()
        further.sums_TH[place] = torch.logsumexp(scores_PKGE, dim=-1).flatten(1)
        weights_PKGE = torch.softmax(scores_PKGE, dim=-1).to(v_EKC.dtype)
        further.values_THC[place] = torch.einsum("pkge,ekc->pkgc", weights_PKGE, v_EKC).flatten(1, 2)


def _joined(states: Sequence[Tensor], index: int, part: int) -> Tensor:
    parts = [item[:, index, part] for item in states]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(q_PHC: Tensor, k_EKC: Tensor, v_EKC: Tensor, scale: float) -> Tensor:
    """Attend every query to every key, with the query heads of a group as additional queries of its key-value head."""
    P, H, C = q_PHC.shape
    K = k_EKC.shape[1]
    q_KNC = q_PHC.unflatten(1, (K, H // K)).permute(1, 2, 0, 3).reshape(K, -1, C)
    out_KNC = F.scaled_dot_product_attention(
        q_KNC[None], k_EKC.transpose(0, 1)[None], v_EKC.transpose(0, 1)[None], scale=scale
    )[0]
    return out_KNC.reshape(K, H // K, P, C).permute(2, 0, 1, 3).reshape(P, H, C)
