"""Calls of `pretrax checkpoint`, and what is in a checkpoint."""

import json

import pytest

from pretrax.checkpoint import CheckpointWeights
from pretrax.cli import main


def said(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(['checkpoint', *map(str, arguments)])
    out, err = capsys.readouterr()
    return end.value.code, out, err


def arrays(run, step):
    weights = CheckpointWeights(run / 'checkpoints', step)
    return {name: weights.read(name) for name in weights.shapes}


def edit_manifest(run, step, change):
    """As if it had been written so."""
    import xxhash

    from pretrax.checkpoint import Manifest

    path = run / 'checkpoints' / str(step) / 'manifest.json'
    content = json.loads(path.read_text())
    del content['manifest_xxh3']
    change(content)
    digest = xxhash.xxh3_128_hexdigest(Manifest.model_validate(content).model_dump_json().encode())
    path.write_text(json.dumps(content | {'manifest_xxh3': digest}))
