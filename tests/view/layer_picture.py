"""Takes the picture of layer statistics in the documentation: python tests/view/layer_picture.py RUN docs/images

RUN is a run with `log.layers`, such as that of docs/see.md.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

SHOWN = ('residual rms', 'attention entropy', 'largest attention logit', 'dead units')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('run')
    parser.add_argument('directory', type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        out = Path(directory) / 'report.html'
        subprocess.run([sys.executable, '-m', 'pretrax', 'report', options.run, '--out', str(out)], check=True)
        browser = playwright.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        page = browser.new_page(viewport={'width': 1180, 'height': 3000}, device_scale_factor=1.5)
        page.goto(out.as_uri())
        section = page.locator('#layers')
        page.wait_for_function('pretraxReport.ready')
        page.evaluate('pretraxReport.drawAll()')
        page.wait_for_function('document.querySelectorAll("#layers .chart .heatmaplayer").length >= 4')
        page.evaluate(
            """shown => document.querySelectorAll('#layers figure').forEach(figure => {
                const title = figure.querySelector('figcaption').innerText;
                if (!shown.some(one => title.toLowerCase().includes(one))) figure.remove();
            })""",
            list(SHOWN),
        )
        section.screenshot(path=options.directory / 'layer-statistics.png')
        browser.close()


if __name__ == '__main__':
    main()
