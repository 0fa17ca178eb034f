"""Pictures of every kind: what the model sees is what a careful user would see, and every loss is told."""

from __future__ import annotations

import ast
import contextlib
import io
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import GifImagePlugin, Image, ImageOps, PngImagePlugin, WebPImagePlugin, features

from beheld.core.config import MediaLimits
from beheld.core.errors import (
    ConfigError,
    DecodeError,
    LimitError,
    MediaError,
    MediaLossError,
    ParamsError,
    ProcessError,
)
from beheld.inputs.media import decode, header
from beheld.inputs.pipeline import RequestOrder
from tests import tiny
from tests.inputs import pipes

LIMITS = MediaLimits()
ALL = MediaLimits(image_formats="all")
PICTURE = tiny.picture(84, 56, 1)


def opened(image: Image.Image, file_format: str = "PNG", **options: Any) -> decode.DecodedImage:
    return decode.open_bytes(pipes.encoded(image, file_format, **options), LIMITS)


def same(left: Image.Image, right: Image.Image) -> bool:
    return left.size == right.size and left.mode == right.mode and left.tobytes() == right.tobytes()


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P"])
@pytest.mark.parametrize("file_format", ["PNG", "GIF", "BMP"])
def test_plain_modes_lose_nothing(mode: str, file_format: str) -> None:
    if (mode, file_format) in (("RGB", "GIF"), ("1", "GIF")):
        pytest.skip("GIF has no such pictures")
    image = PICTURE.convert(mode)
    picture = opened(image, file_format)
    assert same(picture.image, image.convert("RGB"))
    assert picture.lost == ()
    assert (picture.given["width"], picture.given["height"]) == (84, 56)
    assert picture.given["format"] == file_format


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.case(25)
def test_exif_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = pipes.encoded(PICTURE, "JPEG", exif=exif, quality=90)
    picture = decode.open_bytes(data, LIMITS)
    with Image.open(io.BytesIO(data)) as image:
        assert same(picture.image, ImageOps.exif_transpose(image).convert("RGB"))
    turned = {"exif_rotated": True, "exif_orientation": orientation}
    assert picture.treated == (turned if orientation != 1 else {})
    assert picture.lost == ()


