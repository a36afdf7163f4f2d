"""Checks that an installation without extras is small, and runs the verbs of a first hour with it.

    python tests/small_install.py

It writes to a temporary directory. `.ci/run` calls it with each supported Python, tests/cli/test_wheel.py with a wheel.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import distributions
from pathlib import Path

MOST_PACKAGES, MOST_MEGABYTES = 100, 600  # on Linux with an x86 processor
SMALL = (
    'steps=2 schedule.warmup=1 model.n_layers=1 model.d_model=32 batch.tokens=256 batch.sequence_length=64 '
    'eval.every=2 eval.batches=1 sample.tokens=4 data.vocab_size=300 data.text=text.txt'
)
# What each prints, and its exit code.
COMMANDS = {
    f'train quickstart {SMALL}': ('Done: 2 steps', 0),
    'generate runs/quickstart --prompt def --tokens 2': ('def', 0),
    'runs runs': ('quickstart', 0),
    'report runs/quickstart --out report.html': ('wrote', 0),
    'plot runs/quickstart --out loss.html': ('wrote', 0),
    'plot runs/quickstart --out loss.svg': ('--extra pictures', 2),
    f'plan quickstart {SMALL} --topology h100': ('memory', 0),
}
SERVERS = {'serve': 'v1/models', 'watch': 'plotly.js'}  # a path that each answers


def check_size() -> None:
    installed = {found.name: found for found in distributions()}
    files = {file.locate() for found in installed.values() for file in found.files or ()}
    # What Python has compiled since is not a part of the installation.
    megabytes = sum(file.stat().st_size for file in files if file.suffix != '.pyc' and file.is_file()) / 1e6
    print(f'Python {sys.version.split()[0]}, without extras: {len(installed)} packages, {megabytes:.0f} MB')
    assert len(installed) < MOST_PACKAGES, sorted(installed)
    assert megabytes < MOST_MEGABYTES


def check_verbs(directory: Path) -> None:
    (directory / 'text.txt').write_text('def add(a, b):\n    return a + b\n' * 400)
    variables = os.environ | {
        'XLA_FLAGS': '--xla_backend_optimization_level=0',  # and one device
        'XDG_CACHE_HOME': str(directory / 'cache'),
        'BROWSER': 'true',
    }
    for line, (expected, code) in COMMANDS.items():
        done = subprocess.run(
            [sys.executable, '-m', 'pretrax', *line.split()],
            cwd=directory, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        said = f'{line}\n{done.stdout}{done.stderr}'
        assert done.returncode == code, said
        assert expected in said.replace("pip install 'pretrax[pictures]'", '--extra pictures'), said
        print(f'done: {line}', flush=True)
    for verb, path in SERVERS.items():
        with listening(
            [sys.executable, '-m', 'pretrax', verb, 'runs/quickstart', '--port', '0'], directory, variables
        ) as at:
            assert urllib.request.urlopen(f'{at}/{path}', timeout=60).status == 200
            print(f'done: {verb}', flush=True)


@contextlib.contextmanager
def listening(command, directory, variables):
    """Runs a server, and gives its address when it listens."""
    with subprocess.Popen(
        command, cwd=directory, env=variables, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            said, found = '', None
            for line in process.stdout:
                said += line
                if found := re.match(r'(?:serving|watching): .*?(http://[\d.]+:\d+)', line):
                    break
            assert found, said
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


if __name__ == '__main__':
    check_size()
    with tempfile.TemporaryDirectory() as scratch:
        check_verbs(Path(scratch))
