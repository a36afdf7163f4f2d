"""Containers as some clusters start them: no user of this number, no home or one that is read-only,
a tiny /dev/shm, one core.
"""

import json
import os
import subprocess
import sys

import pytest

RUN = {
    'name': 'small', 'steps': 2, 'model': {'family': 'llama', 'n_layers': 1, 'd_model': 16,
    'attention': {'n_heads': 2}},
    'data': {'text': 'text.jsonl', 'vocab_size': 300, 'workers': 2}, 'batch': {'tokens': 64, 'sequence_length': 16},
    'optimizer': {'learning_rate': 0.01}, 'schedule': {'name': 'constant'}, 'precision': {'compute': 'f32'},
    'mesh': {'r': 1, 'd': 1}, 'run_dir': 'run', 'eval': {'every': 2},
}  # fmt: skip
COMMANDS = (
    'train run.yaml', 'generate run --prompt a --tokens 2', 'eval run --text t=text.jsonl --limit 1',
    'data tokenize text.jsonl data.tokenizer=bytes --out tokens', 'compile run.yaml --save a.step',
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('home', ['none', 'read-only', 'missing cache'])
def test_verbs_run_in_a_bare_container(tmp_path, home):
    """The home has no room for a cache: what is measured and compiled is not kept, and everything else works."""
    rows = (f'{{"text": "{" ".join(f"{chr(97 + n % 26)}{m % 9}" for m in range(n, n + 40))}"}}\n' for n in range(90))
    (tmp_path / 'text.jsonl').write_text(''.join(rows))
    (tmp_path / 'run.yaml').write_text(json.dumps(RUN))
    closed = tmp_path / 'closed'
    closed.mkdir()
    variables = {'PATH': os.environ['PATH'], 'TMPDIR': str(tmp_path), 'XLA_FLAGS': '--xla_backend_optimization_level=0'}
    variables |= {'read-only': {'HOME': str(closed)}, 'missing cache': {'XDG_CACHE_HOME': f'{closed}/a/b'}}.get(
        home, {}
    )
    lines = [
        'mount -t tmpfs -o size=64k tmpfs /dev/shm', f'mount -t tmpfs -o ro tmpfs {closed}',
        *(f'{person} {sys.executable} -m pretrax {command}' for person in [
            f'taskset -c {min(os.sched_getaffinity(0))} unshare -U --map-user=54321 --map-group=54321',
        ] for command in COMMANDS),
    ]  # fmt: skip
    if subprocess.run(['unshare', '-m', 'unshare', '-U', 'true'], capture_output=True).returncode:
        pytest.skip('needs root and user namespaces')
    done = subprocess.run(
        ['unshare', '-m', 'sh', '-ec', '\n'.join(lines)], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert 'Traceback' not in said
    why = 'this user has no home directory' if home == 'none' else 'Read-only file system'
    assert f'WARNING: compiled programs are not kept: {"" if home == "none" else closed}' in said
    assert why in said
    assert (tmp_path / 'pretrax-54321').is_dir() == (home == 'none')  # not the directory of another user
    assert (tmp_path / 'a.step').is_file()
