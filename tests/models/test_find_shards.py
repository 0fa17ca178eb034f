"""What ranks share out of models of other forms: each part once, and nothing that transformers ties to a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.models.find_shards import find
from tests import census_media
from tests.census import RECIPES
from tests.long import LONG

# A table that three modules share; attention in two cache groups; no list of layers; states that no attention reads.
SHORT = ("seamless_m4t", "t5gemma2", "pix2struct", "pp_formulanet", "voxtral_realtime")


@pytest.mark.parametrize("kind", sorted(RECIPES) if LONG else SHORT)
def test_parts_are_cut_and_summed_once(kind: str, tmp_path: Path) -> None:
    try:
        model, _ = census_media.make(kind, RECIPES[kind], tmp_path)
    except ImportError as error:
        pytest.skip(str(error))
    info = read_info(tmp_path, EngineArgs(model=str(tmp_path)))
    plan = find(model, info, 0, 2)
    summed = [shard.summed for shard in plan.shards if shard.summed is not None]
    assert len(set(summed)) == len(summed)
    for target, source in model.all_tied_weights_keys.items():
        assert (target in plan.cuts) == (source in plan.cuts), (target, source)
    groups = {shard.cache[0]: shard.cache[1] for shard in plan.shards if shard.cache is not None}
    for shard in plan.shards:
        if shard.heads is not None and shard.cache is not None and not groups[shard.cache[0]].values_in_keys:
            # One attention's parts are those of its cache; a latent is no head's.
            assert len(shard.heads.keys) == groups[shard.cache[0]].num_kv_heads
    if kind in ("pix2struct", "pp_formulanet"):
        assert plan.whole
