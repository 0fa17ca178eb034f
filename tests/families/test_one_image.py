"""Encoder-decoders that read one image: how many states it has, what starts an answer, and who takes no text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from beheld.core.errors import PromptError
from beheld.families._shared.joined.inputs import start_token
from beheld.families._shared.t5.model import buckets_of_distances
from beheld.families.pix2struct.inputs import variant
from beheld.families.speech_encoder_decoder import states_of as heard
from beheld.families.vision_encoder_decoder import states_of as seen
from tests import census_media
from tests.long import LONG


@pytest.mark.parametrize(
    ("encoder", "height", "width", "count"),
    [
        ({"model_type": "donut-swin", "patch_size": 4, "depths": [2, 2, 14, 2]}, 2560, 1920, 80 * 60),
        ({"model_type": "donut-swin", "patch_size": 4, "depths": [2, 2, 14, 2]}, 896, 672, 28 * 21),
        ({"model_type": "vit", "patch_size": 16}, 384, 384, 577),
        ({"model_type": "deit", "patch_size": 16}, 384, 384, 578),
    ],
)
def test_states_of_published_towers(encoder: dict[str, Any], height: int, width: int, count: int) -> None:
    assert seen(encoder, height, width) == count


def test_states_of_a_second_of_speech() -> None:
    assert heard({}, 16000) == 49
    assert heard({"add_adapter": True}, 16000) == 7


def test_the_token_that_starts_answers_is_found_by_its_id(tmp_path: Path) -> None:
    config = {"decoder": {"bos_token_id": 0}, "decoder_start_token_id": 57}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokens = {"added_tokens": [{"id": 0, "content": "<s>"}, {"id": 57, "content": "<s_docvqa>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    assert start_token(tmp_path) == "<s_docvqa>"
    (tmp_path / "config.json").write_text(json.dumps({"decoder": {"bos_token_id": 0}}), encoding="utf-8")
    assert start_token(tmp_path) == "<s>"


@pytest.mark.parametrize("asks", [False, True])
def test_a_question_that_is_drawn_is_no_text(asks: bool, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"is_vqa": asks}), encoding="utf-8")
    rewrite = variant(tmp_path).rewrite
    assert rewrite is not None
    assert rewrite("", {"image": 1}) == "<pad>"
    if not asks:
        assert rewrite("A picture of", {"image": 1}) == "<pad>A picture of"
        return
    with pytest.raises(PromptError, match="reads its question from the image"):
        rewrite("What is it?", {"image": 1})


def test_the_bias_of_a_distance_is_that_of_transformers() -> None:
    from transformers import Pix2StructTextConfig
    from transformers.models.pix2struct.modeling_pix2struct import Pix2StructTextAttention

    attention = Pix2StructTextAttention(
        Pix2StructTextConfig(hidden_size=8, num_heads=2, d_kv=4), has_relative_attention_bias=True, layer_idx=0
    )
    torch.nn.init.normal_(attention.relative_attention_bias.weight)
    weight, length = attention.relative_attention_bias.weight, 300
    bias_HD = weight[buckets_of_distances(attention, weight.device)].T
    wanted_HPL = attention.compute_bias(length, length)[0]
    places = torch.arange(length)
    back_PL = (places[:, None] - places).clamp(0, bias_HD.shape[1] - 1)
    before_PL = places <= places[:, None]
    assert torch.equal(bias_HD[:, back_PL][:, before_PL], wanted_HPL[:, before_PL])


@pytest.mark.skipif(not LONG, reason="it makes and runs a checkpoint")
@pytest.mark.parametrize("learned", [True, False])
def test_trocr_answers_as_transformers_does(learned: bool, tmp_path: Path) -> None:
    """A decoder whose attention calls no AttentionInterface, with learned positions or sinusoidal ones."""
    donut = census_media.RECIPES["vision-encoder-decoder"]

    def config(ids: Any) -> dict[str, Any]:
        made = donut.config(ids)
        sizes = {name: value for name, value in made["decoder"].items() if not name.startswith("encoder_")}
        trocr = {"model_type": "trocr", "use_learned_position_embeddings": learned, "layernorm_embedding": learned}
        tower = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
        return made | {
            "decoder": sizes | trocr | {"cross_attention_hidden_size": 32},
            "encoder": {"model_type": "vit", "image_size": 56, "patch_size": 14, **tower},
        }

    def processor(tokenizer: Any) -> Any:
        return transformers.TrOCRProcessor(
            transformers.ViTImageProcessor(size={"height": 56, "width": 56}), tokenizer
        )  # fmt: skip

    recipe = replace(donut, config=config, processor=processor)
    model, made = census_media.make("vision-encoder-decoder", recipe, tmp_path)
    table = model.decoder.model.decoder.embed_positions
    if not learned:
        # transformers loads a model without them.
        table.weights = table.get_embedding(len(table.weights), table.embedding_dim, table.padding_idx)
    assert census_media.compare(tmp_path, model, made, recipe) == ""
