"""`pretrax mup check`: with muP sizes do not depend on the width, and without it they do."""

import re

import pytest

from pretrax.cli import main

CONFIG = """
name: small
steps: 9
model:
  {n_layers: 1, d_model: 32, attention: {n_heads: 2, n_kv_heads: 1}, feed_forward: {d_ff: 96}, init: {kind: xavier}}
data: {name: synthetic, vocab_size: 64}
batch: {tokens: 256, sequence_length: 32}
optimizer: {name: adamw, learning_rate: 3e-3}
precision: {compute: f32}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'small.yaml').write_text(CONFIG)
    return 'small.yaml'


def ended(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(['mup', 'check', *arguments])
    return end.value.code or 0, capsys.readouterr()


@pytest.mark.slow
def test_sizes_depend_on_the_width_without_mup_alone(config, tmp_path, capsys):
    flags = ['--widths', '32,128', '--seeds', '1', '--tolerance', '0.3', '--standard', '--out', 'sizes.png']
    code, printed = ended([config, 'seed=3', 'model.attention.n_heads=4', *flags], capsys)
    found = re.findall(r'^(muP|standard|change of the logits) .* (\S+)$', printed.out, re.MULTILINE)
    assert [name for name, _ in found] == ['muP', 'change of the logits', 'standard', 'change of the logits']
    assert abs(float(found[1][1])) < 0.3 < 0.5 < float(found[3][1])
    assert code == 0
    assert (tmp_path / 'sizes.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--widths', '64'], '--widths 64: expected two widths or more'),
        (['--widths', '48,a'], '--widths 48,a: expected two widths or more'),
        (['--widths', '40,64'], 'at width 40, model.attention.n_heads would be 2.5'),
        (['--out', 'sizes.gif'], '--out sizes.gif: expected a name that ends with .png, .svg, .pdf'),
        (['model.preset=gpt2-124m', 'model.d_model=null'], 'needs model.d_model and model.attention.n_heads'),
        (['optimizer.name=sgd'], 'optimizer.name = sgd does not follow the width by a known rule'),
        (['optimizer.name=soap'], 'use adamw, adafactor, lion, muon, or leave out model.mup'),
    ],
)
def test_what_cannot_be_checked_is_refused(config, arguments, message, capsys):
    code, printed = ended([config, *arguments], capsys)
    assert (code, message in printed.err) == (2, True), printed.err
