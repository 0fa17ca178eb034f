"""Our greedy answers equal transformers' own, token by token, whatever shares the batch, the steps and the cache."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from beheld import LLM, SamplingParams
from beheld.core.errors import ProcessError, PromptTooLongError
from beheld.inputs.pipeline import RequestOrder
from tests import tiny
from tests.inputs import pipes
from tests.long import LONG
from tests.oracle import cases, reference
from tests.oracle.cases import Ask, Case

# Where it is not 1e-4: Gemma 4's tiny checkpoint has norms that widen the rounding of any two float32 products of its
# matrices (up to 1.1e-4 between oneDNN's and MKL's).
LOGPROB_TOLERANCE = {"gemma4": 2e-4, "gemma4_dense": 2e-4}
RUNS = [
    (family, name, case)
    for family in tiny.TINY
    for name in (cases.ENGINES if LONG else cases.every_time(family))
    for case in cases.asked(family, name)
]


class OpenEngines:
    """The engines of the last test's family: its tests follow one another, and mostly want the same."""

    def __init__(self) -> None:
        self._family = ""
        self._open: dict[str, LLM] = {}

    def get(self, family: str, name: str) -> LLM:
        """The engine of `family` with the options called `name` in cases.options."""
        if family != self._family:
            self.close()
            self._family = family
        if name not in self._open:
            self._open[name] = make(family, cases.options(family, name))
        return self._open[name]

    def close(self) -> None:
        """Close those that are open."""
        while self._open:
            self._open.popitem()[1].close()


@pytest.fixture(scope="module")
def engines() -> Iterator[OpenEngines]:
    """Open engines of one family at a time."""
    found = OpenEngines()
    yield found
    found.close()


def make(family: str, options: dict[str, Any]) -> LLM:
    """An engine on the family's tiny checkpoint, in float32."""
    return LLM(model=str(tiny.checkpoint(family)), dtype="float32", seed=0, disable_log_stats=True, **options)


def request(family: str, ask: Ask) -> dict[str, Any]:
    """`ask` as the public API takes it."""
    data: dict[str, Any] = {}
    if ask.images and ask.as_embeds:
        data["image"] = reference.image_embeds(family, replace(ask, as_embeds=False))
    elif ask.images:
        pictures = ask.pictures()
        data["image"] = pictures if len(pictures) > 1 else pictures[0]
    if ask.videos:
        data["video"] = [(clip.array, clip.metadata) if clip.metadata else clip.array for clip in ask.videos]
    if ask.sounds:
        heard = [(wave, tiny.SOUND_RATE) for wave in ask.waves()]
        data["audio"] = heard if len(heard) > 1 else heard[0]
    return {"prompt": ask.prompt(family)} | ({"multi_modal_data": data} if data else {})


def check(llm: LLM, family: str, asks: Sequence[Ask]) -> None:
    """Put all of `asks` in one call and compare each answer with transformers'."""
    params = [SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True, logprobs=1) for ask in asks]
    outputs = llm.generate([request(family, ask) for ask in asks], params, use_tqdm=False)
    assert len(outputs) == len(asks)
    for ask, output in zip(asks, outputs, strict=True):
        expected, got = reference.answer(family, ask), output.outputs[0]
        assert tuple(output.prompt_token_ids) == expected.prompt_ids, ask
        assert tuple(got.token_ids) == expected.token_ids, ask
        said = [step[token].logprob for step, token in zip(got.logprobs, got.token_ids, strict=True)]
        assert said == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE.get(family, 1e-4)), ask


