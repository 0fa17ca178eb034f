"""Log-probabilities, or logits: of the sampled token, its rank, and the best few, or those of given tokens.

Shapes: L rows that request a report, T positions, V vocabulary, K candidates, N tokens that are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from beheld.core.plan import PromptLogprobs, TokenLogprobs
from beheld.core.sampling import LogprobsMode, PromptIds
from beheld.platform.host_copy import copied

# Prompt positions handled at once, so that float32 copies of bfloat16 logits stay small.
_CHUNK = 64


@dataclass(frozen=True, eq=False)
class LogprobTensors:
    """A report as tensors: ids (L), their log-probabilities (L) and ranks (L), and the candidates (L, K)."""

    ids_L: Tensor
    logprobs_L: Tensor
    ranks_L: Tensor
    top_ids_LK: Tensor
    top_logprobs_LK: Tensor

    def start_copy(self) -> LogprobTensors:
        """The same on the host; see `copied`."""
        return LogprobTensors(*(copied(column) for column in self._columns()))

    def to_host(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Convert the report; row l keeps its first `num_top[l]` candidates. Waits for the device if they are there."""
        return [
            TokenLogprobs(token, logprob, rank, tuple(top_ids[:k]), tuple(top_logprobs[:k]))
            for k, token, logprob, rank, top_ids, top_logprobs in zip(
                num_top, *(column.tolist() for column in self._columns()), strict=True
            )
        ]

    def as_columns(self) -> PromptLogprobs:
        """Convert the report, with the best K of each row. Waits for the device if the tensors are there."""
        whole, real = np.int32, np.float32
        columns = zip(self._columns(), (whole, real, whole, whole, real), strict=True)
        return PromptLogprobs(*(column.cpu().numpy().astype(dtype) for column, dtype in columns))

    def _columns(self) -> tuple[Tensor, ...]:
        return (self.ids_L, self.logprobs_L, self.ranks_L, self.top_ids_LK, self.top_logprobs_LK)


def report(
    logits_LV: Tensor,
    ids_L: Tensor,
    num_top: int,
    named_LN: Tensor | None = None,
    allowed_LV: Tensor | None = None,
    unnormalised_L1: Tensor | None = None,
) -> LogprobTensors:
    """The report of each row's token `ids_L` under log_softmax of `logits_LV`, with the best `num_top`.

    `allowed_LV` are the same logits where candidates may be, and minus infinity elsewhere; None for everywhere.
    `named_LN`, with N up to `num_top`, holds the ids of tokens that take the places of the best; -1 replaces none.
    Where `unnormalised_L1` is True, logits are reported, not log-probabilities.
    The rank is one plus the number of more likely tokens. It is computed from the logits, because subtracting the
    normalizer may round two different logits to one value. Ids beyond the vocabulary, which placeholders of some
    families have, get minus infinity.
    """
    logits_LV = logits_LV.float()
    normaliser_L1 = logits_LV.logsumexp(-1, keepdim=True)
    if unnormalised_L1 is not None:
        normaliser_L1.masked_fill_(unnormalised_L1, 0.0)
    ids_L1 = ids_L.unsqueeze(-1)
    known = logits_LV.shape[-1]
    own_L1 = logits_LV.gather(-1, ids_L1.clamp(max=known - 1)).masked_fill(ids_L1 >= known, float("-inf"))
    ranked_LV = logits_LV if allowed_LV is None else allowed_LV.float()
    top_LK, top_ids_LK = ranked_LV.topk(min(num_top, logits_LV.shape[-1]), dim=-1)
    if named_LN is not None:
        ids_LN = top_ids_LK[:, : named_LN.shape[1]]
        ids_LN.copy_(named_LN.where(named_LN >= 0, ids_LN))
        top_LK = logits_LV.gather(-1, top_ids_LK)
    return LogprobTensors(
        ids_L,
        (own_L1 - normaliser_L1).squeeze(-1),
        (logits_LV > own_L1).sum(-1) + 1,
        top_ids_LK,
        top_LK - normaliser_L1,
    )


def report_prompt(
    logits_TV: Tensor,
    targets_T: Tensor,
    num_top: int,
    named_TN: Tensor | None = None,
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
) -> PromptLogprobs:
    """The report of each position's known next token, on the host.

    `named_TN` holds the ids of further tokens to report on; of -1, minus infinity is reported.
    """
    as_logits_T1 = torch.ones_like(targets_T, dtype=torch.bool).unsqueeze(-1) if mode.logits else None
    parts = [
        report(
            logits_TV[start : start + _CHUNK],
            targets_T[start : start + _CHUNK],
            num_top,
            unnormalised_L1=None if as_logits_T1 is None else as_logits_T1[start : start + _CHUNK],
        )
        for start in range(0, len(targets_T), _CHUNK)
    ]
    joined = PromptLogprobs.joined([part.as_columns() for part in parts])
    if named_TN is None:
        return joined
    named = [
        _of_named(logits_TV[start : start + _CHUNK], named_TN[start : start + _CHUNK], mode)
        for start in range(0, len(targets_T), _CHUNK)
    ]
    return replace(joined, named_logprobs=torch.cat(named).cpu().numpy())


def named_at(named: PromptIds, start: int, count: int, device: torch.device) -> Tensor:
    """The tokens (count, N), int64, that are named for the positions of a prompt from `start` on."""
    before = min(count, max(0, named.start - start))
    first = start + before - named.start
    # An array from another process is read-only, which tensors are not.
    ids_TN = torch.tensor(named.ids_TN[first : first + count - before], dtype=torch.int64)
    # Earlier positions, of which only the likeliest are wanted, have no tokens.
    return torch.nn.functional.pad(ids_TN, (0, 0, before, 0), value=-1).to(device)


def _of_named(logits_TV: Tensor, named_TN: Tensor, mode: LogprobsMode) -> Tensor:
    logits_TV = logits_TV.float()
    found_TN = logits_TV.gather(-1, named_TN.clamp(min=0))
    if not mode.logits:
        found_TN -= logits_TV.logsumexp(-1, keepdim=True)
    return found_TN.masked_fill(named_TN < 0, float("-inf"))
