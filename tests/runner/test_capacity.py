"""Memory -> blocks: what is handed out fits, serves one sequence, and wastes nothing that could be used."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from beheld.core.config import EngineConfig, KVGroup, ModelInfo, StateShape
from beheld.core.errors import CapacityError
from beheld.platform import host
from beheld.runner import capacity
from beheld.runner.cache.registry import make_caches
from tests.inputs import pipes

FULL = KVGroup("full", (0, 1), 2, 8, 8)
SLIDING = KVGroup("sliding", (2, 3, 4), 2, 8, 8, window=32)
CONV = KVGroup("conv", (5,), 1, 64, 0, window=4)
RECURRENT = KVGroup("recurrent", (7, 8), 0, 0, 0, state=StateShape((4, 2, 4), 10, 4), checkpoint_tokens=32)
CROSS = KVGroup("cross", (6,), 2, 8, 8, num_states=40)
LATENT = KVGroup("latent", (0, 1), 1, 576, 512, values_in_keys=True)
HOST_SHARES = ("BEHELD_HOST_SHARES", "VLLM_DP_SIZE", "LOCAL_WORLD_SIZE")
# float32: of a block of 16 positions.
FULL_BLOCK, SLIDING_BLOCK = 16 * 2 * 2 * 16 * 4, 16 * 3 * 2 * 16 * 4


def model(*groups: KVGroup) -> ModelInfo:
    return dataclasses.replace(pipes.info("llava"), kv_groups=groups)


def config(info: ModelInfo, **changes: Any) -> EngineConfig:
    return pipes.config(info, **({"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 4} | changes))


def bytes_of(blocks: tuple[int, ...], groups: tuple[KVGroup, ...]) -> int:
    return sum(b * 16 * g.bytes_per_token(4) for b, g in zip(blocks, groups, strict=True))


def test_one_group_takes_what_there_is() -> None:
    info = model(FULL)
    found = capacity.measure(info, config(info), 50 * FULL_BLOCK + 17)
    assert found.num_blocks == (50,)
    assert found.kv_bytes == 50 * FULL_BLOCK


def test_more_than_can_be_used_is_left() -> None:
    """Four rows of 16 blocks, as much for cached prefixes, the null block."""
    info = model(FULL)
    assert capacity.measure(info, config(info), 10**9).num_blocks == (2 * 4 * 16 + 1,)


def test_groups_share_equally_until_one_has_enough() -> None:
    info = model(FULL, SLIDING)
    few = 40 * (FULL_BLOCK + SLIDING_BLOCK)
    assert capacity.measure(info, config(info), few + 5).num_blocks == (40, 40)
    # A sliding row holds its window, a step and a block: 112 positions, so 7 blocks; its group at most 57 of them.
    rest = 57 * SLIDING_BLOCK + 90 * FULL_BLOCK
    assert capacity.measure(info, config(info), rest).num_blocks == (90, 57)


def test_a_state_for_each_row_first_and_then_one_for_as_many_positions_as_lie_between_checkpoints() -> None:
    """Four rows: a state of each and its newest checkpoint; then one for every 32 positions, so for two blocks."""
    info = model(FULL, RECURRENT)
    state = 2 * (4 * 2 * 4 * 4 + 10 * 3 * 4)
    assert RECURRENT.bytes_per_sequence(4) == state
    assert RECURRENT.bytes_per_token(4) == 0
    found = capacity.measure(info, config(info), 40 * FULL_BLOCK + (1 + 8 + 20) * state)
    assert found.num_blocks == (40, 1 + 8 + 20)
    assert found.kv_bytes == 40 * FULL_BLOCK + 29 * state
    alone = dataclasses.replace(RECURRENT, checkpoint_tokens=512)
    info = model(FULL, alone)
    assert capacity.measure(info, config(info), 17 * FULL_BLOCK + 9 * state).num_blocks == (17, 9)
    assert capacity.measure(info, config(info, num_blocks_override=40), 0).num_blocks == (41, 1 + 8 + 1)


def test_one_sequence_must_fit_and_the_message_says_what_it_needs() -> None:
    info = model(FULL)
    needed = 17 * FULL_BLOCK
    assert capacity.measure(info, config(info), needed).num_blocks == (17,)
    with pytest.raises(CapacityError) as caught:
        capacity.measure(info, config(info), needed - 1)
    assert "256 tokens" in str(caught.value)
    assert "Lower max_model_len to 240," in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "available", "said"),
    [
        ({"device": "cuda"}, 17, "Lower max_model_len to 240, or give more memory (gpu_memory_utilization, kv_c"),
        ({}, 17, "Lower max_model_len to 240, or give more memory (BEHELD_CPU_KV_CACHE_GIB, kv_c"),
        ({"kv_cache_bytes": 17 * FULL_BLOCK - 1}, 17, "Lower max_model_len to 240, or give more memory (kv_c"),
        ({"device": "cuda"}, 2, "Give more memory (gpu_memory_utilization, kv_c"),
    ],
)
def test_the_message_says_what_would_fit(changes: dict[str, Any], available: int, said: str) -> None:
    """The length is one that starts, and the options are those that have a meaning there."""
    info = model(FULL)
    wanted = dataclasses.replace(config(info), **changes)
    with pytest.raises(CapacityError) as caught:
        capacity.measure(info, wanted, available * FULL_BLOCK - 1)
    assert caught.value.remedy.startswith(said)
    if "240" in said:
        fitting = dataclasses.replace(wanted, max_model_len=240)
        assert capacity.measure(info, fitting, available * FULL_BLOCK - 1).num_blocks == (16,)


@pytest.mark.parametrize("name", HOST_SHARES)
def test_engines_that_others_start_share_a_hosts_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of data_parallel_size, of a script's ranks, and of torchrun's processes on this host."""
    monkeypatch.setattr(host, "unused_bytes", lambda: 1 << 30)
    for each in HOST_SHARES:
        monkeypatch.delenv(each, raising=False)
    made = config(model(FULL))
    alone = capacity.available_bytes(made)
    assert 0 < alone < 1 << 30
    monkeypatch.setenv(name, "4")
    assert capacity.available_bytes(made) == alone // 4


