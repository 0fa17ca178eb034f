"""Pictures, videos and sounds that scripts fetch or ask for by name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beheld.compat.assets import AudioAsset, ImageAsset, VideoAsset
from beheld.compat.media import convert_image_mode, fetch_audio, fetch_image, fetch_video, load_audio
from beheld.core.errors import DecodeError, FetchError, ParamsError
from beheld.inputs.fetch.fetch import FetchRules, fetch
from tests import tiny
from tests.inputs import pipes

DUCK = "https://upload.wikimedia.org/wikipedia/commons/d/da/2015_Kaczka_krzy%C5%BCowka_w_wodzie_%28samiec%29.jpg"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No host is known, and the folders of copies and assets are empty."""

    def unknown(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BEHELD_MEDIA_CACHE", str(tmp_path / "copies"))
    monkeypatch.setenv("BEHELD_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path


def lay(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name", ["2015_Kaczka_krzy%C5%BCowka_w_wodzie_%28samiec%29.jpg", "2015_Kaczka_krzyżowka_w_wodzie_(samiec).jpg"]
)
def test_a_copy_stands_for_its_address(offline: Path, name: str) -> None:
    picture = tiny.picture(40, 30, 1)
    lay(offline / "copies/upload.wikimedia.org/wikipedia/commons/d/da" / name, png(picture))
    found = fetch_image(DUCK)
    assert found.mode == "RGB"
    assert found.tobytes() == picture.tobytes()
    assert fetch_image(DUCK, image_mode="L").mode == "L"


def test_a_copy_of_an_address_with_a_query_and_a_port(offline: Path) -> None:
    lay(offline / "copies/host.test:8080/a/b?x=1", b"data")
    assert fetch("http://host.test:8080/a/b?x=1", "image", FetchRules()).data == b"data"
    with pytest.raises(FetchError):
        fetch("http://host.test:8080/a/b?x=2", "image", FetchRules())
    with pytest.raises(FetchError):
        fetch("http://host.test/a/b?x=1", "image", FetchRules())


def test_no_address_leads_out_of_the_folder_of_copies(offline: Path) -> None:
    lay(offline / "secret", b"secret")
    lay(offline / "copies/host.test/x", b"data")
    (offline / "copies/host.test/link").symlink_to(offline / "secret")
    for target in ("../../secret", "..%2f..%2fsecret", "%2e%2e/%2e%2e/secret", "x/../../../secret", "%00", "", "link"):
        with pytest.raises(FetchError):
            fetch(f"http://host.test/{target}", "image", FetchRules())


def test_a_copy_does_not_open_a_host_that_is_closed(offline: Path) -> None:
    lay(offline / "copies/host.test/x", b"data")
    with pytest.raises(FetchError, match="allowed_media_domains"):
        fetch("http://host.test/x", "image", FetchRules(domains=frozenset(("other.test",))))


def test_what_cannot_be_fetched_says_where_to_lay_it(offline: Path) -> None:
    with pytest.raises(FetchError) as caught:
        fetch_image(DUCK)
    assert "upload.wikimedia.org/wikipedia/commons/d/da/2015_Kaczka" in str(caught.value)
    assert str(offline / "copies") in str(caught.value)
    with pytest.raises(FetchError, match="scheme"):
        fetch_image("ftp://host.test/x")
    with pytest.raises(FetchError, match="Local files"):
        fetch_image("/etc/hostname")


def test_data_urls_and_what_is_not_a_picture(offline: Path) -> None:
    lay(offline / "copies/host.test/x.jpg", b"not a picture")
    with pytest.raises(DecodeError):
        fetch_image("http://host.test/x.jpg")


def test_video_and_sound_behind_addresses(offline: Path) -> None:
    pipes.write_video(offline / "v.mp4", tiny.frames(12))
    lay(offline / "copies/host.test/v.mp4", (offline / "v.mp4").read_bytes())
    frames, metadata = fetch_video("https://host.test/v.mp4", num_frames=4)
    assert frames.shape == (4, 56, 84, 3)
    assert metadata["frames_indices"] == [0, 3, 7, 11]
    assert fetch_video("https://host.test/v.mp4", num_frames=-1)[0].shape[0] == 12
    lay(offline / "copies/host.test/s.wav", wav(800, 8000))
    samples, rate = fetch_audio("https://host.test/s.wav")
    assert (samples.shape, rate) == ((800,), 8000)


def wav(count: int, rate: int) -> bytes:
    import wave

    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.arange(count, dtype=np.int16).tobytes())
    return buffer.getvalue()


def test_modes() -> None:
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert convert_image_mode(clear, "RGB").getpixel((0, 0)) == (255, 255, 255)
    assert convert_image_mode(clear, "RGBA") is clear
    assert convert_image_mode(Image.new("RGB", (2, 2), (9, 9, 9)), "L").getpixel((0, 0)) == 9
    with pytest.raises(ParamsError, match="'XYZ'"):
        convert_image_mode(clear, "XYZ")


# --- assets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["assets", "assets/vllm_public_assets", ".cache/vllm/assets/vllm_public_assets"])
def test_a_picture_by_name(offline: Path, folder: str) -> None:
    lay(offline / folder / "cherry_blossom.jpg", png(tiny.picture(40, 30, 2)))
    assert ImageAsset("cherry_blossom").pil_image.convert("RGB").size == (40, 30)


def test_a_video_by_its_old_and_its_new_name(offline: Path) -> None:
    (offline / "assets").mkdir()
    pipes.write_video(offline / "assets/sample_demo_1.mp4", tiny.frames(12))
    for name in ("sample_demo_1.mp4", "baby_reading"):
        asset = VideoAsset(name=name, num_frames=5)
        assert asset.np_ndarrays.shape == (5, 56, 84, 3)
        assert asset.np_ndarrays.dtype == np.uint8
        assert [picture.size for picture in asset.pil_images] == [(84, 56)] * 5
        assert asset.metadata["frames_indices"] == [0, 2, 5, 8, 11]
    assert len(VideoAsset("baby_reading").np_ndarrays) == 12
    with pytest.raises(DecodeError, match="no audio"):
        VideoAsset("baby_reading").get_audio()


def test_a_sound_by_name(offline: Path) -> None:
    assert AudioAsset("winning_call").url.endswith("/multimodal_asset/winning_call.ogg")
    lay(offline / "assets/winning_call.ogg", wav(400, 4000))
    samples, rate = AudioAsset("winning_call").audio_and_sample_rate
    with AudioAsset("winning_call").get_local_path().open("rb") as file:
        assert (load_audio(file, sr=None)[0] == samples).all()
    assert (len(samples), rate) == (400, 4000)


def test_an_asset_that_is_not_there_says_which_file_to_put_where(offline: Path) -> None:
    for ask, file in (
        (lambda: ImageAsset("stop_sign").pil_image, "stop_sign.jpg"),
        (lambda: VideoAsset("baby_reading").np_ndarrays, "sample_demo_1.mp4"),
        (lambda: AudioAsset("mary_had_lamb").audio_and_sample_rate, "mary_had_lamb.ogg"),
    ):
        with pytest.raises(FetchError) as caught:
            ask()
        assert f"Put the file at {offline / 'assets' / file}" in str(caught.value)
    for wrong in (ImageAsset("cherry_blosom"), VideoAsset("demo"), AudioAsset("call")):
        with pytest.raises(FetchError, match=r"There is no \w+Asset"):
            wrong.pil_image if isinstance(wrong, ImageAsset) else wrong.url if isinstance(
                wrong, AudioAsset
            ) else wrong.video_path


def test_what_was_fetched_is_kept(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = png(tiny.picture(40, 30, 3))
    # The network, as far as it matters here: a copy that is there once.
    lay(offline / "copies/vllm-public-assets.s3.us-west-2.amazonaws.com/vision_model_images/stop_sign.jpg", data)
    assert ImageAsset("stop_sign").pil_image.size == (40, 30)
    monkeypatch.setenv("BEHELD_MEDIA_CACHE", "")
    assert ImageAsset("stop_sign").pil_image.size == (40, 30)
    assert [path.name for path in (offline / "assets").iterdir()] == ["stop_sign.jpg"]


def test_frames_of_a_file(tmp_path: Path) -> None:
    from vllm.assets.video import video_get_metadata, video_to_ndarrays, video_to_pil_images_list

    path = tmp_path / "a.mp4"
    pipes.write_video(path, tiny.frames(12))
    frames = video_to_ndarrays(str(path), 4)
    assert frames.shape[0] == 4
    images = video_to_pil_images_list(str(path), 4)
    assert [np.asarray(image).tolist() for image in images] == frames.tolist()
    assert len(video_get_metadata(str(path), 4)["frames_indices"]) == 4
    assert len(video_to_ndarrays(str(path))) == 12
