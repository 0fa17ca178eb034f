"""The census tells what runs, what is refused and what is broken, and some text types that only it makes run."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from packaging.version import Version

from beheld import LLM
from beheld.checkpoint.info import read_config, read_info
from beheld.core.config import EngineArgs
from beheld.core.errors import ModelError
from beheld.families import registry
from beheld.families.text_types import TEXT_TYPES
from beheld.models.hf import _takes_nested_routes
from tests import census, census_media, tiny
from tests.long import LONG

# Of the text types that run, those whose layers or caches no row of the oracle has.
RUN = ("gpt2", "lfm2_moe", "longcat_flash", "zamba2", "falcon_mamba", "kimi_linear", "minimax", "rwkv")
RUN += ("gemma3n_text", "gemma4_text", "ctrl", "dbrx", "jetmoe")
RUN += ("bailing_hybrid", "diffllama", "lara_mini", "olmo_hybrid")


def known(kind: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return kind in CONFIG_MAPPING


SHORT = ["minicpmv4_6", "canary", "pix2struct", "t5gemma2", "instructblip", "apertus1p5"]
FULL = [*TEXT_TYPES, *census.RECIPES] if LONG else [*RUN, *SHORT]


def installed(kind: str) -> bool:
    """Whether the package that transformers' class or processor needs is there, and transformers is new enough."""
    family = registry.facts(registry.find(kind))
    new = family.oldest is None or Version(transformers.__version__) >= Version(family.oldest.version)
    return new and (not family.package or find_spec(family.package) is not None)


@pytest.mark.parametrize("kind", [kind for kind in FULL if known(kind) and installed(kind)])
def test_these_run(kind: str) -> None:
    assert census.examine(kind) == census.Finding("run")


def test_every_text_type_that_runs_is_listed() -> None:
    assert set(RUN) <= set(TEXT_TYPES)
    assert list(TEXT_TYPES) == sorted(TEXT_TYPES)


@pytest.mark.parametrize("kind", [kind for kind in TEXT_TYPES if known(kind)])
def test_what_runs_is_read(kind: str, tmp_path: Path) -> None:
    """The quick form of the census: the configuration is one that the engine takes."""
    assert census.read(kind, tmp_path) == census.Finding("untried", "it has no recipe")


@pytest.mark.parametrize("kind", [kind for kind in census.RECIPES if known(kind)])
def test_a_recipe_belongs_to_a_row(kind: str) -> None:
    (row,) = (row for row in registry.facts(registry.find(kind)).tested if row.name == kind)
    assert row.by_census
    assert kind in census.media_types()
    # What a row says that it takes is asked about.
    recipe = census.RECIPES[kind]
    assert ("image" in row.modalities, "audio" in row.modalities) == (bool(recipe.image), bool(recipe.audio))


