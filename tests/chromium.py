"""Chromium, for the tests of pages."""

import contextlib
import shutil
from collections.abc import Collection, Iterator
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason='needs Chromium: apt-get install chromium')


class Observed(NamedTuple):
    """The addresses that a page has asked for, and its messages and errors."""

    requested: list[str]
    problems: list[str]


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])
        yield browser
        browser.close()


def observe(page: Page, kinds: Collection[str] | None = None) -> Observed:
    """Records what a page does from now on. `kinds` of console messages are problems; None: all are."""
    observed = Observed([], [])
    page.on('request', lambda request: observed.requested.append(request.url))
    page.on(
        'console',
        lambda message: observed.problems.append(message.text) if kinds is None or message.type in kinds else None,
    )
    page.on('pageerror', lambda error: observed.problems.append(str(error)))
    return observed
