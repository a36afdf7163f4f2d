"""Pages at the widths of a phone, a tablet and a desktop, in both themes.

Pictures of the pages in `LOOKS` are in looks/, at a quarter of their size. Fonts differ among machines, so a page is
compared by the light of its parts, not by its pixels. After a change that is meant, renew the pictures and look at
them:

    RENEW_LOOKS=1 pytest -n 0 -m slow tests/page_kit/test_looks.py
"""

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from chromium import needs_chromium, observe
from page_kit.pages import PAGES

pytestmark = needs_chromium

LOOKS = ('report', 'comparison', 'watch_runs', 'watch_run', 'empty_chat', 'chat')
HEIGHTS = {390: 1500, 768: 1300, 1400: 1000}  # of the pictures, by their widths
STORED = Path(__file__).parent / 'looks'
PART = 4  # pixels of a stored picture to a side of a part that is compared: 16 of the page
BLUR = 3  # parts: a line of text may be a little higher or lower
MOST = 0.25  # of the difference between the stored picture and an empty page; see the test of the comparison
OPEN = "document.querySelectorAll('details').forEach(one => { one.open = true; })"


def light(picture: Image.Image) -> np.ndarray:
    """The light of each part of a picture at a quarter of its size, blurred."""
    pixels = np.asarray(picture.convert('L'), np.float64)
    rows, columns = (size // PART for size in pixels.shape)
    parts = pixels[: rows * PART, : columns * PART].reshape(rows, PART, columns, PART).mean((1, 3))
    for axis in (0, 1):
        padded = np.pad(parts, [(BLUR, BLUR) if axis == one else (0, 0) for one in (0, 1)], 'edge')
        shifted = [np.roll(padded, shift, axis) for shift in range(-BLUR, BLUR + 1)]
        parts = np.mean(shifted, 0).take(range(BLUR, BLUR + parts.shape[axis]), axis)
    return parts


def difference(stored: Image.Image, seen: Image.Image) -> float:
    """How far apart two pictures are: 0 for equal ones, about 1 if one of them is an empty page."""
    a, b = light(stored), light(seen)
    return float(np.abs(a - b).mean() / np.abs(a - np.median(a)).mean()) if a.shape == b.shape else float('inf')


def quarter(png: bytes) -> Image.Image:
    """A screenshot at a quarter of its size, in few colors."""
    picture = Image.open(BytesIO(png)).convert('RGB')
    return picture.resize((picture.width // 4, picture.height // 4), Image.Resampling.BOX).quantize(128).convert('RGB')


@pytest.fixture
def opened(browser, tmp_path, monkeypatch):
    """Opens a page of `PAGES` at a width and in a theme. The page must make no error."""
    monkeypatch.chdir(tmp_path)
    problems: list[list[str]] = []

    def open_page(shown, width, theme='light'):
        page = browser.new_page(
            viewport={'width': width, 'height': HEIGHTS[width]},
            color_scheme=theme,
            reduced_motion='reduce',
            timezone_id='UTC',
        )
        problems.append(observe(page, ('error',)).problems)
        page.goto(shown.address)
        shown.show(page)
        page.wait_for_function('document.fonts.status === "loaded"')
        return page

    yield open_page
    assert not any(problems), problems


@pytest.mark.parametrize('name', PAGES)
def test_no_page_is_wider_than_its_screen(opened, name, tmp_path):
    """Not even with all its folded parts open, and with long words in its names, tables and commands."""
    with PAGES[name](tmp_path) as shown:
        page = opened(shown, 1400)
        page.evaluate(OPEN)
        for width in (1400, 768, 390):
            page.set_viewport_size({'width': width, 'height': 800})
            page.evaluate('new Promise(requestAnimationFrame)')
            assert page.evaluate('document.documentElement.scrollWidth') <= width
        page.close()


@pytest.mark.slow
@pytest.mark.parametrize('name', LOOKS)
def test_a_page_looks_as_its_stored_pictures(opened, name, tmp_path):
    with PAGES[name](tmp_path) as shown:
        for theme in ('light', 'dark'):
            for width in HEIGHTS:
                page = opened(shown, width, theme)
                seen = quarter(page.screenshot(animations='disabled'))
                page.close()
                path = STORED / f'{name}-{width}-{theme}.png'
                if os.environ.get('RENEW_LOOKS'):
                    seen.quantize(128).save(path, optimize=True)
                seen.save(tmp_path / path.name)
                found = difference(Image.open(path), seen)
                assert found <= MOST, f'{tmp_path / path.name} does not look like {path}: {found:.2f}'


MISTAKES = {
    'no styles': 'document.querySelectorAll("style").forEach(one => one.remove())',
    'the other theme': 'document.documentElement.dataset.theme = "dark"',
    'a table wider than the page': """{
        const box = document.querySelector('.table');
        Object.assign(box.style, { width: '1600px', height: '300px', overflow: 'visible' });
        document.querySelector('main').prepend(box);
    }""",
    'no curves': 'document.querySelectorAll(".plot").forEach(one => one.remove())',
    'no cards': 'document.querySelectorAll("main > *").forEach(one => one.style.display = "none")',
}
FONTS = {'serif': '"DejaVu Serif", serif', 'mono': '"DejaVu Sans Mono", monospace', 'narrow': '"DejaVu Sans Condensed"'}


@pytest.mark.slow
def test_the_comparison_of_pictures_sees_mistakes_and_not_fonts(opened, tmp_path):
    width = 1400  # a font and a mistake are nearest to each other here
    with PAGES['report'](tmp_path) as shown:

        def changed(change):
            page = opened(shown, width)
            page.evaluate(change)
            page.evaluate('new Promise(requestAnimationFrame)')
            picture = quarter(page.screenshot())
            page.close()
            return picture

        stored = Image.open(STORED / f'report-{width}-light.png')
        fonts = {
            name: difference(stored, changed(f"document.documentElement.style.setProperty('--ui', '{font}')"))
            for name, font in FONTS.items()
        }
        mistakes = {name: difference(stored, changed(change)) for name, change in MISTAKES.items()}
        assert max(fonts.values()) < MOST < min(mistakes.values()), (fonts, mistakes)