@pytest.mark.skipif(not known("apertus1p5"), reason="transformers 5.24 has it first")
def test_codes_are_chosen_in_float32_whatever_the_models_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels and samples of 16 bits would have other codes than those that the tokenizers read in transformers."""
    from transformers.models.apertus1p5.modeling_apertus1p5 import Apertus1p5Model

    recipe = census.RECIPES["apertus1p5"]
    model, processor = census_media.make("apertus1p5", recipe, tmp_path)
    asked = [media for media in census_media.questions(recipe) if len(media) == 1]
    found: list[list[list[int]]] = []
    for name in ("get_image_tokens", "get_audio_tokens"):
        usual = getattr(Apertus1p5Model, name)

        def told(*given: Any, usual: Any = usual) -> Any:
            codes = usual(*given)
            found.append([each.tolist() for each in codes])
            return codes

        monkeypatch.setattr(Apertus1p5Model, name, told)
    for media in asked:
        census_media.expected(model, processor, recipe, media)
    wanted = found.copy()
    room = {"dtype": "bfloat16", "max_num_seqs": 4, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 512}
    with LLM(model=str(tmp_path), **room, **census_media.options(recipe)) as llm:
        # What the engine's self-test encodes is left out.
        found.clear()
        llm.generate([census_media.request(recipe, media) for media in asked], use_tqdm=False)
    assert sorted(found) == sorted(wanted)


REFUSED = {
    "dots3_note": "latent layers with a window",
    "glm5_next": "hyper-connections carry several residual streams",
    "hy_v4": "of kind 'indexed_attention'",
    "xlstm": "a matrix of memory and its normalizer",
    "recurrent_gemma": "of kind 'linear_attention'",
    "pi0": "the motions of a robot",
    "qwen4_exp": "embed hashed n-grams of the last tokens",
    "pop2piano": "its answer is notes of a MIDI file",
    "moshi": "its text follows its own speech",
}


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if known(kind)])
def test_a_refusal_names_what_is_missing(kind: str) -> None:
    found = census.examine(kind)
    assert found.verdict == "refused"
    assert REFUSED[kind] in found.said


@pytest.mark.parametrize("version", ["5.17.0", "5.22.2"])
def test_a_transformers_that_is_too_old_is_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers would be wrong: images that are encoded together change each other."""
    config = {"model_type": "minimax_m3_vl", "architectures": ["MiniMaxM3SparseForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(
        ModelError, match=rf"need transformers 5\.23: {version}, which is installed, lets the"
    ) as caught:
        read_config(tmp_path, EngineArgs())
    assert caught.value.remedy == "Install it: pip install 'transformers>=5.23'"
    for known in ("5.23.0", "5.24.0.dev0", "6.0"):
        monkeypatch.setattr("transformers.__version__", known)
        assert read_config(tmp_path, EngineArgs()).model_type == "minimax_m3_vl"


@pytest.mark.parametrize(("version", "nested"), [("5.17.0", False), ("5.19.0", False), ("5.20.1", True), ("6.0", True)])
def test_parts_of_parts_are_routed_where_transformers_takes_them(
    version: str, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`set_attn_implementation` takes a dict within a dict since 5.20; before, such a model did not start."""
    monkeypatch.setattr("transformers.__version__", version)
    assert _takes_nested_routes() is nested


@pytest.mark.parametrize("kind", [kind for kind in census.media_types() if kind not in census.RECIPES])
def test_no_type_that_reads_media_is_broken(kind: str) -> None:
    """It is refused in words, or read."""
    assert census.examine(kind).verdict in ("run", "refused", "untried")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("falcon", "FalconModel has no list `layers`"),
        ("doge", "unsupported attention options: a mask"),
        ("whisper", "the decoder of an encoder-decoder model, without its encoder"),
    ],
)
def test_these_are_refused(kind: str, said: str) -> None:
    found = census.examine(kind)
    assert found.verdict == "refused"
    assert said in found.said


class _Model:
    """What compare asks an engine for: the answer that it was made with, to each prompt."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __enter__(self) -> _Model:
        return self

    def __exit__(self, *unused: object) -> None:
        return None

    def generate(self, prompts: list[Any], *unused: object, **options: object) -> list[Any]:
        return [self._answer] * len(prompts)


def compared(monkeypatch: pytest.MonkeyPatch, chosen: int, others: torch.Tensor) -> str:
    """Compare one question with one image: an engine that answers `chosen`, and log-probabilities that agree.

    `others` (V) are the logits about another image.
    """
    recipe = census_media.Recipe((), lambda ids: {}, lambda tokenizer: None, "<image>", most=1)
    logits_V = torch.tensor([2.0, 1.0, 0.0])
    image, other = tiny.picture(84, 56, 1), tiny.picture(84, 56, 9)

    def expected(model: Any, processor: Any, recipe: Any, asked: Any) -> tuple[list[int], list[int], torch.Tensor]:
        about_other = bool(asked) and asked[0].tobytes() == other.tobytes()
        return [5], [0], (others if about_other else logits_V)[None]

    logprob = float(logits_V.log_softmax(-1)[chosen])
    sample = SimpleNamespace(token_ids=[chosen], logprobs=[{chosen: SimpleNamespace(logprob=logprob)}])
    answer = SimpleNamespace(prompt_token_ids=[5], outputs=[sample])
    monkeypatch.setattr(census_media, "questions", lambda recipe: [[], [image]])
    monkeypatch.setattr(census_media, "expected", expected)
    monkeypatch.setattr("beheld.LLM", lambda **options: _Model(answer))
    return census_media.compare(Path("unused"), None, None, recipe)


def test_another_token_must_be_as_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log-probability of its own may be right of a token that is not the answer."""
    others = torch.tensor([0.0, 1.0, 2.0])
    assert compared(monkeypatch, 0, others) == ""
    assert "token 0 is not the most likely one" in compared(monkeypatch, 1, others)


def test_another_image_must_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not, an engine that shows a wrong image would pass."""
    assert compared(monkeypatch, 0, torch.tensor([2.0, 1.0, 0.001])) == "the answers do not depend on the image"


def test_other_answers_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = census.expected

    def wrong(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
        tokens, logits_NV = right(model, prompt)
        return tokens, logits_NV * 1.05

    monkeypatch.setattr(census, "expected", wrong)
    found = census.examine("llama")
    assert found.verdict == "broken"
    assert "a log-probability is off by" in found.said


class _Watched(LLM):
    """An engine whose counters are kept when it ends."""

    ended: ClassVar[list[Any]] = []

    def __exit__(self, *error: object) -> None:
        self.ended.append(self.stats().scheduler)
        super().__exit__(*error)


@pytest.mark.parametrize("kind", ["zamba2", "lfm3_vl"])
def test_answers_are_found_in_the_cache_and_preempted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beheld.LLM", _Watched)
    monkeypatch.setattr(_Watched, "ended", [])
    assert census.examine(kind) == census.Finding("run")
    roomy, tight = _Watched.ended
    assert roomy.prefix_hits > 0 == roomy.num_preemptions
    assert tight.num_preemptions > 0


def test_what_transformers_cannot_make_is_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(census.SIZES, "num_attention_heads", 7)
    assert census.examine("llama").verdict == "untried"


def test_a_process_that_dies_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "_quietly", lambda kind, send: 1 / 0)
    assert census.apart("llama").verdict == "broken"


def test_a_process_that_computes_for_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time is counted: on a busy machine, a type that waits is not broken."""
    monkeypatch.setattr(census, "_MOST_S", 1)

    def forever(kind: str) -> None:
        while True:
            pass

    monkeypatch.setattr(census, "examine", forever)
    assert census.apart("llama") == census.Finding("broken", "it took more than 1 s of processor time")


def test_the_status_tells_of_broken_ones(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = {"a": census.Finding("run"), "b": census.Finding("refused", "why")}
    monkeypatch.setattr(census, "apart", verdicts.__getitem__)
    assert census.main(["a", "b"]) == 0
    said = "1 refused, 1 run; 0 that read media run, and 1 of text alone"
    assert capsys.readouterr().out == f"run      a\nrefused  b: why\n{said}\n"
    verdicts["c"] = census.Finding("broken", "how")
    assert census.main(["a", "c"]) == 1


def test_the_status_tells_that_few_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "apart", lambda kind: census.Finding("run"))
    assert census.main([]) == 0
    media = census.media_types()
    monkeypatch.setattr(census, "apart", lambda kind: census.Finding("refused" if kind in media else "run"))
    assert census.main([]) == 1
    assert census.main(["1/2"]) == 0


def test_parts_make_the_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(census, "apart", lambda kind: census.Finding("run"))

    def seen(*arguments: str) -> list[str]:
        assert census.main([*arguments]) == 0
        return sorted(line.split()[1] for line in capsys.readouterr().out.splitlines()[:-1])

    whole = seen()
    assert len(whole) > 290
    assert sorted(seen("1/3") + seen("2/3") + seen("3/3")) == whole


def test_an_indexer_is_refused(tmp_path: Path) -> None:
    config = census.tiny_config("deepseek_v3").to_dict() | {"index_topk": 16}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="An indexer of deepseek_v3"):
        read_info(tmp_path, EngineArgs())
