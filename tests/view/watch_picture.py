"""Takes the pictures of the live page in the documentation: python tests/view/watch_picture.py ADDRESS docs/images

ADDRESS is that of `pretrax watch runs` while a run trains beside one that has finished.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright


def take(page: Page, address: str, out: Path) -> None:
    """The top of the page, with all of its first figures drawn."""
    page.goto(address)
    page.locator('.plot .main-svg').first.wait_for()
    page.get_by_label('Smoothing').fill('0.3')
    page.wait_for_function('() => document.querySelector(".plot").data.some(trace => trace.meta === "smoothed")')
    page.get_by_label('Smoothing').blur()
    page.screenshot(path=out)


def main() -> None:
    address, directory = sys.argv[1], Path(sys.argv[2])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        page = browser.new_page(
            viewport={'width': 1280, 'height': 900},
            device_scale_factor=1.5,
            reduced_motion='reduce',
            color_scheme='dark',
        )
        take(page, address, directory / 'watch-dark.png')
        page.emulate_media(color_scheme='light')
        take(page, address, directory / 'watch.png')
        browser.close()


if __name__ == '__main__':
    main()
