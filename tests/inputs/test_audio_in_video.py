"""The audio of a video through the pipeline: where it comes from, what receipts say, and what is refused."""

from __future__ import annotations

import base64
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from beheld.core.errors import (
    BeheldError,
    ConfigError,
    DecodeError,
    LimitError,
    ParamsError,
    PlaceholderError,
    PromptError,
)
from beheld.core.request import Request
from beheld.inputs.pipeline import Chat, InputPipeline, RequestOrder
from tests import tiny
from tests.inputs import pipes

FAMILY = "qwen2_5_omni"
OPTION = {"use_audio_in_video": True}
FRAMES = tiny.frames(8, 1)
CLIP = (FRAMES, {"fps": 2.0})
WAVE = (tiny.sound(4.0, 1), tiny.SOUND_RATE)


def ask(pipe: InputPipeline, videos: Any, audio: Any = None, text: str = "{v}What?", **more: Any) -> Request:
    for mark, count in (("{v}", {"num_videos": 1}), ("{a}", {"num_sounds": 1})):
        text = text.replace(mark, tiny.markers(FAMILY, **count))
    data = {"video": videos, "audio": audio}
    prompt = {"prompt": text, "multi_modal_data": data, "mm_processor_kwargs": OPTION, **more}
    return pipe.prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))


