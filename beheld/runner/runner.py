"""The model runner: carries out a StepPlan on the device and reads back its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from beheld.attention.backend import AttentionBackend, StateOf
from beheld.attention.context import CrossContext, ForwardContext, Tail, current, forward_context
from beheld.attention.cross import CrossBackend, CrossMetadata
from beheld.core.config import Capacity, EngineConfig, ModelInfo
from beheld.core.errors import BeheldError, LoRAError, ModelError, first_line
from beheld.core.media import MediaItem
from beheld.core.plan import (
    NAN,
    Admission,
    EncodeItem,
    PromptLogprobs,
    SeqSlice,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from beheld.core.request import LoRARequest
from beheld.core.sampling import Sampling
from beheld.models import weight_tensors
from beheld.models.adapter import LoRASlots, ModelAdapter, in_positions, of_wanted
from beheld.models.out_of_memory import explained
from beheld.parallel.group import RankGroup
from beheld.parallel.shared_items import SharedItems, shares_items
from beheld.platform.platform import Event
from beheld.platform.registry import platform_of
from beheld.pool.alignment import Aligner
from beheld.pool.pooler import PooledValues, Pooler
from beheld.runner import cross_inputs, device_wait
from beheld.runner.batch import Batch, build, lay_out
from beheld.runner.block_bytes import BlockBytes, SentBlocks
from beheld.runner.cache.registry import make_caches
from beheld.runner.capture import NotCapturedError
from beheld.runner.changed_states import ChangedStates, Computed
from beheld.runner.encoder_cache import EncoderCache
from beheld.runner.faults import let_go
from beheld.runner.graphs import DecodeGraphs
from beheld.runner.last_layer_rows import FEWEST_EACH, FEWEST_ON_GPU, TRIED, close, tail_of
from beheld.runner.mixed_graphs import MixedGraphs, asks_backend
from beheld.runner.pipeline import Pipeline, bits_of, lost_of
from beheld.runner.rank_sampler import RankSampler
from beheld.runner.rows import Rows
from beheld.runner.staging import to_device
from beheld.sample.filters import Masks
from beheld.sample.logprobs import named_at
from beheld.sample.sampler import SampleOutput, Sampler
from beheld.utils.frames import clear_frames
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# The most positions of a prompt whose logits exist at once: 8,192 with a vocabulary of 262,144 would take 4 GiB.
PROMPT_ROWS = 256
_OF_MEDIA = (
    "Check that config.json and preprocessor_config.json belong to these weights, or fetch the checkpoint again."
)


@dataclass(eq=False)
class Handle:
    """A launched step.

    Attributes:
        lost: see StepResult.
        prompt_logprobs: see StepResult.
        slices: those that sample, in the order of the batch.
        sampled: their results in the host's memory, complete once `ready` has happened (at once if that is None): at
            place i, the tokens of the i-th wanted position of each slice that has so many.
        pooled: the results of complete prompts, in the host's memory, too.
        kept: blocks of prompts, likewise.
    """

    plan_id: int
    lost: tuple[bytes, ...] = ()
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    slices: Sequence[SeqSlice] = ()
    sampled: Sequence[SampleOutput] = ()
    pooled: Sequence[PooledValues] = ()
    kept: Sequence[SentBlocks] = ()
    ready: Event | None = None


class ModelRunner:
    """Owns rows, KV cache, embeddings and sampler of one device."""

    def __init__(
        self,
        adapter: ModelAdapter,
        backend: AttentionBackend,
        info: ModelInfo,
        config: EngineConfig,
        capacity: Capacity,
        cross_backend: CrossBackend | None = None,
        ranks: RankGroup | None = None,
        piped: RankGroup | None = None,
    ) -> None:
        self.caches = make_caches(info)
        assert (cross_backend is None) == (self.caches.states is None), "states of items need a backend"
        self._adapter = adapter
        self._backend = backend
        self._info = info
        self._platform = platform_of(adapter.device)
        self._fewest_for_tail = 0 if self._platform.synchronous else FEWEST_ON_GPU
        self.config = config
        self.capacity = capacity
        blocks_per_row = -(-config.max_model_len // config.block_size) + 1
        self.rows = Rows(adapter, config.max_num_seqs, len(info.kv_groups), blocks_per_row)
        self.kv = self.caches.allocate(config, capacity, adapter.device)
        self._shared_items: SharedItems | None = None
        if ranks is not None and shares_items(config, info):
            self._shared_items = SharedItems(ranks, adapter.device, adapter.dtype)
        self.encoder = EncoderCache(adapter, self._shared_items)
        sampler = Sampler(config.max_num_seqs, info.vocab_size, adapter.device)
        self.sampler = sampler if ranks is None else RankSampler(sampler, ranks)
        self._pipe: Pipeline | None = None
        if piped is not None:
            self._pipe = Pipeline(piped, adapter.device, adapter.dtype, sends_embeds=adapter.layers_see_embeds)
        self.pooler = None if info.pooler is None else Pooler(info.pooler, adapter.pool)
        self.aligner = Aligner()
        # How wide a pass's outputs are.
        self._width = info.vocab_size if info.pooler is None else info.pooler.width
        # For tools that compare stages: called with "embeds", "positions" and "logits" of each step and their tensors.
        self.watch: Callable[[str, torch.Tensor], None] | None = None
        self._lost = 0
        self._block_bytes: BlockBytes | None = None
        self._ranks = ranks
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self._cross_backend = cross_backend
        # Another rank samples, of this stage or of the last one.
        elsewhere = (ranks is not None and ranks.rank > 0) or (self._pipe is not None and not self._pipe.last)
        plans = config.pipeline_parallel_size if config.overlap else 1
        self._changed = ChangedStates(recurrent=info.recurrent, sampled_elsewhere=elsewhere, plans=plans)

    @property
    def adapter(self) -> ModelAdapter:
        """The model that it runs."""
        return self._adapter

    def capture_graphs(self) -> None:
        """Capture decode steps for a ladder of batch sizes, and small other steps for one of token counts."""
        # First, because a rank that captures nothing would not come to agree.
        asks = asks_backend(self._backend, self._ranks)
        graphs = DecodeGraphs(self._adapter, self._backend, self.kv, self.caches, self.config, self.rows)
        try:
            graphs.capture(show_progress=self.config.show_progress)
        except NotCapturedError as error:
            # Some models bring numbers from the host in every pass.
            logger.warning("%s runs without CUDA graphs, which is slower: %s", self._info.architecture, error)
            return
        self._graphs = graphs
        if self._backend.captures_prefill and self.caches.captures_prefill and MixedGraphs.worth(self.config):
            mixed = MixedGraphs(
                self._adapter,
                self._backend,
                self.kv,
                self.caches,
                self.config,
                self.rows,
                self.encoder,
                graphs,
                asks_backend=asks,
            )
            try:
                mixed.capture(show_progress=self.config.show_progress)
                self._mixed_graphs = mixed
            except NotCapturedError as error:
                logger.warning("Only decode steps of %s run as CUDA graphs: %s", self._info.architecture, error)
        self._adapter.capture_calls()

    @property
    def block_bytes(self) -> BlockBytes:
        """What copies blocks of the cache."""
        if self._block_bytes is None:
            self._block_bytes = BlockBytes(self._info, self.kv)
        return self._block_bytes

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        """Start one step. Launching a plan again after an error is harmless."""
        if plan.load or plan.keep:
            return self._launch_with_blocks(plan)
        if self._pipe is None or not plan.slices:
            return self._launch(plan)
        sampling = [piece.row for piece in plan.slices if piece.wanted]
        with self._pipe.step(plan.id, sampling, 0 if self.pooler is not None else len(sampling)):
            return self._launch(plan)

    def _launch_with_blocks(self, plan: StepPlan) -> Handle:
        """Start a step that fills blocks before it computes, or brings some to the host afterwards."""
        for load in plan.load:
            self.block_bytes.load(load)
        handle = self._launch(plan)
        if plan.keep:
            handle.kept = [self.block_bytes.keep(keep) for keep in plan.keep]
            self._marked(handle)
        return handle

    def _launch(self, plan: StepPlan) -> Handle:
        for row in plan.released:
            self.rows.release(row)
            self.sampler.release(row)
            self.aligner.release(row)
            if self.pooler is not None:
                self.pooler.release(row)
        self.encoder.forget(plan.forget)
        # Before all that can fail because of one sequence, since other sequences need these embeddings.
        lost = self.encoder.encode(plan.encode) if self._pipe is None or self._pipe.first else ()
        for admission in plan.admitted:
            self.rows.admit(admission)
            params = admission.params
            if isinstance(params, Sampling):
                self.sampler.admit(admission.row, params, admission.token_ids, admission.num_prompt)
            elif params.alignment is not None:
                self.aligner.admit(admission.row, params.alignment, len(admission.token_ids))
            else:
                assert self.pooler is not None, "a prompt to be pooled by a model that generates"
                self.pooler.admit(admission.row, params, admission.token_ids)
        for piece in plan.slices:
            self.rows.append_blocks(piece, self.config.block_size)
        if self._graphs is None:
            self.rows.forget_changes()
        handle = Handle(plan.id, lost)
        if not plan.slices:
            return handle
        computed = self._changed.computed(plan)
        if self._pipe is not None:
            return self._pass_on(handle, plan, computed, self._pipe)
        if self.pooler is not None:
            return self._pool(handle, plan, self.pooler)
        if computed is None:
            computed = self._compute(plan)
        return self._finish(handle, plan, computed)

    def _finish(self, handle: Handle, plan: StepPlan, computed: Computed) -> Handle:
        """Report on prompts and sample, after a step's pass."""
        handle.prompt_logprobs = dict(computed.prompt_logprobs)
        if computed.aligned:
            handle.pooled = [values.start_copy() for values in computed.aligned]
            self._marked(handle)
        if computed.logits_BV is None or computed.places_B is None:
            return handle
        with self._changed.kept_if_failing(computed):
            if computed.drafts:
                return self._check_drafts(handle, computed.slices, computed.logits_BV, plan.masks)
            return self._sample(
                handle, computed.slices, computed.logits_BV, computed.places_B, plan.masks, computed.best
            )

    def _pass_on(self, handle: Handle, plan: StepPlan, computed: Computed | None, pipe: Pipeline) -> Handle:
        """Carry out a step on one stage of a pipeline."""
        if computed is not None:
            pipe.skip()
        if pipe.last:
            if self.pooler is not None:
                return self._pool(handle, plan, self.pooler)
            if computed is None:
                computed = self._compute(plan)
                handle.lost = lost_of(self._lost, plan.encode)
            return self._finish(handle, plan, computed)
        if computed is None:
            laid = lay_out(plan.slices, self.rows, self._info, self.config.block_size)
            pipe.settle((piece.row for piece in plan.slices), self.rows.newest_P)
            batch = build(laid, self.rows, self.caches, self.config.block_size)
            self._lost = bits_of(handle.lost, plan.encode)
            with self._pass(batch):
                pass
            computed = Computed(laid.sampling)
        with self._changed.kept_if_failing(computed):
            return handle

    def _compute(self, plan: StepPlan) -> Computed:
        """Run the pass of a step."""
        # Graphs do not keep queries.
        watched = self.aligner.layers(plan.slices)
        replayed = None if self._graphs is None or watched else self._graphs.replay(plan.slices)
        if replayed is not None:
            self._changed.change(plan.slices)
            logits_BV, places_B, best = replayed
            return Computed(plan.slices, logits_BV, places_B, best)
        laid = lay_out(plan.slices, self.rows, self._info, self.config.block_size)
        mixed = None if self._mixed_graphs is None or watched else self._mixed_graphs.replay(laid)
        if mixed is not None:
            return Computed(laid.sampling, *mixed) if laid.sampling else Computed()
        batch = build(laid, self.rows, self.caches, self.config.block_size)
        sampled_SV, prompts, aligned = self._forward(batch)
        if sampled_SV is None:
            return Computed(prompt_logprobs=prompts, aligned=aligned)
        return Computed(batch.sampling, sampled_SV, batch.sampled_P, None, prompts, laid.drafts, aligned)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor | None, dict[int, PromptLogprobs], Sequence[PooledValues]]:
        """Logits (S, V) of what is sampled, if anything is, reports of prompts by row, and prompts that are aligned."""
        with self._pass(batch) as hidden_TH:
            logits_SV = self._head(of_wanted(hidden_TH, batch.wanted_S[: batch.num_sampled]))
            prompts = self._report_prompts(batch, hidden_TH)
            aligned = self._align(batch, current().cross)
        if self.watch is not None:
            self.watch("logits", logits_SV)
        return logits_SV if batch.sampling else None, prompts, aligned

    def _align(self, batch: Batch, cross: CrossContext | None) -> Sequence[PooledValues]:
        """Align prompts whose queries the pass has kept."""
        # There are none if the step aligns nothing, or if its sequences are stand-ins without items.
        queries = {} if cross is None else {layer: q for layer, q in cross.watched.items() if q is not None}
        if cross is None or not queries:
            return ()

        def keys(row: int, layer: int) -> torch.Tensor:
            (span,) = self.rows[row].spans
            return self.encoder.states(span)[:, cross.index_by_layer[layer], 0]

        found = [place for place, piece in enumerate(batch.slices) if self.rows[piece.row].spans]
        slices, first_token = [batch.slices[place] for place in found], [batch.first_token[place] for place in found]
        return self.aligner.align(slices, first_token, queries, keys)

    def _pool(self, handle: Handle, plan: StepPlan, pooler: Pooler) -> Handle:
        """Pool the hidden states of the step, and send what complete prompts give to the host."""
        laid = lay_out(plan.slices, self.rows, self._info, self.config.block_size)
        batch = build(laid, self.rows, self.caches, self.config.block_size)
        with self._pass(batch) as hidden_TH:
            found = pooler.pool(batch.sampling, of_wanted(hidden_TH, batch.wanted_S)) if batch.sampling else []
        handle.pooled = [values.start_copy() for values in found]
        return self._marked(handle)

    def _head(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Logits (S, V), or what the pooler's head makes (S, D)."""
        return self._adapter.logits(hidden_SH) if self.pooler is None else self._adapter.pool(hidden_SH)

    @contextmanager
    def _pass(self, batch: Batch) -> Iterator[torch.Tensor]:
        """Run the batch's tokens; within the block, their hidden states (T, H), or those of a tail."""
        embeds_TH = self._adapter.embed(batch.ids_T)
        merges = self._pipe is None or self._pipe.first
        for piece, first in zip(batch.slices, batch.first_token, strict=True):
            spans = self.rows[piece.row].spans if merges else ()
            if spans and piece.start < spans[-1].stop:
                self.encoder.merge(embeds_TH, first, piece.start, piece.stop, spans)
        seams = self._adapter.seams
        if self._pipe is not None:
            assert seams is not None, "a stage has seams"
            # The first stage has no one to read from.
            seams.given = None
            if not self._pipe.first:
                seams.given, embeds_TH, self._lost = self._pipe.receive(embeds_TH)
        self._backend.begin(batch.metadata)
        found = None
        if self._cross_backend is not None:
            found = cross_inputs.gather(batch.slices, batch.first_token, self.rows, self.encoder)
        slots = self._adapter.lora
        lora = None if slots is None else slots.runs(batch.lora_slots_T, self._adapter.device)
        cross, watched = self._cross(found), self.aligner.layers(batch.slices)
        if cross is not None:
            cross.watched = dict.fromkeys(watched)
        tail = None if lora is not None or watched else self._tail(batch)
        context = ForwardContext(self._backend, batch.metadata, self.kv, lora, cross=cross, tail=tail)
        self._changed.change(batch.slices)
        with forward_context(context):
            hidden_TH = self._adapter.hidden(embeds_TH, batch.positions_XT)
            if self._pipe is not None and seams is not None:
                seams.given = None
                if not self._pipe.last:
                    assert seams.made is not None, "the last own layer has run"
                    self._pipe.send(seams.made, embeds_TH, self._lost)
            if self.watch is not None:
                self.watch("embeds", embeds_TH)
                self.watch("positions", in_positions(batch.positions_XT, self._adapter.position_unit))
            yield hidden_TH

    def _tail(self, batch: Batch) -> Tail | None:
        adapter = self._adapter
        if adapter.tail_from is None or (adapter.tail_stores and not self._worth_a_tail(batch)):
            return None
        tail = tail_of(batch, adapter.tail_from)
        if tail is not None:
            self._backend.begin(tail.metadata)
        return tail

    def _worth_a_tail(self, batch: Batch) -> bool:
        """True if so many tokens stop before the last layer that running it twice pays."""
        if batch.metadata.num_decodes and not self._backend.stores_with_decodes:
            return False
        return len(batch.ids_T) >= max(self._fewest_for_tail, FEWEST_EACH * len(batch.sampling))

    def _cross(self, found: CrossMetadata | None) -> CrossContext | None:
        states, backend = self.caches.states, self._cross_backend
        return None if found is None or states is None or backend is None else states.context(backend, found)

    def _report_prompts(self, batch: Batch, hidden_TH: torch.Tensor) -> dict[int, PromptLogprobs]:
        """Reports of prompts, whose logits are never held all at once."""
        reports: dict[int, list[PromptLogprobs]] = {}
        for row, start, part, target in batch.prompt_targets:
            params = self.rows[row].params
            assert isinstance(params, Sampling), "a prompt to be pooled has no log-probabilities"
            named = params.prompt_ids
            for done in range(0, len(target), PROMPT_ROWS):
                places = slice(part.start + done, min(part.start + done + PROMPT_ROWS, part.stop))
                logits_TV = self._adapter.logits(of_wanted(hidden_TH, batch.wanted_S[places]))
                target_T = torch.from_numpy(target[done : done + PROMPT_ROWS]).to(logits_TV.device)
                named_TN = None if named is None else named_at(named, start + done, len(target_T), logits_TV.device)
                num_top, mode = params.prompt_logprobs or 0, params.logprobs_mode
                report = self.sampler.prompt_logprobs(logits_TV, target_T, num_top, named_TN, mode)
                if report is not None:
                    reports.setdefault(row, []).append(report)
        return {row: PromptLogprobs.joined(parts) for row, parts in reports.items()}

    def _sample(
        self,
        handle: Handle,
        slices: Sequence[SeqSlice],
        logits_BV: torch.Tensor,
        places_B: torch.Tensor,
        masks: Mapping[int, tuple[bytes, ...]],
        best: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Handle:
        """Sample the next token of each slice, keep it at `places_B` of the rows' newest, and send it to the host."""
        rows = [piece.row for piece in slices]
        out = self.sampler.sample(logits_BV, rows, [piece.stop for piece in slices], self._masks(rows, masks), best)
        self.sampler.append(rows, out.ids_B)
        self.rows.newest_P.index_copy_(0, places_B, out.ids_B)
        if self._pipe is not None:
            self._pipe.pay(places_B, out.ids_B)
        return self._send(handle, slices, [out])

    def _check_drafts(
        self,
        handle: Handle,
        slices: Sequence[SeqSlice],
        logits_SV: torch.Tensor,
        masks: Mapping[int, tuple[bytes, ...]],
    ) -> Handle:
        """Sample every wanted position of each slice, keep its newest token, and send all to the host.

        Position by position, so that each is sampled after the tokens before it, as it would be without drafts: the
        same draws of the same seed, the same penalties. What follows a wrong draft is sampled for nothing; the host
        drops it, and the sampler takes it back when it samples that position again.
        """
        device, most = self._adapter.device, max(piece.wanted for piece in slices)
        drafts_BD = np.full((len(slices), most), -1, dtype=np.int64)
        first, at_SD = 0, np.full((len(slices), most), -1, dtype=np.int64)
        for b, piece in enumerate(slices):
            drafts_BD[b, : len(piece.token_ids[1:])] = piece.token_ids[1:]
            at_SD[b, : piece.wanted] = range(first, first + piece.wanted)
            first += piece.wanted
        made = to_device(
            {
                "drafts": drafts_BD,
                "rows": np.array([piece.row for piece in slices], dtype=np.int64),
                "positions": np.array([piece.stop - piece.wanted + 1 for piece in slices], dtype=np.int64),
            },
            device,
        )
        ids_BD = torch.zeros_like(made["drafts"])
        outs = []
        for depth in range(most):
            places = np.flatnonzero(at_SD[:, depth] >= 0)
            deep = [slices[b] for b in places.tolist()]
            rows, lengths = [p.row for p in deep], [p.stop - p.wanted + 1 + depth for p in deep]
            where = to_device({"logits": at_SD[places, depth], "places": places}, device)
            out = self.sampler.sample(logits_SV[where["logits"]], rows, lengths, self._masks(rows, masks, depth))
            self.sampler.append(rows, out.ids_B)
            ids_BD[where["places"], depth] = out.ids_B
            outs.append(out)
        # No token is -1, so the first wanted position without a draft ends the count.
        right_B = (ids_BD == made["drafts"]).long().cumprod(1).sum(1)
        newest_B = ids_BD.gather(1, right_B.unsqueeze(1)).squeeze(1)
        self.rows.keep_newest(made["rows"], made["positions"] + right_B, newest_B)
        if self._pipe is not None:
            self._pipe.pay(self.rows.places_of(made["rows"], made["positions"] + right_B), newest_B)
        return self._send(handle, slices, outs)

    def _send(self, handle: Handle, slices: Sequence[SeqSlice], outs: Sequence[SampleOutput]) -> Handle:
        """Start copying to the host what was sampled. Copied later, it would wait for the next step as well."""
        handle.slices, handle.sampled = slices, [out.start_copy() for out in outs]
        return self._marked(handle)

    def _marked(self, handle: Handle) -> Handle:
        """Note when the copies that were started for a step are complete."""
        if not self._platform.synchronous:
            handle.ready = self._platform.event()
            handle.ready.record()
        return handle

    def _masks(self, rows: Sequence[int], masks: Mapping[int, tuple[bytes, ...]], depth: int = 0) -> Masks | None:
        """What the grammars of these rows allow at a wanted position; rows without one are not sent."""
        places = [place for place, row in enumerate(rows) if row in masks]
        if not places:
            return None
        allowed_MW = np.stack([np.frombuffer(masks[rows[place]][depth], dtype=np.uint8) for place in places])
        made = to_device({"places": np.array(places, dtype=np.int64), "allowed": allowed_MW}, self._adapter.device)
        return Masks(made["places"], made["allowed"])

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a launched step and read its result."""
        if handle.ready is not None:
            with device_wait.waiting():
                handle.ready.synchronize()
        tokens: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        failed: dict[int, str] = {}
        for depth, out in enumerate(handle.sampled):
            reports = out.to_host()
            pieces = [piece for piece in handle.slices if piece.wanted > depth]
            for piece, token, nan in zip(pieces, out.ids_B.tolist(), out.nan_B.tolist(), strict=True):
                row, before = piece.row, tokens.get(piece.row, ())
                if len(before) != depth or (before and before[-1] != piece.token_ids[depth]):
                    # A draft before this position was wrong.
                    continue
                if nan:
                    failed[row] = NAN
                    continue
                tokens[row] = (*before, token)
                if row in reports:
                    logprobs[row] = (*logprobs.get(row, ()), reports[row])
        pooled = {row: value for values in handle.pooled for row, value in values.to_host().items()}
        failed |= {row: NAN for values in handle.pooled for row in values.broken()}
        return StepResult(
            handle.plan_id,
            tokens,
            logprobs,
            handle.prompt_logprobs,
            pooled=pooled,
            failed=failed,
            lost=handle.lost,
            encode_s=self.encoder.spent_s(),
            kept={kept.row: kept.to_host() for kept in handle.kept},
        )

    def missing(self, digests: Iterable[bytes]) -> tuple[bytes, ...]:
        """Those of `digests` whose embeddings are not on the device."""
        return tuple(digest for digest in digests if digest not in self.encoder)

    def checksums(self) -> dict[str, str]:
        """The SHA-256 of each tensor of weights."""
        return weight_tensors.checksums(self._adapter.model)

    def reset_weights(self) -> None:
        """Make all weights zero."""
        weight_tensors.reset_(self._adapter.model)

    def read_lora(self, request: LoRARequest) -> None:
        """Read an adapter, unless it is here, so that adding it need not; from any thread, while others go on.

        Raises:
            LoRAError: it cannot be used.
        """
        self._slots().read(request)

    def add_lora(self, request: LoRARequest) -> LoRARequest:
        """Take an adapter into memory, unless it is here; gives the request with its digest.

        Raises:
            LoRAError: it cannot be used.
        """
        return self._slots().add(request)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; False if it is not known."""
        return self._slots().remove(lora_int_id)

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keep an adapter until it is removed; False if it is not known."""
        return self._slots().pin(lora_int_id)

    def loras(self) -> tuple[LoRARequest, ...]:
        """The adapters in the host's memory."""
        return () if self._adapter.lora is None else self._adapter.lora.known()

    def _slots(self) -> LoRASlots:
        if self._adapter.lora is None:
            raise LoRAError("This engine takes no LoRA adapters.", "Start it with enable_lora=True.")
        return self._adapter.lora

    @torch.inference_mode()
    def dry_run(
        self, lengths: Sequence[int], block: int = 0, *, tail: bool = False
    ) -> tuple[torch.Tensor, ForwardContext]:
        """One pass of sequences of these lengths: its logits (S, V), and its context, which says what was called.

        No row may be in use.

        Args:
            block: the one sequence lies in unused blocks from this one on, and its tokens differ; 0: all
                lie over the null block, and their tokens are the same.
            tail: the pass has one.
        """
        counts = [-(-length // self.config.block_size) for length in lengths]
        try:
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
                ids, blocks = (range(length), range(block, block + count)) if block else ((0,) * length, (0,) * count)
                tables = (tuple(blocks),) * len(self._info.kv_groups)
                self.rows.admit(Admission(row, tuple(ids), length, (), Sampling(), None, 0, tables))
            return self._dry_pass([SeqSlice(row, 0, length, (), 1) for row, length in enumerate(lengths)], tail)
        finally:
            for row in range(len(lengths)):
                self.rows.release(row)
            self.rows.forget_changes()
            used = slice(block, block + max(counts)) if block else slice(1)
            for layer in self.kv.values():
                layer.clear(used)

    def _dry_pass(self, slices: Sequence[SeqSlice], tail: bool) -> tuple[torch.Tensor, ForwardContext]:
        laid = lay_out(slices, self.rows, self._info, self.config.block_size)
        batch = build(laid, self.rows, self.caches, self.config.block_size)
        self._backend.begin(batch.metadata)
        states = self.caches.states
        blank = None if states is None else self._cross(states.blank(len(batch.ids_T), self._adapter))
        part = tail_of(batch, self._adapter.tail_from) if tail and self._adapter.tail_from is not None else None
        if part is not None:
            self._backend.begin(part.metadata)
        context = ForwardContext(self._backend, batch.metadata, self.kv, cross=blank, tail=part)
        with forward_context(context):
            hidden_TH = self._adapter.hidden(self._adapter.embed(batch.ids_T), batch.positions_XT)
            return self._head(of_wanted(hidden_TH, batch.wanted_S)), context

    def self_test(self) -> None:
        """Every text layer must call the attention hook exactly once, and the logits be finite and as wide as the
        vocabulary (or what the pooler's head makes, as the configuration says).

        Raises:
            ModelError: it is not so; the message names the layers.
        """
        logits_SV, context = self.dry_run([2])
        states = self.caches.states
        cross_layers = () if states is None else states.spec.layers
        cross_called = {} if context.cross is None else context.cross.called
        wrong = [key for key in self.kv if context.called.get(key, 0) != 1]
        wrong += [layer for layer in cross_layers if cross_called.get(layer, 0) != 1]
        if wrong:
            layers = sorted({key.layer if isinstance(key, StateOf) else key for key in wrong})
            raise ModelError(
                f"{self._info.architecture} cannot be run: layers {layers} do not call the attention hook once."
            )
        if logits_SV.shape[-1] != self._width:
            raise ModelError(
                f"{self._info.architecture} gives {logits_SV.shape[-1]} numbers where its configuration says "
                f"{self._width}."
            )
        self._check_finite(logits_SV)
        if self._adapter.tail_from is not None:
            self._try_tail()

    @torch.inference_mode()
    def try_items(self, items: Sequence[MediaItem]) -> None:
        """Run the towers for items, which compiles what they compile; nothing is kept of the items.

        Raises:
            ModelError: a tower fails, or what it gives is not finite.
            CapacityError: there is not enough memory for it.
        """
        if self._pipe is not None and not self._pipe.first:
            # The towers are the first stage's.
            return
        if self._shared_items is None:
            self._try_towers(items)
            return
        # Each rank runs them alone. One that fails, such as for want of memory, would later fail its share of items.
        failure: BeheldError | None = None
        try:
            self._try_towers(items)
        except BeheldError as error:
            failure = error
        elsewhere = self._shared_items.elsewhere("" if failure is None else str(failure))
        if failure is not None:
            raise failure
        if elsewhere:
            raise ModelError(f"On another rank: {elsewhere}", _OF_MEDIA)

    def _try_towers(self, items: Sequence[MediaItem]) -> None:
        for item in items:
            order = EncodeItem(item.digest, item.modality, item.features, item.num_kept)
            try:
                with explained("run a tower", self._platform, "Lower the limits on media."):
                    (found,) = self._adapter.encode([order])
            except BeheldError:
                raise
            except Exception as error:
                let_go(error, self._adapter.device)
                raise ModelError(
                    f"{self._info.architecture} makes nothing of the modality {item.modality}: "
                    f"{type(error).__name__}: {first_line(error)}.",
                    _OF_MEDIA,
                ) from error
            if len(found) != item.num_kept or not bool(found.isfinite().all()):
                reason = (
                    f"computes NaN or infinity of the modality {item.modality}"
                    if len(found) == item.num_kept
                    else f"gives {len(found)} embeddings of the modality {item.modality} for {item.num_kept} places"
                )
                raise ModelError(
                    f"{self._info.architecture} {reason}.",
                    _OF_MEDIA,
                )

    def _check_finite(self, logits_SV: torch.Tensor) -> None:
        if not bool(logits_SV.amax(-1).isfinite().all()):
            raise ModelError(
                f"{self._info.architecture} computes NaN or infinity of a text.",
                "Check that config.json belongs to these weights, fetch the checkpoint again, or try another dtype.",
            )

    def _try_tail(self) -> None:
        """Compare a pass with a tail and one without; without tails from now on, if they differ or cannot be run."""
        room = min(layer.num_blocks for layer in self.kv.values()) - 1
        length = min(TRIED, self.config.max_model_len, room * self.config.block_size)
        wanted_SV, _ = self.dry_run([length], 1)
        self._check_finite(wanted_SV)
        try:
            found_SV, _ = self.dry_run([length], 1, tail=True)
            reason = "" if close(found_SV, wanted_SV) else "what it gives differs"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # A model may do anything in its last layer.
            clear_frames(error)
            reason = first_line(error)
        if reason:
            logger.debug("All tokens go through all layers of %s: %s.", self._info.architecture, reason)
            self._adapter.tail_from = None
