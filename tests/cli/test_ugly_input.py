"""Input that no program expects: each ends with a short message and exit code 2,
without a traceback and without waiting.
"""

import io
import json
import os
import signal
import sys

import pytest

from config.smallest import VALUES
from pretrax.cli import main

LONG, DEEP = 'x' * 300, 'x/' * 3000
FILES = {
    'nul.yaml': 'extends: "\\0"',
    'long.yaml': f'extends: {LONG}',
    'deep.yaml': f'extends: [{DEEP}]',
    'loop.yaml': 'extends: loop',
    'directory.yaml': 'extends: .',
    'surrogate.yaml': 'extends: "\\ud800"',
    'plugin_nul.yaml': 'plugins: ["\\0.py"]',
    'plugin_long.yaml': f'plugins: [{LONG}.py]',
    'plugin_deep.yaml': f'plugins: [{DEEP}.py]',
    'plugin_loop.yaml': 'plugins: [loop/x.py]',
    'plugin_directory.yaml': 'plugins: [./]',
    'good.yaml': json.dumps(VALUES),
}
COMMANDS = [
    *(f'config show {name}' for name in FILES if name != 'good.yaml'),
    *(f'train {path}' for path in (LONG, DEEP, 'loop', '.', '/dev/zero', '/proc/self/mem', 'no\udcff.yaml',
    'closed.yaml')),
    *(f'plot {path}' for path in (LONG, DEEP, 'loop', '.', '/dev/zero', '/dev/null', '/proc/self/mem', 'binary')),
    'plot run --key a\nb',
    'plot run --out /proc/x/y.svg',
    *(f'config schema --plugin {path}' for path in (f'{LONG}.py', f'{DEEP}.py', 'loop/x.py', './')),
    *(f'checkpoint {verb} {path}' for verb in ('list', 'inspect', 'verify') for path in (LONG, DEEP, 'loop',
    '/dev/zero')),
    *(f'init {name}' for name in (LONG, DEEP, '..', 'a\udcff')),
    *(f'train good.yaml --compiled {path}' for path in (LONG, '/dev/zero', 'fifo', '.', 'binary')),
    'init closed/x',
]  # fmt: skip


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp('ugly')
    for name, text in FILES.items():
        (place / name).write_text(text)
    (place / 'loop').symlink_to('loop')
    (place / 'binary').write_bytes(bytes(range(256)) * 10)
    (place / 'closed').write_text('a file, not a directory')
    (place / 'closed.yaml').symlink_to('closed/x')
    (place / 'run').mkdir()
    (place / 'run' / 'metrics.jsonl').write_text('{"step": 1, "loss": NaN}\n[1]\n"x"\n{"step": "a", "loss": []}\n{"st')
    os.mkfifo(place / 'fifo')
    return place


@pytest.mark.parametrize('command', COMMANDS, ids=lambda command: ascii(command[:50]))
def test_it_is_refused_in_a_few_lines(command, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    signal.alarm(30)  # ends a test that waits
    try:
        with pytest.raises(SystemExit) as end:
            main(command.split(' '))
    finally:
        signal.alarm(0)
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert 1 <= len(said.splitlines()) <= 10
    assert 'Traceback' not in said
    assert len(said) < 10_000


def test_a_name_from_the_outside_is_shown_in_any_encoding(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(raw := io.BytesIO(), encoding='ascii'))
    with pytest.raises(SystemExit) as end:
        main(['config', 'show', 'good.yaml', 'sample.prompts=["\u4e2d"]'])
    sys.stdout.flush()
    assert end.value.code in (0, None), capsys.readouterr().err
    assert b'prompts: ["?"]' in raw.getvalue()
