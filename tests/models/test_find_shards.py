"""What ranks share out of models of other forms: each part once, and nothing that transformers ties to a whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from beheld.checkpoint.info import read_info
from beheld.core.config import EngineArgs
from beheld.models.find_shards import find
from beheld.models.load import model_class_of
from beheld.parallel.shard_plan import Shard
from beheld.parallel.shards import Zeros
from tests import census_media, tiny
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
    plan = find(model, info, 0, 2, towers=True)
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


def test_heads_of_towers_are_padded_and_other_forms_stay_whole(tmp_path: Path) -> None:
    """Two layers of SigLIP with two heads on three ranks; Pixtral's attention reads its whole size."""

    def parts(family: str, rank: int) -> dict[str, Shard]:
        path = tiny.checkpoint(family)
        args = EngineArgs(model=str(path))
        info = read_info(path, args)
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = model_class_of(info, config)._from_config(config)
        found = find(model, info, rank, 3, towers=True).shards
        assert not any(shard.tower for shard in find(model, info, rank, 3).shards)
        return {shard.path.partition("layers.")[2]: shard for shard in found if shard.tower}

    last = parts("gemma3", 2)
    assert set(last) == {f"{number}.{name}" for number in range(2) for name in ("self_attn", "mlp")}
    attention = last["0.self_attn"]
    sizes = {name.rpartition("self_attn.")[2]: cut for name, cut in attention.cuts.items()}
    # Its head is one of zeros.
    assert attention.sizes == {"num_heads": 1}
    assert [isinstance(piece, Zeros) for piece in sizes["q_proj.weight"].pieces] == [True]
    assert sizes["q_proj.weight"].size == sizes["out_proj.weight"].size
    assert {path.rpartition(".")[2] for path in parts("pixtral_hf", 0)} == {"feed_forward"}


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_experts_of_further_forms_are_cut(family: str, ranks: int) -> None:
    """Transposed, with biases of which one rank adds the last, gate and up side by side; or all in one product."""
    path = tiny.checkpoint(family)
    info = read_info(path, EngineArgs(model=str(path)))
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = model_class_of(info, config)._from_config(config)
    experts = {name: weight.shape for name, weight in model.named_parameters() if ".experts." in name}
    assert len(experts) >= 4
    plans = [find(model, info, rank, ranks) for rank in range(ranks)]
    for name, shape in experts.items():
        cuts = [plan.cuts[name] for plan in plans]
        size = shape[cuts[0].dim]
        places = [place for cut in cuts for piece in cut.pieces if isinstance(piece, range) for place in piece]
        assert sorted(places) == list(range(size)), name
        if not name.endswith("down_proj_bias"):
            assert len({cut.size for cut in cuts}) == 1
            assert cuts[0].size < size
        if name.endswith("gate_up_proj") and family == "gpt_oss":
            assert all(
                place % 2 == 0
                for cut in cuts
                for p in cut.pieces
                if isinstance(p, range)
                for place in (p.start, p.stop)
            )
    assert not plans[0].whole
    # Of a form that is not known: its outputs would be something else.
    module = model.get_submodule(next(iter(experts)).rpartition(".")[0])
    module.register_parameter("more", torch.nn.Parameter(torch.empty(3, device="meta")))
    assert find(model, info, 0, ranks).whole == ("1 modules of experts, which have another form",)


def test_a_stack_in_a_stack_is_cut_once() -> None:
    """Florence-2's tower is a list of stages, each of which is a list of layers."""
    path = tiny.checkpoint("florence2")
    info = read_info(path, EngineArgs(model=str(path)))
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = model_class_of(info, config)._from_config(config)
    found = [shard.path for shard in find(model, info, 0, 2, towers=True).shards if shard.tower]
    assert any(".blocks." in each for each in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("ranks", [4, 3])
def test_parts_of_experts_suit_a_grouped_product(ranks: int) -> None:
    """In bfloat16 it takes rows in multiples of 16 bytes: other parts are padded, and each unit is there once."""
    path = tiny.checkpoint("glm4v_moe")
    args = EngineArgs(model=str(path))
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path)
        model = model_class_of(read_info(path, args), config)._from_config(config).bfloat16()
    found: dict[str, list[int]] = {}
    for rank in range(ranks):
        plan = find(model, read_info(path, args), rank, ranks)
        for name, cut in plan.cuts.items():
            if name.endswith("experts.down_proj"):
                assert cut.size * 2 % 16 == 0
                assert plan.cuts[name.replace("down", "gate_up")].size == 2 * cut.size
                found.setdefault(name, []).extend(n for piece in cut.pieces if isinstance(piece, range) for n in piece)
    assert found
    for name, units in found.items():
        assert units == list(range(model.get_parameter(name).shape[2]))