def file_of(path: Path, wave: Any = None) -> Path:
    """A file of FRAMES, two a second, with a track of audio if there is one."""
    import av

    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=2)
        video.width, video.height, video.pix_fmt = FRAMES.shape[2], FRAMES.shape[1], "yuv420p"
        heard = None if wave is None else container.add_stream("flac", rate=tiny.SOUND_RATE, layout="mono")
        for frame in FRAMES:
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(video.encode(None))
        if heard is not None:
            samples = (wave * 32767).astype("<i2")[None]
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = tiny.SOUND_RATE, 0, Fraction(1, tiny.SOUND_RATE)
            cut = av.AudioResampler(format="s16", layout="mono", frame_size=4096)
            for piece in (*cut.resample(frame), *cut.resample(None)):
                container.mux(heard.encode(piece))
            container.mux(heard.encode(None))
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A video with a track of audio, and one without."""
    return file_of(tmp_path / "heard.mkv", WAVE[0]), file_of(tmp_path / "silent.mkv")


def test_audio_beside_frames_is_read_with_them() -> None:
    request = ask(pipes.shared(FAMILY), [CLIP], [WAVE])
    (span,) = request.spans
    info = pipes.info(FAMILY)
    inside = request.token_ids[span.start : span.stop]
    assert inside.count(info.placeholder_ids["audio"]) == 100
    assert len(inside) == span.item.num_embeds + 2
    video, audio = request.receipts
    assert (video.item, video.used["interleaved_with"]) == ("video 1", "audio 1")
    assert (audio.item, audio.used["interleaved_with"], audio.used["seconds"]) == ("audio 1", "video 1", 4.0)
    assert video.tokens + audio.tokens == span.item.num_embeds


@pytest.mark.parametrize("family", tiny.THINKERS)
def test_the_track_of_a_file_is_the_audio_of_its_frames(family: str, files: tuple[Path, Path]) -> None:
    pipe = pipes.make(family, {"max_model_len": 4096, "max_encoder_tokens": 4096})
    prompt = {"prompt": tiny.markers(family, num_videos=1), "mm_processor_kwargs": OPTION}
    made = [
        pipe.prepare(RequestOrder(prompt | {"multi_modal_data": data}, pipes.ONE_TOKEN, request_id="0"))
        for data in ({"video": files[0].read_bytes()}, {"video": CLIP, "audio": WAVE})
    ]
    own, given = (request.spans[0].item for request in made)
    assert made[0].token_ids == made[1].token_ids
    assert own.layout == given.layout
    assert (own.features["input_features"] - given.features["input_features"]).abs().max() < 1e-2
    assert [receipt.given["source"] for receipt in made[0].receipts] == ["bytes", "bytes"]
    again = pipe.prepare(
        RequestOrder(prompt | {"multi_modal_data": {"video": files[0].read_bytes()}}, pipes.ONE_TOKEN, request_id="1")
    )
    assert [receipt.cached for receipt in again.receipts] == [True, True]
    assert again.spans[0].item.digest == own.digest != given.digest


def test_other_audio_makes_another_item() -> None:
    pipe = pipes.shared(FAMILY)
    other = (tiny.sound(4.0, 2), tiny.SOUND_RATE)
    items = [ask(pipe, [CLIP], [wave]).spans[0].item for wave in (WAVE, other, WAVE)]
    assert items[0].digest == items[2].digest != items[1].digest


@pytest.mark.parametrize(
    "option",
    [OPTION, {"load_audio_from_video": True}, {"videos_kwargs": OPTION}],
    ids=["vllm", "transformers", "group"],
)
def test_the_option_in_each_of_its_forms(option: dict[str, Any]) -> None:
    asked = ask(pipes.shared(FAMILY), [CLIP], [WAVE], mm_processor_kwargs=option)
    engine = pipes.make(FAMILY, mm_processor_kwargs=option)
    assert asked.token_ids == ask(engine, [CLIP], [WAVE], mm_processor_kwargs=None).token_ids
    # A request may switch off what the engine has on.
    with pytest.raises(PlaceholderError, match="0 of the placeholder"):
        ask(
            engine,
            [CLIP],
            [WAVE],
            mm_processor_kwargs=dict.fromkeys(("use_audio_in_video",), False)
            | ({"load_audio_from_video": False, "videos_kwargs": {"use_audio_in_video": False}}),
        )


def test_audio_by_its_name_is_not_the_track_of_the_file(files: tuple[Path, Path]) -> None:
    pipe = pipes.shared(FAMILY)
    other = (tiny.sound(4.0, 7), tiny.SOUND_RATE)
    film = [files[0].read_bytes()]
    named = ask(pipe, film, [other], multi_modal_uuids={"audio": ["tracks voice"]})
    assert ask(pipe, film, None).spans[0].item.digest != named.spans[0].item.digest
    again = ask(pipe, film, [None], multi_modal_uuids={"audio": ["tracks voice"]})
    assert again.spans[0].item.digest == named.spans[0].item.digest


def test_audio_alone_is_read_alone() -> None:
    pipe = pipes.shared(FAMILY)
    plain = ask(pipe, None, [WAVE], "{a}What?")
    assert plain.token_ids == ask(pipe, None, [WAVE], "{a}What?", mm_processor_kwargs=None).token_ids
    second = (tiny.sound(1.0, 5), tiny.SOUND_RATE)
    for text, order in (("{v}{a}", [WAVE, second]), ("{a}{v}", [second, WAVE])):
        request = ask(pipe, [CLIP], order, text)
        assert {span.item.modality: span.item.num_embeds for span in request.spans}["audio"] == 25
        assert [receipt.used.get("interleaved_with") for receipt in request.receipts].count("video 1") == 1


@pytest.mark.parametrize(
    ("videos", "audio", "text", "error", "words"),
    [
        ([CLIP], None, "{v}", DecodeError, "given as frames, which have no audio"),
        ([CLIP], [WAVE, WAVE], "{v}", PlaceholderError, "or 1 if the videos' files have no audio; 2 were given"),
        ([CLIP, CLIP], [WAVE], "{v}{v}", PlaceholderError, "2 videos and 0 placeholders of audio .* 1 were given"),
        ([CLIP], [WAVE], "{v}{a}", DecodeError, "given as frames"),
        ([CLIP], [WAVE], "{v}{a}{a}", PlaceholderError, "1 were given"),
    ],
)
def test_items_that_do_not_match_are_refused(videos: Any, audio: Any, text: str, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        ask(pipes.shared(FAMILY), videos, audio, text)


def test_a_file_without_audio_is_refused_by_name(files: tuple[Path, Path]) -> None:
    with pytest.raises(DecodeError, match="audio of video 2 cannot be read: The file holds no audio") as caught:
        ask(pipes.shared(FAMILY), [file.read_bytes() for file in files], None, "{v}{v}")
    assert "leave out use_audio_in_video" in caught.value.remedy


def test_the_option_is_true_or_false() -> None:
    with pytest.raises(ParamsError, match="use_audio_in_video must be true or false"):
        ask(pipes.shared(FAMILY), [CLIP], [WAVE], mm_processor_kwargs={"use_audio_in_video": "yes"})
    with pytest.raises(ConfigError, match="use_audio_in_video must be true or false"):
        pipes.make(FAMILY, mm_processor_kwargs={"use_audio_in_video": 1})


def test_tracks_count_as_audio(files: tuple[Path, Path]) -> None:
    pipe = pipes.make(FAMILY, {"limit_per_prompt": {"video": 2, "audio": 1, "image": 1}})
    with pytest.raises(LimitError, match="audio"):
        ask(pipe, [files[0].read_bytes()] * 2, None, "{v}{v}")


# --- conversations ---------------------------------------------------------------------------------------------------


def url(data: bytes, kind: str) -> dict[str, Any]:
    return {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}


def talk(pipe: InputPipeline, *parts: dict[str, Any], option: Any = OPTION) -> Request:
    content = [*parts, {"type": "text", "text": "What?"}]
    chat = Chat([{"role": "user", "content": content}], mm_processor_kwargs=option)
    return pipe.prepare(RequestOrder(chat, pipes.ONE_TOKEN, request_id="0"))


def test_a_conversation_reads_the_track_of_a_file(files: tuple[Path, Path]) -> None:
    pipe = pipes.shared(FAMILY)
    video = {"type": "video_url", "video_url": url(files[0].read_bytes(), "video/x-matroska")}
    (span,) = talk(pipe, video).spans
    assert span.item.layout["use_audio_in_video"] == (True,)
    question = {"type": "audio_url", "audio_url": url(tiny.wav(WAVE[0][:8000]), "audio/wav")}
    alone, whole = talk(pipe, question, video).spans
    assert (alone.item.modality, alone.item.num_embeds) == ("audio", 12)
    assert whole.item.digest == span.item.digest


def test_a_marked_part_is_the_audio_of_the_video_before_it(files: tuple[Path, Path]) -> None:
    pipe = pipes.shared(FAMILY)
    video = {"type": "video", "video": CLIP}
    audio = {"type": "audio_url", "audio_url": url(tiny.wav(WAVE[0]), "audio/wav")} | OPTION
    (span,) = talk(pipe, video, audio, option=None).spans
    assert span.item.num_embeds == ask(pipe, [CLIP], [WAVE]).spans[0].item.num_embeds
    assert talk(pipe, video, audio).spans[0].item.digest == span.item.digest
    with pytest.raises(PromptError, match="no video precedes it"):
        talk(pipe, audio, video)
    with pytest.raises(DecodeError, match="It has 2 audio items") as caught:
        talk(pipe, video, audio, audio)
    assert caught.value.item == "video 1"
    with pytest.raises(DecodeError, match="another video of the prompt has") as caught:
        talk(pipe, video, audio, video, option=None)
    assert caught.value.item == "video 2"
    with pytest.raises(DecodeError, match="given as frames") as caught:
        talk(pipe, video)
    assert "directly after the video" in caught.value.remedy
    with pytest.raises(PromptError, match="must be true or false"):
        talk(pipe, video, audio | {"use_audio_in_video": 1})


def test_other_families_refuse_it() -> None:
    pipe = pipes.shared("qwen2_audio")
    prompt = {"prompt": tiny.markers("qwen2_audio", num_sounds=1), "multi_modal_data": {"audio": WAVE}}
    with pytest.raises(BeheldError, match="no option 'use_audio_in_video'"):
        pipe.prepare(RequestOrder(prompt | {"mm_processor_kwargs": OPTION}, pipes.ONE_TOKEN, request_id="0"))
