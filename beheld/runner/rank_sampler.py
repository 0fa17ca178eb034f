"""The sampler of ranks that share a model: the first rank samples, the others get its tokens.

Only the first rank keeps what sampling needs: parameters, histories, grammars' masks, a user's logits processors.

Shapes: B rows of a batch, V vocabulary, T positions of a prompt, N tokens that are named.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from beheld.core.plan import PromptLogprobs
from beheld.core.sampling import LogprobsMode, Sampling
from beheld.parallel.group import RankGroup
from beheld.sample.filters import Masks
from beheld.sample.sampler import SampleOutput, Sampler


class RankSampler:
    """Samples on the first rank and sends the tokens to the others.

    Args:
        sampler: samples, on the first rank; unused on the others.
    """

    def __init__(self, sampler: Sampler, ranks: RankGroup) -> None:
        self._sampler = sampler if ranks.rank == 0 else None
        self._ranks = ranks

    def admit(self, row: int, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """See Sampler."""
        if self._sampler is not None:
            self._sampler.admit(row, params, token_ids, num_prompt)

    def release(self, row: int) -> None:
        """See Sampler."""
        if self._sampler is not None:
            self._sampler.release(row)

    def sample(
        self,
        logits_BV: Tensor,
        rows: Sequence[int],
        lengths: Sequence[int],
        masks: Masks | None = None,
        best: tuple[Tensor, Tensor] | None = None,
    ) -> SampleOutput:
        """See Sampler. On the other ranks no row is broken, and no log-probabilities are reported."""
        if self._sampler is None:
            ids_B = self._no_tokens(logits_BV, rows)
            self._ranks.copy_from(ids_B, 0)
            return SampleOutput(ids_B, torch.zeros_like(ids_B, dtype=torch.bool), None)
        try:
            out = self._sampler.sample(logits_BV, rows, lengths, masks, best)
        except BaseException:
            # The other ranks wait for tokens. This step is launched again, and gives them the right ones.
            self._ranks.copy_from(self._no_tokens(logits_BV, rows), 0)
            raise
        self._ranks.copy_from(out.ids_B.contiguous(), 0)
        return out

    @staticmethod
    def _no_tokens(logits_BV: Tensor, rows: Sequence[int]) -> Tensor:
        return torch.zeros(len(rows), dtype=torch.int64, device=logits_BV.device)

    def append(self, rows: Sequence[int], ids_B: Tensor) -> None:
        """See Sampler."""
        if self._sampler is not None:
            self._sampler.append(rows, ids_B)

    def prompt_logprobs(
        self,
        logits_TV: Tensor,
        target_ids_T: Tensor,
        k: int,
        named_TN: Tensor | None = None,
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> PromptLogprobs | None:
        """See Sampler; None on the other ranks."""
        if self._sampler is None:
            return None
        return self._sampler.prompt_logprobs(logits_TV, target_ids_T, k, named_TN, mode)
