"""Input pictures of every kind become plain RGB (case 094)."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sdx_accel.cli.pictures_in import read_mask, read_picture
from sdx_accel.errors import PictureError

RGB = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8), "RGB")
GREY = RGB.convert("L")


def saved(folder: Path, picture: Image.Image, name: str = "in.png", **options: object) -> str:
    path = folder / name
    picture.save(path, **options)
    return str(path)


def with_alpha(alpha: int) -> Image.Image:
    picture = RGB.copy()
    picture.putalpha(alpha)
    return picture


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "LA", "1", "RGB"])
def test_case_094_png_modes_become_rgb_of_the_same_size(tmp_path: Path, mode: str) -> None:
    read = read_picture(saved(tmp_path, RGB.convert(mode)))
    assert (read.picture.mode, read.picture.size) == ("RGB", (64, 48))
    assert read.picture.tobytes() == RGB.convert(mode).convert("RGB").tobytes()
    assert read.notes == ()


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGB"])
def test_case_094_jpeg_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    ramp = Image.merge("RGB", [Image.linear_gradient("L").resize((64, 48))] * 3).convert(mode)
    read = read_picture(saved(tmp_path, ramp, "in.jpg", quality=95))
    difference = np.asarray(read.picture, int) - np.asarray(ramp.convert("RGB"), int)
    assert read.picture.mode == "RGB"
    # an inverted picture, the classic mistake with CMYK, is off by 100 and more
    assert np.abs(difference).mean() < 4


def test_case_094_16_bit_grey_keeps_its_tones(tmp_path: Path) -> None:
    deep = Image.fromarray(np.asarray(GREY, np.uint16) * 257)
    assert deep.mode.startswith("I")
    read = read_picture(saved(tmp_path, deep))
    assert read.picture.tobytes() == GREY.convert("RGB").tobytes()


def test_case_094_floating_point_grey(tmp_path: Path) -> None:
    values = np.asarray(GREY, np.float32)
    for scale in (1.0, 1 / 255):
        read = read_picture(saved(tmp_path, Image.fromarray(values * scale), "in.tiff"))
        assert read.picture.tobytes() == GREY.convert("RGB").tobytes()


def test_case_094_opaque_rgba_equals_rgb_and_says_nothing(tmp_path: Path) -> None:
    read = read_picture(saved(tmp_path, with_alpha(255)))
    assert read.picture.tobytes() == RGB.tobytes()
    assert read.notes == ()


def test_case_094_transparency_is_shown_over_white_and_said(tmp_path: Path) -> None:
    clear = read_picture(saved(tmp_path, with_alpha(0)))
    assert clear.picture.getextrema() == ((255, 255),) * 3
    assert len(clear.notes) == 1
    assert "white" in clear.notes[0]
    half = np.asarray(read_picture(saved(tmp_path, with_alpha(128))).picture, float)
    expected = np.asarray(RGB, float) * 128 / 255 + 255 * 127 / 255
    assert np.abs(half - expected).max() <= 1


def test_palette_and_grey_transparency_are_found(tmp_path: Path) -> None:
    palette = Image.new("P", (64, 48), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    assert read_picture(saved(tmp_path, palette, transparency=0)).picture.getpixel((0, 0)) == (
        255,
        255,
        255,
    )
    grey = Image.new("L", (64, 48), 7)
    assert read_picture(saved(tmp_path, grey, transparency=7)).picture.getpixel((0, 0)) == (
        255,
        255,
        255,
    )


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned: shown rotated by 270°
    read = read_picture(saved(tmp_path, RGB, exif=exif))
    assert read.picture.size == (48, 64)
    assert read.picture.tobytes() == RGB.transpose(Image.Transpose.ROTATE_270).tobytes()


def test_first_frame_of_an_animation_is_used_and_said(tmp_path: Path) -> None:
    path = saved(tmp_path, RGB, "in.gif", save_all=True, append_images=[GREY.convert("RGB")])
    assert "first" in read_picture(path).notes[0]


@pytest.mark.parametrize("content", [b"", b"<html>", None])
def test_what_is_no_picture_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "in.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PictureError, match=r"in\.png"):
        read_picture(str(path))
    with pytest.raises(PictureError, match="--image"):
        read_picture(str(tmp_path))


def test_truncated_picture_is_refused(tmp_path: Path) -> None:
    path = Path(saved(tmp_path, RGB))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(PictureError, match="broken or cut short"):
        read_picture(str(path))


def test_mask_is_grey_of_the_pictures_size(tmp_path: Path) -> None:
    image = read_picture(saved(tmp_path, RGB))
    mask = read_mask(saved(tmp_path, RGB.convert("1"), "mask.png"), image)
    assert (mask.picture.mode, mask.picture.size) == ("L", (64, 48))
    assert mask.resized(32, 24).size == (32, 24)
    with pytest.raises(PictureError, match=r"32 × 24 pixels and .* 64 × 48"):
        read_mask(saved(tmp_path, GREY.resize((32, 24)), "small.png"), image)
    black = read_mask(saved(tmp_path, Image.new("L", (64, 48)), "black.png"), image)
    assert "nothing is repainted" in black.notes[0]
