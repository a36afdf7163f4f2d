"""Takes the pictures of a report in the documentation: python tests/report_pictures.py RUN docs/images"""

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from pretrax.view.report import write_report

PARTS = {
    'report-layers.png': '#layers',
    'report-attempts.png': '#attempts, #checkpoints',
    'report-memory.png': '#memory, #time',
}


def take(run: str, directory: Path) -> list[Path]:
    """Writes the pictures of a run's report that its report has parts for."""
    directory.mkdir(parents=True, exist_ok=True)
    taken = []
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        report = Path(str(write_report(run, Path(temporary) / 'report.html')))
        browser = playwright.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        page = browser.new_page(viewport={'width': 1240, 'height': 880}, reduced_motion='reduce')
        page.goto(report.as_uri())
        page.wait_for_function('window.pretraxReport?.ready')
        if page.locator('#curves').count():
            page.locator('.plot .main-svg').first.wait_for()
        taken.append(directory / 'report.png')
        page.screenshot(path=taken[-1])
        page.evaluate('pretraxReport.drawAll()')
        for name, sections in PARTS.items():
            boxes = [box for each in page.locator(sections).all() if (box := each.bounding_box())]
            if boxes:
                top, bottom = min(box['y'] for box in boxes), max(box['y'] + box['height'] for box in boxes)
                clip = {'x': 0, 'y': top, 'width': 1240, 'height': min(bottom - top + 10, 1000)}
                taken.append(directory / name)
                page.screenshot(path=taken[-1], full_page=True, clip=clip)
        browser.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('run')
    parser.add_argument('directory', type=Path)
    options = parser.parse_args()
    for path in take(options.run, options.directory):
        print(f'wrote {path}')


if __name__ == '__main__':
    main()
