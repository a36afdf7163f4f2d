"""`pretrax checkpoint list`."""

import json

from checkpoint_verbs import said
from pretrax.checkpoint import steps_in


def test_list_tells_why_each_is_kept_and_what_is_missing(run, capsys):
    steps = steps_in(run / 'checkpoints')
    assert steps[-2:] == [6, 8]
    array = next((run / 'checkpoints' / '6' / 'state' / 'weights.embed').glob('[0-9]*'))
    array.write_bytes(array.read_bytes()[:-1])
    (run / 'checkpoints' / '9.partial').mkdir()
    code, out, _ = said(capsys, 'list', run)
    assert code in (0, None)
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert 'newest' in lines['8']
    assert lines['8'].endswith(', all present')
    assert f'DAMAGED: state/weights.embed/{array.name} has' in lines['6']
    assert lines['9.partial:'].endswith('the run removes it')
    losses = {
        line['step']: line['val_loss']
        for line in map(json.loads, (run / 'metrics.jsonl').read_text().splitlines())
        if 'val_loss' in line
    }
    assert f'{losses[8]:.4f}' in lines['8']
