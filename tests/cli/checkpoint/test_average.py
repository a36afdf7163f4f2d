"""`pretrax checkpoint average`."""

import json
import shutil

import numpy as np
import pytest

from checkpoint_verbs import arrays, edit_manifest, said
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import verify
from pretrax.cli import main
from pretrax.errors import UserError
from runs import Quiet


def test_an_average_is_the_mean_and_writes_text(run, tmp_path, capsys):
    out = tmp_path / 'mean'
    code, text, err = said(capsys, 'average', run, '--last', '2', '--out', out)
    assert code in (0, None), err
    assert 'the mean of 2 checkpoints' in text
    verify(out / 'checkpoints', 0)
    a, b, mean = arrays(run, 6), arrays(run, 8), arrays(out, 0)
    assert mean.keys() == a.keys()
    for name, values in mean.items():
        expected = ((a[name].astype(np.float64) + b[name]) / 2).astype(np.float32)
        np.testing.assert_array_equal(values, expected)
    with pytest.raises(SystemExit) as end:
        main(['generate', str(out), '--prompt', 'abc', '--tokens', '4'])
    assert end.value.code in (0, None)
    assert capsys.readouterr().out.startswith('abc')
    with pytest.raises(SystemExit):
        main(['export', str(out), str(tmp_path / 'hf')])
    assert (tmp_path / 'hf' / 'tokenizer.json').is_file()


def test_what_cannot_be_averaged_is_refused_and_leaves_nothing(run, tmp_path, capsys):
    out = tmp_path / 'mean'
    for arguments, message in [
        ([run], 'an average needs at least two'),
        ([run, '--last', '9'], 'checkpoint.keep sets how many are kept'),
        ([run, tmp_path / 'nowhere'], 'no such run or checkpoint'),
    ]:
        code, _, err = said(capsys, 'average', *arguments, '--out', out)
        assert code == 2
        assert message in err
    other = shutil.copytree(run, tmp_path / 'other')
    edit_manifest(other, 8, lambda m: m['description'].update(tokenizer='0' * 64))
    assert 'different tokenizers' in said(capsys, 'average', run, other, '--out', out)[2]
    edit_manifest(other, 8, lambda m: m['description'].update(tokenizer=None))
    edit_manifest(run, 8, lambda m: m['description'].update(tokenizer=None))
    edit_manifest(other, 8, lambda m: m['arrays'].pop('weights.embed'))
    assert 'these are different models: embed is ' in said(capsys, 'average', run, other, '--out', out)[2]
    assert not out.exists()
    assert said(capsys, 'average', run, run, '--out', run)[0] == 2  # not over a run


def test_a_run_of_averaged_weights_is_not_trained_on(run, tmp_path, capsys):
    said(capsys, 'average', run, '--last', '2', '--out', tmp_path / 'mean')
    config = json.loads((tmp_path / 'mean' / 'checkpoints' / '0' / 'manifest.json').read_text())['description'][
        'config'
    ]
    with pytest.raises(UserError, match='holds weights that were averaged, and no training state'):
        pretrain(config_from_values(config), progress=Quiet())