@pytest.mark.parametrize(("family", "name", "case"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_equals_transformers(engines: OpenEngines, family: str, name: str, case: Case) -> None:
    check(engines.get(family, name), family, case.asks)


@pytest.mark.parametrize("family", tiny.TINY if LONG else cases.of_each_form())
def test_mates_in_any_order(engines: OpenEngines, family: str) -> None:
    asks = cases.mixed(family)
    check(engines.get(family, "overlap"), family, asks[::-1])
    check(engines.get(family, "overlap"), family, asks[1::2] + asks[::2])


# Steps that overlap, as is usual; these, and in the long form each family, are preempted in step.
IN_STEP = ("llava", "qwen2_vl", "gemma2", "gemma4", "llama4", "paligemma", "florence2", "qwen3_next", "deepseek_v2")
PREEMPTED = [
    (family, overlap)
    for family in (tiny.TINY if LONG else cases.of_each_form())
    for overlap in ((True, False) if LONG else (family not in IN_STEP,))
]


@pytest.mark.parametrize(
    ("family", "overlap"), PREEMPTED, ids=lambda value: {True: "overlap", False: "in_step"}.get(value)
)
def test_preempted_sequences_resume(family: str, overlap: bool) -> None:
    with make(family, cases.tight(family) | {"async_scheduling": overlap}) as llm:
        check(llm, family, cases.crowd(family))
        # Where every layer slides, a sequence is admitted with all the blocks it will ever hold.
        assert (llm.stats().scheduler.num_preemptions > 0) == (family != "mistral")


@pytest.mark.parametrize("family", [name for name in tiny.IMAGE_FAMILIES if name not in tiny.UNSHARED_FAMILIES])
def test_a_prefix_is_shared_up_to_the_first_other_picture(family: str) -> None:
    block = 8
    token = reference.image_token(family)
    ids = reference.answer(family, cases.ONE).prompt_ids
    start, stop = ids.index(token), len(ids) - ids[::-1].index(token)
    with make(family, cases.ROOMY | {"block_size": block}) as llm:

        def hits(ask: Ask) -> int:
            before = llm.stats().scheduler.prefix_hits
            check(llm, family, [ask])
            return llm.stats().scheduler.prefix_hits - before

        assert hits(cases.ONE) == 0
        assert hits(cases.ONE) == (len(ids) - 1) // block * block
        # Some families put marks of their own before the first embedding, which belong to the picture as well.
        assert (start - 2) // block * block <= hits(cases.OTHER) <= start // block * block
        # A hit does not end within a picture that is computed in one step.
        least = 0 if family in tiny.WHOLE_FAMILIES else stop // block * block
        assert least <= hits(cases.ELSE) < len(ids)
        assert hits(*cases.fit(family, cases.TWICE)) <= start
        assert hits(cases.ONE) == (len(ids) - 1) // block * block


EXTREMES = [(1, 1), (3, 2), (64, 2), (7, 500), (500, 7), (590, 3)]


@pytest.mark.parametrize("family", tiny.IMAGE_FAMILIES)
@pytest.mark.case(23)
def test_extreme_pictures_are_answered_or_refused(engines: OpenEngines, family: str) -> None:
    """What no tower takes is refused with what to do, before the model runs: no step fails of a picture."""
    llm = engines.get(family, "roomy")
    for width, height in EXTREMES:
        picture = Image.new("RGB", (width, height), (200, 30, 40))
        prompt = {"prompt": tiny.prompt(family, 1), "multi_modal_data": {"image": picture}}
        try:
            (output,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        except (ProcessError, PromptTooLongError) as error:
            said = error.remedy
        else:
            said = str(output.outputs[0].token_ids)
        assert said, (width, height)


@pytest.mark.skipif("molmo2" not in tiny.TINY, reason="transformers has no Molmo 2")
def test_pictures_that_see_each_other_share_no_prefix_with_fewer() -> None:
    """In Molmo 2 a picture's keys depend on the pictures and videos behind it."""
    first, second = (84, 56, 1), (112, 56, 8)
    both = Ask("{i}{i}Compare them.", (first, second))
    alone = Ask("{i}What is in the first of them?", (first,))
    beside = Ask("{v}{i}Is it there?", (first,), (cases.Clip(4, 3, fps=2.0),))
    with make("molmo2", cases.ROOMY | {"block_size": 8}) as llm:
        for asks in ([both], [alone], [both, alone]):
            check(llm, "molmo2", asks)
        assert llm.stats().scheduler.prefix_hits > 0
        llm.reset_prefix_cache()
        check(llm, "molmo2", [alone])
        check(llm, "molmo2", [both])
        for asks in ([beside], [replace(beside, content="{v}Is it there?", images=())], [beside]):
            check(llm, "molmo2", asks)


@pytest.mark.parametrize("family", tiny.TEXT_FAMILIES)
def test_a_text_prefix_is_shared(family: str) -> None:
    with make(family, cases.ROOMY | {"block_size": 8}) as llm:
        for ask in (cases.LONG, cases.LONG, cases.LONG_ELSE):
            before = llm.stats().scheduler.prefix_hits
            check(llm, family, [ask])
        assert llm.stats().scheduler.prefix_hits > before > 0


@pytest.mark.parametrize("name", ["roomy", "cut"])
@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "ernie4_5_vl_moe"])
def test_embeddings_in_place_of_pictures(engines: OpenEngines, family: str, name: str) -> None:
    asks = [replace(ask, as_embeds=True) for ask in (cases.ONE, cases.FOUR, cases.APART)]
    check(engines.get(family, name), family, [*asks, cases.ONE, cases.SHORT])


CHATS = [
    (family, count)
    for family in tiny.TINY
    if family not in tiny.CHATLESS_FAMILIES
    for count in ((0, 1, 2) if family in tiny.IMAGE_FAMILIES else (0,))
]


@pytest.mark.parametrize(("family", "num_images"), CHATS)
def test_chat_gives_the_ids_of_the_template(engines: OpenEngines, family: str, num_images: int) -> None:
    pictures = tiny.pictures(num_images, seed=3)
    text = "What is in the picture, and what stands left of it?"
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}] if pictures else text}]
    params = SamplingParams(temperature=0, max_tokens=1)
    (output,) = engines.get(family, "roomy").chat(messages, params, use_tqdm=False)
    media = [{"type": "image", "image": picture} for picture in pictures]
    assert tuple(output.prompt_token_ids) == reference.chat_ids(family, media, text)


