"""Islands have in common what they train, and differ in where and how they compute; each difference has a name."""

import json
import shutil

import pytest

from pretrax import config_from_values, prepare
from pretrax.federation.objects import Table
from pretrax.run.same_run import federation_terms


def terms_of(values, *overrides):
    return federation_terms(prepare(config_from_values(values, overrides), lambda text: None))


def differences(one, other):
    return {key for key in {**one, **other} if one.get(key) != other.get(key)}


@pytest.fixture
def values(values, tmp_path):
    """A run whose tokenizer is not trained: it starts fast."""
    bucket = {'bucket': str(tmp_path / 'bucket'), 'islands': 2, 'delay': 1}
    return values | {'data': values['data'] | {'tokenizer': 'bytes', 'vocab_size': None}, 'federation': bucket}


@pytest.fixture
def terms(values):
    return terms_of(values)


def test_terms_fit_the_table_of_a_federation(terms):
    table = Table(founder='north', terms=terms, islands={'north': 0})
    assert table.terms == terms
    assert terms['federation.islands'] == 2
    assert {'seed', 'steps', 'optimizer.learning_rate', 'model.d_model', 'batch.sequence_length'} <= terms.keys()


def test_islands_may_lie_on_other_hardware_and_disks(values, terms, tmp_path):
    copy = shutil.copy(values['data']['text'], tmp_path / 'copy.jsonl')
    other = [
        'name=other', f'run_dir={tmp_path}/other', f'data.text={copy}', 'batch.micro=1', 'batch.tokens=256',
        'mesh={r: 1, d: 4, t: 2}', 'model.save=none', 'precision.compute=bf16', 'compiler.options={}', 'eval.batches=1',
        'federation.bucket=elsewhere', 'federation.name=south', 'federation.patience=5.0',
        'federation.mixing=0.5', 'faults.replay.every=5', 'checkpoint.every=7', 'processes.count=1',
    ]  # fmt: skip
    assert differences(terms, terms_of(values, *other)) == set()


@pytest.mark.parametrize(
    'override',
    [
        'seed=7',
        'federation.keep=2',
        'steps=60',
        'batch.sequence_length=8',
        'optimizer.learning_rate=0.5',
        'optimizer.name=lion',
        'schedule.name=constant',
        'faults.spike=9.0',
        'federation.islands=3',
        'federation.every=50',
        'federation.fragments=2',
        'federation.delay=2',
        'federation.mixing=0.25',
        'federation.encoding=int8',
        'federation.outer_rate=1.0',
        'federation.outer_momentum=0.5',
        'model.rope.base=77.0',
        'model.z_loss=0.1',
        'data.packing=best_fit',
    ],
)
def test_another_value_of_a_key_is_named(values, terms, override):
    assert override.partition('=')[0] in differences(terms, terms_of(values, override))


def test_other_sizes_of_the_model_are_named_with_the_shapes_that_follow(values, terms):
    assert differences(terms, terms_of(values, 'model.n_layers=3')) >= {'model.n_layers', 'shapes of the weights'}


def test_other_text_is_named_and_so_is_another_weight_of_a_mixture(values, terms, tmp_path):
    text = values['data']['text']
    (tmp_path / 'other.jsonl').write_text(json.dumps({'text': 'words ' * 400}) + '\n')
    other = terms_of(values, f'data.text={tmp_path}/other.jsonl', 'data.validation=0', f'run_dir={tmp_path}/other')
    assert differences(terms, other) == {'fingerprint of the data'}

    def mixed(weight):
        sources = [{'name': name, 'weight': weight if name == 'a' else 1.0, 'text': text} for name in 'ab']
        return values | {'data': {'tokenizer': 'bytes', 'validation': 0, 'mixture': sources}}

    assert differences(terms_of(mixed(2.0)), terms_of(mixed([[0, 2.0], [3, 4.0]]))) == {'data.mixture'}


def test_long_values_end_with_a_digest_of_all(values):
    one, other = (
        terms_of(values, f'optimizer.groups=[{", ".join(["{match: embed, learning_rate_scale: 1.0}"] * 40)}, {last}]')
        for last in ('{match: norm}', '{match: unembed}')
    )
    assert differences(one, other) == {'optimizer.groups'}
    assert len(one['optimizer.groups']) < 1100


@pytest.mark.parametrize('code', ['A = 1', 'A = 2'])
def test_plugins_are_compared_by_their_code(values, terms, code, tmp_path):
    for place in ('here', 'there'):
        (tmp_path / place).mkdir()
        (tmp_path / place / 'mine.py').write_text(code if place == 'there' else 'A = 1')
    here, there = (terms_of(values, f'plugins=[{tmp_path}/{place}/mine.py]') for place in ('here', 'there'))
    assert differences(here, there) == ({'code of plugins'} if code == 'A = 2' else set())
