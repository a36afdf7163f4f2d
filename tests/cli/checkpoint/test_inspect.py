"""`pretrax checkpoint inspect`."""

import json

from checkpoint_verbs import arrays, said


def test_inspect_adds_up_and_shows_the_configuration(run, capsys):
    _, out, _ = said(capsys, 'inspect', run / 'checkpoints' / '8', '--files')
    assert 'learning_rate: 0.1' in out
    assert f'weights: {len(arrays(run, 8))} arrays, {sum(a.size for a in arrays(run, 8).values()):,} numbers' in out
    manifest = json.loads((run / 'checkpoints' / '8' / 'manifest.json').read_text())
    for name, file in manifest['files'].items():
        assert any(
            line.split()[0] == file['xxh3'] and line.endswith(name)
            for line in out.splitlines()[-len(manifest['files']) :]
        )