@pytest.mark.parametrize("family", [name for name in tiny.SOUND_FAMILIES if name not in tiny.CHATLESS_FAMILIES])
def test_chat_with_sounds_gives_the_ids_of_the_template(engines: OpenEngines, family: str) -> None:
    waves = [tiny.sound(0.5, 70), tiny.sound(0.5, 71)]
    encoded = [base64.b64encode(tiny.wav(wave)).decode() for wave in waves]
    parts: list[Any] = [
        {"type": "input_audio", "input_audio": {"data": encoded[0], "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + encoded[1]}},
    ]
    text = "What is in the sound, and who speaks?"
    params = SamplingParams(temperature=0, max_tokens=1)
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    (output,) = engines.get(family, "roomy").chat(messages, params, use_tqdm=False)
    media = [{"type": "audio", "audio": wave} for wave in waves]
    assert tuple(output.prompt_token_ids) == reference.chat_ids(family, media, text)
    assert [receipt.used["seconds"] for receipt in output.media] == [0.5, 0.5]


@pytest.mark.parametrize("family", tiny.SOUND_FAMILIES)
def test_a_prefix_is_shared_up_to_the_first_other_sound(family: str) -> None:
    block = 8
    token = reference.sound_token(family)
    ids = reference.answer(family, cases.HEARD).prompt_ids
    stop = len(ids) - ids[::-1].index(token)
    # Some families put a mark of their own before the first embedding, which belongs to the sound as well.
    start = (
        pipes.shared(family)
        .prepare(RequestOrder(request(family, cases.HEARD), pipes.ONE_TOKEN, request_id="0"))
        .spans[0]
        .start
    )
    assert ids.index(token) - 1 <= start <= ids.index(token)
    with make(family, cases.ROOMY | {"block_size": block}) as llm:

        def hits(ask: Ask) -> int:
            before = llm.stats().scheduler.prefix_hits
            check(llm, family, [ask])
            return llm.stats().scheduler.prefix_hits - before

        assert hits(cases.HEARD) == 0
        assert hits(cases.HEARD) == (len(ids) - 1) // block * block
        assert hits(cases.HEARD_OTHER) == start // block * block
        assert stop // block * block <= hits(cases.HEARD_ELSE) < len(ids)


def data_url(picture: Image.Image) -> str:
    """The picture as a PNG in a data URL."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