@pytest.mark.filterwarnings("ignore:.*EXIF.*:UserWarning")
@pytest.mark.case(25)
def test_broken_exif_is_no_obstacle() -> None:
    data = pipes.encoded(PICTURE, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode.open_bytes(data, LIMITS).image.size == (84, 56)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
@pytest.mark.case(25)
def test_transparency_is_laid_on_white(mode: str) -> None:
    image = PICTURE.convert("RGBA")
    image.putalpha(Image.fromarray(np.tile(np.linspace(0, 255, 84).astype(np.uint8), (56, 1))))
    image = image.convert(mode)
    layered = image.convert("RGBA")
    expected = Image.new("RGB", image.size, "white")
    expected.paste(layered, mask=layered.getchannel("A"))
    picture = decode.from_pil(image, LIMITS)
    assert same(picture.image, expected)
    assert "transparency" in picture.lost[0]


def test_an_opaque_alpha_channel_is_no_loss() -> None:
    picture = opened(PICTURE.convert("RGBA"))
    assert same(picture.image, PICTURE)
    assert picture.lost == ()


def test_a_transparent_palette_colour_is_laid_on_white() -> None:
    image = PICTURE.quantize(16)
    data = pipes.encoded(image, "PNG", transparency=3)
    picture = decode.open_bytes(data, LIMITS)
    clear = np.asarray(image) == 3
    assert clear.any()
    assert (np.asarray(picture.image)[clear] == 255).all()
    assert "transparency" in picture.lost[0]


@pytest.mark.case(25)
def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    picture = opened(Image.fromarray(values))
    assert np.array_equal(np.asarray(picture.image)[:, :, 0], (values >> 8).astype(np.uint8))
    assert "8 bits" in picture.lost[0]
    floats = decode.from_pil(Image.fromarray(values.astype(np.float32) / 65535), LIMITS)
    assert np.asarray(floats.image).max() == 255
    with pytest.raises(DecodeError, match="not finite"):
        decode.from_pil(Image.fromarray(np.full((4, 4), np.nan, np.float32)), LIMITS)


@pytest.mark.case(25)
def test_cmyk_is_converted() -> None:
    data = pipes.encoded(PICTURE.convert("CMYK"), "JPEG")
    picture = decode.open_bytes(data, LIMITS)
    with Image.open(io.BytesIO(data)) as image:
        assert same(picture.image, image.convert("RGB"))
    assert "CMYK" in picture.lost[0]


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
@pytest.mark.case(25)
def test_of_an_animation_the_first_frame_is_seen(file_format: str) -> None:
    others = [tiny.picture(84, 56, seed) for seed in (2, 3)]
    picture = opened(PICTURE, file_format, save_all=True, append_images=others, lossless=True)
    with Image.open(io.BytesIO(pipes.encoded(PICTURE, file_format, lossless=True))) as image:
        assert same(picture.image, image.convert("RGB"))
    assert "first of 3 frames" in picture.lost[0]


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
@pytest.mark.case(25)
def test_of_three_hundred_frames_one_is_opened(file_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [Image.new("RGB", (32, 32), (n % 256, n // 2, 0)) for n in range(299)]
    data = pipes.encoded(tiny.picture(32, 32, 1), file_format, save_all=True, append_images=others, lossless=True)
    sought: list[int] = []
    for kind in (GifImagePlugin.GifImageFile, WebPImagePlugin.WebPImageFile, PngImagePlugin.PngImageFile):
        seek = kind.seek
        monkeypatch.setattr(kind, "seek", lambda self, frame, seek=seek: (sought.append(frame), seek(self, frame))[1])
    picture = decode.open_bytes(data, LIMITS)
    assert "first of 300 frames" in picture.lost[0]
    assert picture.image.size == (32, 32)
    assert set(sought) <= {0}


@pytest.mark.parametrize("file_format", ["TIFF", "ICO", "PPM", "PDF", "EPS", "TGA"])
@pytest.mark.case(24)
def test_other_formats_are_refused(file_format: str) -> None:
    with pytest.raises(DecodeError, match="Known formats"):
        opened(PICTURE, file_format)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.case(22)
def test_truncated_bytes_are_refused(file_format: str) -> None:
    data = pipes.encoded(PICTURE, file_format)
    for share in (0.5, 0.9):
        with pytest.raises(DecodeError):
            decode.open_bytes(data[: int(len(data) * share)], LIMITS)


def claiming(data: bytes, width: int, height: int) -> bytes:
    """The same file, whose header claims another size."""
    made = bytearray(data)
    if data[:4] == b"\x89PNG":
        made[16:24] = struct.pack(">II", width, height)
        made[29:33] = struct.pack(">I", zlib.crc32(made[12:29]))
    elif data[:3] == b"GIF":
        made[6:10] = struct.pack("<HH", width, height)
        place = made.index(b",", 13 + 3 * (2 << (made[10] & 7)))
        made[place + 5 : place + 9] = struct.pack("<HH", width, height)
    elif data[:2] == b"BM":
        made[18:26] = struct.pack("<ii", width, height)
    elif data[:4] == b"RIFF":
        place = data.index(b"\x9d\x01\x2a") + 3
        made[place : place + 4] = struct.pack("<HH", width, height)
    else:
        place = data.index(b"\xff\xc0") + 5
        made[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(made)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.case(22)
def test_headers_that_claim_more_than_there_is_are_refused(file_format: str) -> None:
    """Within every limit by its header (9 megapixels), and a few hundred bytes long. What a decoder would fill up with
    grey (it does for GIF) is bounded like what is there."""
    data = pipes.encoded(PICTURE, file_format)
    assert decode.open_bytes(claiming(data, *PICTURE.size), LIMITS).given["width"] == 84
    begin = time.thread_time()
    for size in ((3000, 3000), (3000, 1), (1, 3000), (0, 0)):
        try:
            picture = decode.open_bytes(claiming(data, *size), LIMITS)
        except (DecodeError, LimitError):
            continue
        assert picture.image.size == size
    assert time.thread_time() - begin < 2.0


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize(
    "tail", [b"\0" * 1000, b"<script>x</script>", b"PK\5\6" + b"\0" * 18, b"%PDF-1.4\n%%EOF", "twice"], ids=repr
)
@pytest.mark.case(22)
def test_what_stands_behind_a_picture_is_not_looked_at(file_format: str, tail: Any) -> None:
    """Files that are two kinds at once are pictures or are refused, by how they begin."""
    data = pipes.encoded(PICTURE, file_format)
    alone = decode.open_bytes(data, LIMITS)
    assert same(decode.open_bytes(data + (data if tail == "twice" else tail), LIMITS).image, alone.image)
    if tail != "twice":
        with pytest.raises(DecodeError):
            decode.open_bytes(tail + data, LIMITS)


@pytest.mark.case(22)
def test_random_bytes_are_refused() -> None:
    rng = np.random.default_rng(0)
    data = pipes.encoded(PICTURE, "PNG")
    with pytest.raises(DecodeError):
        decode.open_bytes(b"", LIMITS)
    for _ in range(40):
        noise = rng.bytes(200)
        with pytest.raises(DecodeError):
            decode.open_bytes(noise, LIMITS)
        broken = bytearray(data)
        for place in rng.integers(8, len(data), 4):
            broken[place] ^= 0xFF
        # Some damage goes unseen; no other error may come of it.
        with contextlib.suppress(MediaError):
            decode.open_bytes(bytes(broken), LIMITS)


@pytest.mark.case(21)
def test_a_pixel_bomb_is_refused_from_its_header() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60000, 60000, 1, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(LimitError, match="pixels"):
        decode.open_bytes(bomb, LIMITS)
    with pytest.raises(LimitError, match="limit is 1000"):
        decode.from_pil(PICTURE, MediaLimits(max_pixels=1000))


def test_arrays() -> None:
    array = np.asarray(PICTURE)
    assert same(decode.from_array(array, LIMITS).image, PICTURE)
    assert same(decode.from_array(array[:, :, 0], LIMITS).image, Image.fromarray(array[:, :, 0]).convert("RGB"))
    assert same(decode.from_array(array[:, ::-1], LIMITS).image, ImageOps.mirror(PICTURE))
    for bad in (array.astype(np.float32), array[None], array[:, :, :2], array[:0], array.astype(np.int64)):
        with pytest.raises(DecodeError, match="array"):
            decode.from_array(bad, LIMITS)


EXTREMES = [(1, 1), (1, 2), (2, 1), (3, 1), (1, 300), (300, 1), (20000, 1), (1, 5000), (199, 1), (17, 4000)]


@pytest.mark.parametrize("family", tiny.IMAGE_FAMILIES)
@pytest.mark.case(23)
def test_extreme_shapes_work_or_are_refused_clearly(family: str) -> None:
    pipe = pipes.make(family, {"max_model_len": 60000, "max_encoder_tokens": 60000})
    for size in EXTREMES:
        picture = Image.new("RGB", size, (200, 30, 40))
        outcomes = []
        for _ in range(2):
            try:
                request = pipes.ask(pipe, family, [picture])
            except ProcessError as error:
                outcomes.append((error.item, bool(error.remedy), error.reason))
            else:
                features = request.spans[0].item.features
                (pixels,) = (value for name, value in features.items() if name.endswith("pixel_values"))
                assert pixels.isfinite().all()
                outcomes.append(("image 1", True, request.spans[0].item.num_embeds))
        assert outcomes[0] == outcomes[1], size
        assert outcomes[0][:2] == ("image 1", True)
        assert pipes.ask(pipe, family, [PICTURE]).spans


def test_errors_name_the_item_and_the_next_request_works(tmp_path: Path) -> None:
    family = "llava"
    pipe = pipes.make(family)
    broken = tmp_path / "broken.png"
    broken.write_bytes(pipes.encoded(PICTURE)[:300])
    cases: list[Any] = [broken, b"no picture", tmp_path / "missing.png", 3, np.zeros((4, 4, 3)), b""]
    for bad in cases:
        with pytest.raises(MediaError) as caught:
            pipes.ask(pipe, family, [PICTURE, bad])
        assert caught.value.item == "image 2"
        assert caught.value.reason.endswith(".")
        assert pipes.ask(pipe, family, [PICTURE]).spans
    truncated = Image.open(io.BytesIO(pipes.encoded(PICTURE)[:300]))
    with pytest.raises(DecodeError, match="broken"):
        pipes.ask(pipe, family, [truncated])


def test_strict_media_refuses_a_loss_and_nothing_else() -> None:
    family = "qwen2_vl"
    pipe = pipes.make(family, strict_media=True)
    assert pipes.ask(pipe, family, [PICTURE]).receipts[0].lost == ()
    clear = PICTURE.convert("RGBA")
    clear.putalpha(7)
    with pytest.raises(MediaLossError, match="transparency") as caught:
        pipes.ask(pipe, family, [PICTURE, clear])
    assert caught.value.item == "image 2"
    with pytest.raises(MediaLossError, match="shrunk"):
        pipes.ask(pipe, family, [tiny.picture(2000, 1800, 1)])
    loose = pipes.ask(pipes.shared(family), family, [clear]).receipts[0]
    assert "transparency" in loose.lost[0]


def test_receipts_say_what_was_seen() -> None:
    for family in tiny.IMAGE_FAMILIES:
        request = pipes.ask(pipes.make(family), family, [tiny.picture(112, 84, 1)])
        (receipt,) = request.receipts
        assert receipt.given["width"] == 112
        assert receipt.given["source"] == "PIL"
        assert receipt.used["width"] > 0
        assert not receipt.cached
        assert set(receipt.milliseconds) >= {"decode", "digest", "process"}
        span = request.spans[0]
        # Where an encoder reads the whole prompt, that is the item.
        if span.item.modality == "image":
            assert receipt.tokens == span.stop - span.start
            assert receipt.digest == span.item.digest.hex()
        assert receipt.to_json()["tokens"] == receipt.tokens
    cropped = pipes.ask(pipes.shared("llava"), "llava", [tiny.picture(112, 56, 1)]).receipts[0]
    assert "50 % of it was cut off" in cropped.lost[0]


@pytest.mark.parametrize("names", ["audio", "decode", "embeds", "item_maker read_source", "video"])
def test_what_refuses_media_says_what_helps(names: str) -> None:
    """Each of these errors has a remedy, or its reason is what must be given."""
    files = [Path(decode.__file__).with_name(f"{name}.py") for name in names.split()]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    calls = [node.exc for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    ours = [call for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) in _REFUSALS]
    assert len(ours) > 4
    for call in ours:
        helps = len(call.args) > 1 or any(word.arg in ("remedy", "or_engine") for word in call.keywords)
        assert helps or " must " in ast.unparse(call.args[0]) or " but " in ast.unparse(call.args[0])


_REFUSALS = ("DecodeError", "LimitError", "MediaLossError")


@pytest.mark.parametrize(
    ("array", "helps"),
    [
        (np.zeros((3, 20, 30), np.uint8), "colours last"),
        (np.zeros((0, 5, 3), np.uint8), "that shape"),
        (np.zeros((2, 5, 5), np.uint8), "that shape"),
    ],
)
def test_arrays_of_another_shape_are_refused_with_what_to_do(array: np.ndarray, helps: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode.from_array(array, LIMITS)
    assert helps in caught.value.remedy


@pytest.mark.parametrize(
    ("file_format", "mode"), [("PPM", "RGB"), ("PPM", "L"), ("PPM", "1"), ("TIFF", "RGB"), ("TIFF", "L")]
)
def test_formats_that_an_operator_allows_lose_nothing(file_format: str, mode: str) -> None:
    image = PICTURE.convert(mode)
    picture = decode.open_bytes(pipes.encoded(image, file_format), ALL)
    assert same(picture.image, image.convert("RGB"))
    assert (picture.lost, picture.given["format"]) == ((), file_format)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_avif_is_what_pillow_reads() -> None:
    data = pipes.encoded(PICTURE, "AVIF", quality=90)
    picture = decode.open_bytes(data, ALL)
    assert same(picture.image, Image.open(io.BytesIO(data)).convert("RGB"))
    assert picture.given["format"] == "AVIF"
    with pytest.raises(LimitError, match="84 x 56"):
        decode.open_bytes(data, MediaLimits(max_pixels=1000, image_formats="all"))


@pytest.mark.parametrize("kind", ["png", "bmp"])
def test_the_largest_icon_is_read(kind: str) -> None:
    square = PICTURE.resize((48, 48))
    data = pipes.encoded(square, "ICO", sizes=[(16, 16), (48, 48)], bitmap_format=kind)
    picture = decode.open_bytes(data, ALL)
    assert (picture.image.size, picture.given["format"]) == ((48, 48), "ICO")
    assert same(picture.image, decode.to_rgb(Image.open(io.BytesIO(data)), []))
    for length in range(len(data)):
        if length % 7 == 0:
            # Of a file that is cut off, what remains is read or refused.
            with contextlib.suppress(MediaError):
                decode.open_bytes(data[:length], ALL)


@pytest.mark.parametrize("kind", ["png", "bmp"])
def test_an_icon_is_as_large_as_its_picture_says(kind: str) -> None:
    """The table of icons names a byte for each side, and Pillow decodes a picture of any size behind it."""
    picture = bytearray(pipes.encoded(Image.new("RGB", (8, 8)), "PNG"))
    if kind == "png":
        struct.pack_into(">II", picture, 16, 30000, 30000)
        struct.pack_into(">I", picture, 29, zlib.crc32(picture[12:29]))
    else:
        picture = bytearray(struct.pack("<IiiHHIIiiII", 40, 30000, 60000, 1, 32, 0, 0, 0, 0, 0, 0) + b"\0" * 64)
    entry = struct.pack("<BBBBHHII", 8, 8, 0, 0, 1, 32, len(picture), 22)
    data = struct.pack("<HHH", 0, 1, 1) + entry + bytes(picture)
    with pytest.raises(LimitError, match="30000 x 30000"):
        decode.open_bytes(data, ALL)
    with pytest.raises(LimitError, match="30000 x 30000"):
        decode.check_header(data, ALL)


@pytest.mark.parametrize("order", [1, -1])
def test_of_icons_of_equal_size_the_one_that_was_measured_is_decoded(order: int) -> None:
    """Pillow prefers the one of fewer bits by the table, whose picture may be of any size."""
    small = pipes.encoded(PICTURE.resize((48, 48)), "ICO", sizes=[(48, 48)], bitmap_format="bmp")[22:]
    pictures = [(32, small), (1, pipes.encoded(Image.new("RGB", (400, 300)), "PNG"))][::order]
    data, place = struct.pack("<HHH", 0, 1, 2), 6 + 2 * 16
    for bits, picture in pictures:
        data += struct.pack("<BBBBHHII", 48, 48, 0, 0, 1, bits, len(picture), place)
        place += len(picture)
    data += b"".join(picture for _, picture in pictures)
    measured = header.size_of(data)
    limits = MediaLimits(max_pixels=48 * 48, image_formats="all")
    if measured == (48, 48):
        assert decode.open_bytes(data, limits).image.size == measured
    else:
        with pytest.raises(LimitError, match="400 x 300"):
            decode.open_bytes(data, limits)


def test_heic_takes_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    data = struct.pack(">I", 24) + b"ftypheic" + b"\0" * 4 + b"mif1heic" + b"\0" * 64
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(DecodeError, match="needs the package pillow-heif"):
        decode.open_bytes(data, ALL)


def test_heic_with_the_package() -> None:
    heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    heif.from_pillow(PICTURE).save(file, quality=90)
    picture = decode.open_bytes(file.getvalue(), ALL)
    assert (picture.image.size, picture.given["format"]) == (PICTURE.size, "HEIF")
    with pytest.raises(LimitError, match="84 x 56"):
        decode.open_bytes(file.getvalue(), MediaLimits(max_pixels=1000, image_formats="all"))
    with pytest.raises(DecodeError, match="broken"):
        decode.open_bytes(file.getvalue()[:200], ALL)


@pytest.mark.parametrize("engine", [False, True])
def test_the_colour_behind_what_is_transparent_is_chosen(engine: bool) -> None:
    """By an option of the engine, of the request or of the part; each colour makes another item."""
    black = Image.new("RGB", (84, 56), (0, 0, 0))
    clear = Image.new("RGBA", (84, 56), (200, 10, 10, 0))
    option = {"rgba_background_color": [0, 0, 0]}
    pipe = pipes.make("qwen2_vl", media_io_kwargs={"image": option} if engine else None)
    buffer = io.BytesIO()
    clear.save(buffer, "PNG")

    def made(source: Any, **options: Any) -> Any:
        prompt = {"prompt": tiny.prompt("qwen2_vl", 1), "multi_modal_data": {"image": source}}
        more = {"mm_processor_kwargs": options} if options else {}
        return pipe.prepare(RequestOrder(prompt | more, pipes.ONE_TOKEN, request_id="0"))

    expected = made(black).spans[0].item
    for source in (clear, buffer.getvalue(), np.asarray(clear)):
        found = made(source, **({} if engine else option))
        assert found.spans[0].item.digest == expected.digest
        assert found.receipts[0].lost == ("transparency was flattened onto the colour [0, 0, 0]",)
        other = made(source, rgba_background_color=[255, 255, 255]) if engine else made(source)
        assert other.spans[0].item.digest != expected.digest
        assert other.receipts[0].lost == ("transparency was flattened onto white",)
    for wrong in ([0, 0], [0, 0, 256], "red", [0, 0, 0.5], [True, 0, 0]):
        with pytest.raises(ParamsError, match="three whole numbers"):
            made(clear, rgba_background_color=wrong)
        with pytest.raises(ConfigError, match="three whole numbers"):
            pipes.make("qwen2_vl", media_io_kwargs={"image": {"rgba_background_color": wrong}})
