"""The sampler: it takes the logits of a batch and chooses one token id per row on the device.

Shapes: B rows of a batch, R of them sampled at random, L that request log-probabilities, S of these that request those
of the logits sampled from, W words of a grammar's bit mask, T positions of a prompt, V vocabulary.

Order, as in vLLM: bad words and bans on repetition, grammar mask, allowed ids and min_tokens, bias, timestamps, logits
processors, penalties, tokens that a checkpoint forces, the end of reasoning whose budget is used up. Then greedy rows
take the most likely token; the others apply temperature, min-p, top-k and top-p, and sample. Log-probabilities are
those of the model's raw logits, or of the last ones, which are sampled from; see `LogprobsMode`.

Nothing waits for the device, except for rows with logits processors. On a CPU, where there is nothing to wait for, rows
are sampled one by one among the few candidates that the filters leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from beheld.core.errors import ParamsError
from beheld.core.plan import PromptLogprobs, TokenLogprobs
from beheld.core.sampling import LogprobsMode, Sampling
from beheld.platform.host_copy import copied
from beheld.platform.registry import platform_of
from beheld.sample import noise
from beheld.sample.filters import Masks, floor_of_row, floors
from beheld.sample.logprobs import LogprobTensors, report, report_prompt
from beheld.sample.noise import Noise
from beheld.sample.penalties import Penalised
from beheld.sample.rows import Composition, RandomRows, RowState, RowTable, TokenRule
from beheld.utils import unbounded_work

# Replaces infinity in a logits processor's result, so that differences stay finite.
_CERTAIN = 1e30


@dataclass(frozen=True, eq=False)
class SampleOutput:
    """The chosen tokens: on the device, or on the host after `start_copy`.

    Attributes:
        ids_B: token ids, int64; 0 where nan_B.
        nan_B: bool; True for rows whose logits hold a NaN or have no finite candidate.
        logprobs: the report of the rows in `reporting`, or None if no row requested one.
        reporting: (place in the batch, row, number of candidates) of the rows that requested a report.
    """

    ids_B: Tensor
    nan_B: Tensor
    logprobs: LogprobTensors | None
    reporting: tuple[tuple[int, int, int], ...] = ()

    def start_copy(self) -> SampleOutput:
        """A copy in host memory that nothing else uses, complete once all work launched so far is done.

        Without it, the next replay of a decode graph would overwrite its flags, and reading the rest would wait for all
        work launched since.
        """
        logprobs = None if self.logprobs is None else self.logprobs.start_copy()
        return SampleOutput(copied(self.ids_B), copied(self.nan_B), logprobs, self.reporting)

    def to_host(self) -> dict[int, TokenLogprobs]:
        """Row -> log-probabilities, for the intact rows that requested them; waits for the device if they are there."""
        if self.logprobs is None:
            return {}
        broken = self.nan_B.tolist()
        entries = self.logprobs.to_host([k for _, _, k in self.reporting])
        return {row: entry for (place, row, _), entry in zip(self.reporting, entries, strict=True) if not broken[place]}


@dataclass(frozen=True, eq=False)
class _ChosenIds:
    """The chosen tokens and what they were sampled from.

    Attributes:
        ids_B, nan_B: see SampleOutput.
        logits_BV: the logits with all changes that do not depend on temperature.
        floor_R1: of rows sampled at random, the least logit after temperature that filters keep; None if no row is.
    """

    ids_B: Tensor
    nan_B: Tensor
    logits_BV: Tensor
    floor_R1: Tensor | None = None


class Sampler:
    """Chooses tokens for up to `max_num_seqs` rows over `vocab_size` logits on `device`."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = torch.device(device)
        self._platform = platform_of(self._device)
        self._rows = RowTable(max_num_seqs, vocab_size, self._device)
        self._noise = Noise(vocab_size, self._device)
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def admit(self, row: int, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """Fill `row`: `token_ids` are the prompt (`num_prompt` of them) and earlier generated tokens.

        Admitting a sequence again changes nothing.

        Raises:
            ParamsError: a biased or allowed id is beyond the vocabulary, or a logits processor cannot be called.
        """
        self._rows.admit(row, params, token_ids, num_prompt)

    def release(self, row: int) -> None:
        """Free the row; on a free row this changes nothing."""
        self._rows.release(row)

    @torch.inference_mode()
    def sample(
        self,
        logits_BV: Tensor,
        rows: Sequence[int],
        lengths: Sequence[int],
        masks: Masks | None = None,
        best: tuple[Tensor, Tensor] | None = None,
    ) -> SampleOutput:
        """Choose the token at position `lengths[b]` of row `rows[b]` from `logits_BV[b]`, which stays unchanged.

        `masks` holds the grammars' masks; `best` is the result of `greedy` for these logits if it is known already.
        Sampling a position again gives the same token.

        Raises:
            ParamsError: a logits processor returned something other than logits.
        """
        assert logits_BV.shape == (len(rows), self._vocab_size)
        assert len(lengths) == len(rows)
        batch = self._rows.compose(rows, lengths)
        for place in (*batch.processed, *(batch.penalised.places if batch.penalised else ())):
            self._rewind(batch.states[place], lengths[place])
        chosen = self._choose(logits_BV, batch, lengths, masks, best)
        ids_B, nan_B = chosen.ids_B, chosen.nan_B
        if not batch.reporting:
            return SampleOutput(ids_B, nan_B, None)
        wanted = tuple((b, batch.rows[b], batch.states[b].params.logprobs or 0) for b in batch.reporting)
        logits_LV = self._reported(logits_BV, chosen, batch)
        most = max(k for _, _, k in wanted)
        allowed_LV = self._allowed(logits_BV, logits_LV, batch, masks)
        logprobs = report(logits_LV, ids_B[batch.reporting_L], most, batch.named_LN, allowed_LV, batch.unnormalised_L1)
        return SampleOutput(ids_B, nan_B, logprobs, wanted)

    def _reported(self, logits_BV: Tensor, chosen: _ChosenIds, batch: Composition) -> Tensor:
        """The logits (L, V) that the reports are of: the model's, or those that a row was sampled from."""
        if batch.sampled_S is None:
            return logits_BV if len(batch.reporting) == len(batch.rows) else logits_BV[batch.reporting_L]
        places_S = batch.reporting_L[batch.sampled_S]
        sampled_SV = chosen.logits_BV[places_S].float()
        random = batch.random
        if random is not None and chosen.floor_R1 is not None:
            # Greedy rows have neither.
            temperature_B1 = sampled_SV.new_ones(len(batch.rows), 1)
            floor_B1 = torch.full_like(temperature_B1, -math.inf)
            temperature_B1.index_copy_(0, random.places_R, random.temperature_R1)
            floor_B1.index_copy_(0, random.places_R, chosen.floor_R1)
            sampled_SV.div_(temperature_B1[places_S])
            sampled_SV.masked_fill_(sampled_SV < floor_B1[places_S], -math.inf)
        if len(places_S) == len(batch.reporting):
            return sampled_SV
        return logits_BV[batch.reporting_L].float().index_copy_(0, batch.sampled_S, sampled_SV)

    def _allowed(self, logits_BV: Tensor, logits_LV: Tensor, batch: Composition, masks: Masks | None) -> Tensor | None:
        """The logits among which candidates are found, if a row reports only those that its grammar allows."""
        limited = [batch.states[b].params.num_answered is not None for b in batch.reporting]
        if masks is None or not any(limited):
            return None
        masked_BV = logits_BV.clone()
        masks.apply_(masked_BV)
        limited_L1 = torch.tensor(limited).to(self._device, non_blocking=True).unsqueeze(-1)
        return masked_BV[batch.reporting_L].where(limited_L1, logits_LV)

    @torch.inference_mode()
    def append(self, rows: Sequence[int], ids_B: Tensor) -> None:
        """Record the tokens just sampled for `rows` whose later choices depend on them."""
        batch = self._rows.compose(rows, [self._rows[row].length for row in rows])
        if not batch.keeps_tokens:
            return
        if batch.penalised is not None:
            lengths = [batch.states[b].length for b in batch.penalised.places]
            self._rows.penalties.append(batch.penalised, lengths, ids_B[batch.penalised.places_P])
        for rule, own in batch.rules.items():
            self._rows.rules[rule].append(own, [batch.states[b].length for b in own.places], ids_B)
        if batch.processed:
            ids = ids_B.tolist()
            for b in batch.processed:
                state = batch.states[b]
                state.tokens[state.length :] = [ids[b]]

    @torch.inference_mode()
    def prompt_logprobs(
        self,
        logits_TV: Tensor,
        target_ids_T: Tensor,
        k: int,
        named_TN: Tensor | None = None,
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> PromptLogprobs:
        """Log-probabilities of `target_ids_T`, of the `k` best at each position and of the tokens in `named_TN`.

        Waits for the device.
        """
        return report_prompt(logits_TV, target_ids_T, k, named_TN, mode)

    def _rewind(self, state: RowState, length: int) -> None:
        """Forget tokens at positions from `length` on: the step is launched again."""
        if state.slot is not None:
            self._rows.penalties.rewind(state.slot, length)
        del state.tokens[length:]

    def _choose(
        self,
        logits_BV: Tensor,
        batch: Composition,
        lengths: Sequence[int],
        masks: Masks | None,
        best: tuple[Tensor, Tensor] | None,
    ) -> _ChosenIds:
        for state, length in zip(batch.states, lengths, strict=True):
            state.length = length
        edited = batch.edited or masks is not None
        if not edited and batch.random is None:
            return _ChosenIds(*(greedy(logits_BV) if best is None else best), logits_BV)
        # Check before edits, which may hide that a row is broken.
        nan_B = None
        if edited:
            nan_B = ~logits_BV.amax(-1).isfinite() if best is None else best[1]
            logits_BV, best = self._edit(logits_BV, batch, lengths, masks), None
        random = batch.random
        if random is None or len(random.places) < len(lengths):
            ids_B, broken_B = greedy(logits_BV) if best is None else (best[0].clone(), best[1].clone())
        else:
            ids_B = torch.empty(len(lengths), dtype=torch.int64, device=logits_BV.device)
            broken_B = torch.empty(len(lengths), dtype=torch.bool, device=logits_BV.device)
        floor_R1 = None
        if random is not None:
            keys_R2 = noise.keys(random.mixed_R, np.array([lengths[b] for b in random.places], dtype=np.uint64))
            floor_R1 = self._sample_random_(ids_B, broken_B, logits_BV, batch, random, torch.from_numpy(keys_R2))
        nan_B = broken_B if nan_B is None else nan_B | broken_B
        return _ChosenIds(ids_B.masked_fill_(nan_B, 0), nan_B, logits_BV, floor_R1)

    def _sample_random_(
        self,
        ids_B: Tensor,
        broken_B: Tensor,
        logits_BV: Tensor,
        batch: Composition,
        random: RandomRows,
        keys_R2: Tensor,
    ) -> Tensor:
        """Write in place the ids of the rows sampled at random, and which of them have no finite best logit.

        Returns:
            floor_R1: float32, the least logit after temperature that each row's filters keep.
        """
        if self._platform.sampler_kernels:
            from beheld.sample import random_kernel

            keys_R2 = _to_device(keys_R2, self._device)
            temperature_R1, places_R = random.temperature_R1, random.places_R
            return random_kernel.sample_(
                ids_B, broken_B, logits_BV, places_R, temperature_R1, keys_R2, random.filters
            ).unsqueeze(-1)
        broken_R = ~logits_BV[random.places_R].amax(-1).isfinite()
        broken_B[random.places_R] = broken_R
        sample = self._sample_on_cpu if self._platform.synchronous else self._sample_at_once
        ids_B[random.places_R], floor_R1 = sample(logits_BV, batch, random, keys_R2, broken_B)
        return floor_R1

    def _edit(self, logits_BV: Tensor, batch: Composition, lengths: Sequence[int], masks: Masks | None) -> Tensor:
        """A float32 copy of the logits with all changes that do not depend on temperature."""
        logits_BV = logits_BV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

        def apply_(rule: TokenRule) -> None:
            own = batch.rules.get(rule)
            if own is not None:
                self._rows.rules[rule].apply_(logits_BV, own, [lengths[b] for b in own.places])

        apply_(TokenRule.BAD_WORDS)
        apply_(TokenRule.NO_REPEAT)
        if masks is not None:
            masks.apply_(logits_BV)
        if batch.edits is not None:
            batch.edits.apply_(logits_BV)
        apply_(TokenRule.TIMESTAMPS)
        for b in batch.processed:
            logits_BV[b] = self._process(logits_BV[b], batch.states[b], lengths[b])
        apply_(TokenRule.NO_REPEAT_WINDOW)
        if batch.penalised is not None:
            self._penalise_(logits_BV, batch.penalised)
        for b in batch.forcing:
            token = batch.states[b].forced(lengths[b])
            if token is not None:
                logits_BV[b] = -math.inf
                logits_BV[b, token] = 0.0
        if batch.closing:
            apply_(TokenRule.THINKING)
        return logits_BV

    def _penalise_(self, logits_BV: Tensor, penalised: Penalised) -> None:
        if self._platform.synchronous:
            for index, b in enumerate(penalised.places):
                self._rows.penalties.apply_row_(logits_BV[b], penalised, index)
            return
        self._rows.penalties.apply_(logits_BV, penalised)

    def _process(self, logits_V: Tensor, state: RowState, length: int) -> Tensor:
        """One row's logits after its logits processors, which see the tokens before position `length`."""
        assert len(state.tokens) == length, "a row with logits processors has the wrong number of tokens"
        prompt, generated = state.tokens[: state.num_prompt], state.tokens[state.num_prompt :]
        for processor in state.processors:
            with unbounded_work.running():
                answer = processor(list(prompt), list(generated), logits_V.clone())
            if not isinstance(answer, Tensor) or answer.shape != logits_V.shape:
                raise ParamsError(
                    f"A logits processor returned {type(answer).__name__}"
                    + (f" of shape {tuple(answer.shape)}." if isinstance(answer, Tensor) else "."),
                    f"It must return a tensor of shape {tuple(logits_V.shape)}.",
                    param="logits_processors",
                )
            logits_V = answer.to(logits_V).clamp(max=_CERTAIN)
        return logits_V

    def _sample_on_cpu(
        self, logits_BV: Tensor, batch: Composition, random: RandomRows, keys_R2: Tensor, nan_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Ids (R) and floors (R, 1), row by row.

        Vector instructions may round the ends of an array differently, so that in one array of all rows a row's result
        could depend on its place.
        """
        broken = nan_B.tolist()
        chosen = [
            (0, -math.inf) if broken[b] else self._sample_row(logits_BV[b], batch.states[b].params, keys_R2[r : r + 1])
            for r, b in enumerate(random.places)
        ]
        ids, floors = zip(*chosen, strict=True)
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(floors, dtype=torch.float32).unsqueeze(-1)

    def _sample_row(self, logits_V: Tensor, params: Sampling, key_12: Tensor) -> tuple[int, float]:
        logits_V = logits_V.float() / params.temperature
        floor = floor_of_row(logits_V.numpy(), params)
        top = logits_V.amax()
        if floor == -math.inf:
            weights_V = (logits_V - top).exp_()
            return int(_argmax(weights_V.div_(self._noise.exponential(key_12)[0]))), floor
        ids_N = torch.from_numpy(np.flatnonzero(logits_V.numpy() >= np.float32(floor)))
        weights_N = (logits_V[ids_N] - top).exp_()
        return int(ids_N[_argmax(weights_N / self._noise.exponential(key_12, ids_N)[0])]), floor

    def _sample_at_once(
        self, logits_BV: Tensor, batch: Composition, random: RandomRows, keys_R2: Tensor, nan_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Ids (R) and floors (R, 1), all rows at once, without waiting for the device."""
        everyone = len(random.places) == len(batch.rows)
        logits_RV = logits_BV if everyone else logits_BV[random.places_R]
        logits_RV = logits_RV.float() / random.temperature_R1
        weights_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)).exp_()
        floor_R1 = torch.full_like(random.temperature_R1, -math.inf)
        if random.filters is not None:
            floor_R1 = floors(logits_RV, random.filters)
            weights_RV.masked_fill_(logits_RV < floor_R1, 0.0)
        return weights_RV.div_(self._noise.exponential(_to_device(keys_R2, self._device))).argmax(-1), floor_R1


def greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The best token (B) of each row, the first of equals, and which rows are broken (B)."""
    if platform_of(logits_BV.device).sampler_kernels:
        from beheld.sample import greedy_kernel

        return greedy_kernel.greedy(logits_BV)
    if platform_of(logits_BV.device).shares_host_memory:
        return _greedy_on_host(logits_BV)
    ids_B = logits_BV.argmax(-1)
    # The greatest is NaN if any logit is.
    nan_B = ~logits_BV.gather(-1, ids_B.unsqueeze(-1)).squeeze(-1).isfinite()
    return ids_B.masked_fill_(nan_B, 0), nan_B


def _greedy_on_host(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """`greedy` by numpy, whose calls take a fraction of the time that PyTorch's take for so few numbers."""
    logits = logits_BV.float().numpy()
    ids = logits.argmax(-1)
    # The greatest is NaN if any logit is.
    broken = ~np.isfinite(logits[np.arange(len(ids)), ids])
    if broken.any():
        ids[broken] = 0
    return torch.from_numpy(ids), torch.from_numpy(broken)


def _to_device(small: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, without waiting; a copy from pageable memory is staged before this returns."""
    return small.to(device, non_blocking=True)


def _argmax(x: Tensor) -> Tensor:
    """argmax over the last dimension; the first of equals, NaN above all. On a CPU numpy's is many times faster."""
    if platform_of(x.device).shares_host_memory:
        return torch.as_tensor(x.float().numpy().argmax(-1))
    return x.argmax(-1)
