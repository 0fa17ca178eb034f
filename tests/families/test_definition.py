"""A family that transformers does not know: its own configuration, model and processor, through the whole oracle."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from beheld.checkpoint.info import read_config, read_info
from beheld.cli.main import main
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.engine.setup import describe
from beheld.families import page, registry
from beheld.tools.verify.compare import SAME
from beheld.tools.verify.run import Sides
from beheld.tools.verify.trace import Question
from tests import tiny, tiny_media
from tests import tiny_text as text
from tests.families.seer.config import SeerConfig
from tests.families.seer.modeling import SeerForConditionalGeneration
from tests.families.seer.processing import load
from tests.oracle import cases, reference, test_oracle
from tests.oracle.cases import Case

PACKAGE = "tests.families.seer"
FAMILY = "seer"


def make_seer(path: Path) -> None:
    """A checkpoint of it; config.json names a model type that transformers does not know."""
    ids = text.write_llama_tokenizer(path, ("<image>", "<pad>", "<look>", "<end>"), {"pad_token": "<pad>"})
    config = {
        "architectures": ["SeerForConditionalGeneration"],
        "image_token_id": ids["<image>"],
        "model_type": "seer",
        "text_config": tiny.LLAMA_SHAPE | {"max_position_embeddings": 1024, "rms_norm_eps": 1e-5},
        "torch_dtype": "float32",
        "vision_config": {"hidden_size": 32, "num_heads": 2},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = SeerForConditionalGeneration(SeerConfig.from_dict(config))
        tiny._fill(model)
    with torch.no_grad():
        model.lm_head.weight[[ids[mark] for mark in ("<image>", "<pad>", "<look>", "<end>", "<s>", "<unk>")]] *= 0.05
        model.lm_head.weight[len(ids) :] *= 0.05
    model.save_pretrained(path)
    text.write_json(path / "config.json", config)
    text.write_json(path / "generation_config.json", {"eos_token_id": ids["</s>"], "bos_token_id": ids["<s>"]})
    pixels = {"do_resize": False, "do_center_crop": False, "image_mean": tiny.HALF, "image_std": tiny.HALF}
    text.write_json(path / "preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor", **pixels})


@pytest.fixture(scope="module", autouse=True)
def seer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The family is known, and its checkpoint is one of those that the oracle asks, as long as this module runs."""
    folder = tmp_path_factory.mktemp("seer")
    make_seer(folder)
    with pytest.MonkeyPatch.context() as patch, registry.registered(PACKAGE):
        model, processor = _model(folder), load(folder)
        of_others = {name: getattr(reference, name) for name in ("model", "processor")}
        patch.setattr(tiny, "checkpoint", cache(lambda family: folder))
        patch.setattr(tiny, "IMAGE_FAMILIES", (*tiny.IMAGE_FAMILIES, FAMILY))
        patch.setattr(tiny, "MEDIA_FAMILIES", (*tiny.MEDIA_FAMILIES, FAMILY))
        patch.setitem(tiny_media.FORMS, FAMILY, "USER: {} ASSISTANT:")
        patch.setattr(reference, "model", lambda family: model if family == FAMILY else of_others["model"](family))
        patch.setattr(
            reference, "processor", lambda family: processor if family == FAMILY else of_others["processor"](family)
        )
        yield folder


def _model(folder: Path) -> Any:
    config = SeerConfig.from_pretrained(folder)
    model = SeerForConditionalGeneration.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model


@pytest.fixture(scope="module")
def engines(seer: Path) -> Iterator[test_oracle.OpenEngines]:
    found = test_oracle.OpenEngines()
    yield found
    found.close()


def the_cases() -> tuple[Case, ...]:
    """Those of a family with images, which this one is while the fixture holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "IMAGE_FAMILIES", (*tiny.IMAGE_FAMILIES, FAMILY))
        return cases.cases(FAMILY)


@pytest.mark.parametrize("case", the_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["roomy", "cut", "odd"])
def test_equals_its_own_generate(engines: test_oracle.OpenEngines, name: str, case: Case) -> None:
    test_oracle.check(engines.get(FAMILY, name), FAMILY, case.asks)


def test_mates_in_any_order(engines: test_oracle.OpenEngines) -> None:
    test_oracle.test_mates_in_any_order(engines, FAMILY)


@pytest.mark.parametrize("overlap", [False, True], ids=["in_step", "overlap"])
def test_preempted_sequences_resume(overlap: bool) -> None:
    test_oracle.test_preempted_sequences_resume(FAMILY, overlap)


def test_a_prefix_is_shared_up_to_the_first_other_image() -> None:
    test_oracle.test_a_prefix_is_shared_up_to_the_first_other_picture(FAMILY)


def test_choices_are_clear_and_images_change_them() -> None:
    asks = cases.all_asks(FAMILY)
    assert min(min(reference.answer(FAMILY, ask).gaps) for ask in asks) > 1e-3
    assert reference.answer(FAMILY, cases.ONE).token_ids != reference.answer(FAMILY, cases.OTHER).token_ids


def test_verify_compares_every_stage(seer: Path) -> None:
    with Sides(EngineArgs(model=str(seer), media_workers=0)) as sides:
        prompt = tiny.wrap(FAMILY, "<image>and <image>?")
        stages, culprit = sides.ask(Question(prompt, [tiny.picture(84, 56, 1), tiny.picture(56, 56, 2)], "plain", 5))
    assert culprit is None
    told = {stage.name: stage.verdict for stage in stages}
    for name in ("token ids", "pixel values", "merged embeddings", "logits", "tokens"):
        assert told[name] == SAME, name


def test_it_is_read_weighed_and_listed(seer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = EngineArgs(model=str(seer))
    assert isinstance(read_config(seer, args), SeerConfig)
    info = read_info(seer, args)
    assert (info.family, info.architecture, info.modalities) == (PACKAGE, "SeerForConditionalGeneration", ("image",))
    own = sum(parameter.numel() for parameter in reference.model(FAMILY).parameters())
    assert describe(args)[2]["parameters"] == own
    assert "nobody/seer" in page.markdown()
    assert main(["models"]) == 0
    assert "nobody/seer" in capsys.readouterr().out


def test_without_the_family_it_is_refused(seer: Path) -> None:
    registry.families.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", [])
        with pytest.raises(ModelError, match="'seer' is not one this version of transformers can read"):
            read_info(seer, EngineArgs(model=str(seer)))
    registry.families.cache_clear()
