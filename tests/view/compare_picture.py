"""Takes the picture of a comparison or a search in the documentation.

python tests/view/compare_picture.py PAGE.html docs/images/compare.png

The page of the comparison is that of `pretrax compare runs/base-* runs/lower-* --out PAGE.html`, of the runs that
docs/see.md trains. That of the search is `searches/search/report.html` of configs/search.yaml, with ten trials of 100
steps, one at a time, and the first decision at step 30.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright


def take(page: Page, out: Path) -> None:
    """From the top of the page to the end of its curves."""
    page.locator('.chart').last.locator('.main-svg').first.wait_for()
    chart = page.locator('.chart').last.bounding_box()
    page.screenshot(
        path=out,
        full_page=True,
        clip={'x': 0, 'y': 0, 'width': 2 * chart['x'] + chart['width'], 'height': chart['y'] + chart['height']},
    )


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        page = browser.new_page(
            viewport={'width': 1040, 'height': 800}, device_scale_factor=1.5, reduced_motion='reduce'
        )
        page.goto(source.absolute().as_uri())
        take(page, out)
        browser.close()


if __name__ == '__main__':
    main()
