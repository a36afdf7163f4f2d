"""Verbs take `../` and names with spaces, brackets and other alphabets; `.ci/run` tries all verbs (`every_verb.py`)."""

import os
import subprocess
import sys

import every_verb

COMMANDS = """
    data tokenize|{}/text|data.tokenizer=bytes|--out|{}/tokens
    data inspect|{}/tokens
    data shuffle|{}/tokens|--out|{}/shuffled
    config show|{}/deep/er/run.yaml
    train|{}/deep/er/run.yaml|run_dir={}/runs/q|mesh.r=8|batch.tokens=128|model={name: bigram-of-tests}|sample.every=0
    checkpoint verify|{}/runs/q
    data show|{}/runs/q|--step|1
    plot|{}/runs/q|--out|{}/loss.svg
    runs|{}/runs
"""


def test_paths_above_the_working_directory(tmp_path):
    assert every_verb.run_all(tmp_path, COMMANDS) == {}


def test_paths_and_text_are_utf8_in_an_ascii_locale(tmp_path):
    (tmp_path / 'Läufe').mkdir()
    rows = ''.join(f'{{"text": "語 naïve {n}"}}\n' for n in range(80))
    (tmp_path / 'Läufe' / '語.jsonl').write_text(rows, encoding='utf-8')
    variables = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
    command = [
        sys.executable,
        '-m',
        'pretrax',
        'data',
        'tokenize',
        'Läufe/語.jsonl',
        'data.tokenizer=bytes',
        'data.validation=0',
        '--out',
        'Läufe/t',
    ]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert 'Läufe/t' in done.stdout.decode()
    assert (tmp_path / 'Läufe' / 't' / 'zarr.json').is_file()
