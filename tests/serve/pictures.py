"""Takes the pictures of the chat page in the documentation: python tests/serve/pictures.py SERVER docs/images

The server has two checkpoints of a base model: pretrax serve runs/quickstart runs/quickstart/checkpoints/200
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

SETTINGS = '{"max_tokens": "110", "seed": "2", "temperature": "0.6", "top_k": "40"}'


def write(page: Page, text: str) -> None:
    page.locator('#text').fill(text)
    page.keyboard.press('Control+Enter')
    page.locator('#facts-of-answer').filter(has_text='token limit').wait_for()
    page.locator('#stop').wait_for(state='hidden')
    page.mouse.move(0, 0)
    page.evaluate('scrollTo(0, 0)')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('server')
    parser.add_argument('directory', type=Path)
    parser.add_argument('--text', default='def read_lines(path')
    parser.add_argument('--settings', default=SETTINGS, help='as the page keeps them')
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        page = browser.new_page(
            viewport={'width': 1040, 'height': 600}, device_scale_factor=1.5, reduced_motion='reduce'
        )
        page.goto(options.server)
        page.evaluate('kept => localStorage.setItem("pretrax.settings", kept)', options.settings)
        page.reload()

        write(page, options.text)
        page.locator('.token').nth(4).hover(force=True)
        page.screenshot(path=options.directory / 'chat-page-light.png')

        page.emulate_media(color_scheme='dark')
        page.get_by_role('button', name='Settings').click()
        page.get_by_label('Mark unlikely tokens').check()
        page.mouse.move(0, 0)
        page.screenshot(path=options.directory / 'chat-page-dark.png')

        page.emulate_media(color_scheme='light')
        page.get_by_label('Mark unlikely tokens').uncheck()
        page.get_by_role('button', name='Compare').click()
        page.get_by_role('button', name='Close settings').click()
        page.get_by_role('button', name='New text').click()
        page.locator('#second-name:visible').wait_for()
        write(page, options.text)
        page.screenshot(path=options.directory / 'chat-page-compare.png')
        browser.close()


if __name__ == '__main__':
    main()
