"""Takes the picture of a compiled program in docs/see.md: python tests/view/pictures.py docs/images"""

import argparse
import gzip
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from pretrax.hlo.program import parse_program
from pretrax.view.program.picture import page_of

PROGRAM = Path(__file__).parents[1] / 'hlo' / 'programs' / 'tpu.hlo.txt.gz'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('directory', type=Path)
    directory = parser.parse_args().directory
    program = parse_program(gzip.decompress(PROGRAM.read_bytes()).decode())
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        path = Path(place) / 'program.html'
        path.write_text(page_of(program, 'quickstart', '4 x TPU v5e'))
        browser = playwright.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        page = browser.new_page(viewport={'width': 1500, 'height': 1000}, device_scale_factor=1.5)
        page.goto(path.as_uri())
        page.locator('body[data-ready]').wait_for()
        for name in ('layer × 2', 'attention'):
            page.locator('#picture text.name').filter(has_text=f'▸ {name}').first.click()
        page.locator('#definitions summary').click()
        page.get_by_role('button', name='Fit').click()
        page.screenshot(path=directory / 'program.png')
        browser.close()


if __name__ == '__main__':
    main()