def test_a_number_of_blocks_that_was_asked_for_is_kept() -> None:
    info = model(FULL, SLIDING)
    found = capacity.measure(info, config(info, num_blocks_override=100), 0)
    assert found.num_blocks == (101, 57)
    assert found.kv_bytes == bytes_of((101, 57), info.kv_groups)


def test_a_latent_takes_its_own_numbers_alone() -> None:
    assert LATENT.bytes_per_token(2) == 2 * 576 * 2
    info = model(LATENT)
    made = config(info, num_blocks_override=20)
    (count,) = capacity.measure(info, made, 0).num_blocks
    layers = make_caches(info).allocate(made, capacity.measure(info, made, 0), torch.device("cpu"))
    held = sum(kv.latents.numel() * kv.latents.element_size() for kv in layers.values())
    assert held == count * 16 * LATENT.bytes_per_token(4)
    layers[0].latents.fill_(1.0)
    layers[0].clear(slice(3, 5))
    assert layers[0].num_blocks == count
    assert layers[0].latents.sum() == (count - 2) * 16 * 576


def test_states_beside_the_text_have_their_share() -> None:
    info = model(FULL, CROSS)
    made = config(info, max_encoder_tokens=320)
    each = 16 * CROSS.bytes_per_token(4)
    found = capacity.measure(info, made, 20 * each + 129 * FULL_BLOCK)
    assert found.num_blocks == (129, 20)
    assert found.max_encoder_tokens == 320
    # One sequence fits with one item of 40 states: 3 blocks; with fewer bytes, fewer states live at once.
    scarce = capacity.measure(info, made, 18 * (each + FULL_BLOCK))
    assert scarce.num_blocks == (18, 18)
    assert scarce.max_encoder_tokens == 288


@given(
    available=st.integers(0, 1 << 24), groups=st.lists(st.tuples(*[st.integers(1, 300)] * 3), min_size=1, max_size=5)
)
def test_a_share_fits_and_no_block_more_would(available: int, groups: list[tuple[int, int, int]]) -> None:
    per_block = [size for size, _, _ in groups]
    least, most = [min(a, b) for _, a, b in groups], [max(a, b) for _, a, b in groups]
    available += sum(n * p for n, p in zip(least, per_block, strict=True))
    blocks = capacity._share(available, per_block, least, most, lambda level: [level] * len(groups))
    used = sum(b * p for b, p in zip(blocks, per_block, strict=True))
    assert used <= available
    assert all(low <= b <= high for low, b, high in zip(least, blocks, most, strict=True))
    # Who could use more has as much as everyone else who could and needs no more than that; one more for them all
    # would not fit.
    level = min((b for b, high in zip(blocks, most, strict=True) if b < high), default=None)
    if level is not None:
        open_ = [g for g in range(len(blocks)) if blocks[g] < most[g] and blocks[g] == level]
        assert all(blocks[g] in (level, least[g]) for g in range(len(blocks)) if blocks[g] < most[g])
        assert used + sum(per_block[g] for g in open_) > available


@given(
    available=st.integers(0, 40 * FULL_BLOCK + 40 * SLIDING_BLOCK),
    groups=st.sampled_from([(FULL,), (FULL, SLIDING), (FULL, CONV)]),
)
def test_the_longest_that_fits_does_and_a_block_more_does_not(available: int, groups: tuple[KVGroup, ...]) -> None:
    info = model(*groups)
    made = config(info)
    longest = capacity.longest_that_fits(info, made, available)
    assert 0 <= longest <= made.max_model_len
    if longest:
        fitting = dataclasses.replace(made, max_model_len=longest)
        capacity.measure(info, fitting, available)
    if longest < made.max_model_len:
        assert longest % made.block_size == 0
        longer = dataclasses.replace(made, max_model_len=longest + made.block_size)
        with pytest.raises(CapacityError):
            capacity.measure(info, longer, available)


def test_a_host_gives_what_was_set_or_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    info = model(FULL)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("BEHELD_CPU_KV_CACHE_GIB", "1.5")
    assert capacity.available_bytes(config(info)) == 3 << 29
    monkeypatch.delenv("BEHELD_CPU_KV_CACHE_GIB")
    monkeypatch.setattr(host, "group_memory", lambda: None)
    monkeypatch.setattr(host.os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.get)
    assert capacity.available_bytes(config(info)) == 1000 * 4096 // 4
    monkeypatch.setattr(host.os, "sysconf", {"SC_AVPHYS_PAGES": 1 << 30, "SC_PAGE_SIZE": 4096}.get)
    assert capacity.available_bytes(config(info)) == 8 << 30
