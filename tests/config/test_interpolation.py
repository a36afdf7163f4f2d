"""References in a configuration: resolved within bounds, and kept where they come from the environment."""

import json
import random
import time
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from config.smallest import VALUES
from pretrax.config import diff, from_manifest, from_values, load, resolved_yaml, settle, written_values
from pretrax.config.interpolation import resolve
from pretrax.config.problems import ProblemsError
from pretrax.errors import UserError

SECRET = 'a-secret-of-the-environment'


def test_references_resolve_as_omegaconf_resolves_them(monkeypatch):
    monkeypatch.setenv('PRETRAX_A', 'from the environment')
    monkeypatch.delenv('PRETRAX_B', raising=False)
    values = {
        'n': 3, 'none': None, 'flag': True, 'list': [1, {'x': 'deep'}], 'section': {'a': 'b', 'c': '${n}'},
        'whole': '${n}', 'text': '${n} and ${flag}', 'copy': '${section}', 'item': '${list[1].x}',
        'through': '${copy.c}',
        'env': '${oc.env:PRETRAX_A}', 'unset': '${oc.env:PRETRAX_B,other}', 'quoted': "${oc.env:PRETRAX_B, 'o t'}",
        'null': '${oc.env:PRETRAX_B,null}', 'nested': '${oc.env:PRETRAX_B,${n}}', 'dotted': '${list.0}',
        'relative': {'x': 1, 'y': '${.x}', 'z': '${..n}'}, 'escaped': r'\${n}', 'slashes': r'a\\${n}',
        'three': r'\\\${n}',
        'plain': r'back\slash $n {n} $', 'both': r'\${n} is ${n}',
    }  # fmt: skip
    assert resolve(values)[0] == OmegaConf.to_container(OmegaConf.create(values), resolve=True)


def test_what_is_written_resolves_to_the_same(monkeypatch):
    """Random texts of the characters that matter."""
    monkeypatch.setenv('PRETRAX_A', 'x${n}\\')
    draw = random.Random(0)
    pieces = ['\\', '$', '{', '}', '${n}', '${oc.env:PRETRAX_A}', '${oc.env:PRETRAX_B,a}', r'\${', 'a']
    tried = 0
    for _ in range(3000):
        text = ''.join(draw.choices(pieces, k=draw.randint(1, 6)))
        try:
            values, references = resolve({'n': 1, 'text': text})
        except ProblemsError:
            continue
        tried += 1
        written = references.get(('text',))
        if written is not None:
            assert resolve({'n': 1, 'text': written})[0]['text'] == values['text'], text
    assert tried > 500


BOMBS = {
    'doubling text': ['a0: ' + 'x' * 10, *(f'a{i}: ${{a{i - 1}}}${{a{i - 1}}}' for i in range(1, 40))],
    'doubling lists': ['a0: [x]', *(f'a{i}: ["${{a{i - 1}}}", "${{a{i - 1}}}"]' for i in range(1, 40))],
    'time, not size': ['a0: ""', *(f'a{i}: {f"${{a{i - 1}}}" * 8}' for i in range(1, 20))],
    'depth': ['a0: x', *(f'a{i}: ${{a{i - 1}}}' for i in range(1, 2000))],
    'nested defaults': ['a: ' + '${oc.env:X,' * 5000 + 'x' + '}' * 5000],
    'nested openings': ['a: ' + '${' * 20000],
    'long times many': [f'a: {"x" * 100_000}', f'b: {"${a}" * 10_000}'],
    'many of the same': [f'a: {"x" * 1000}', *(f'a{i}: ${{a}}' for i in range(5000))],
    'laughs': [
        'a: &a [x, x, x, x, x, x, x, x, x]',
        *(f'{"bcdefghij"[i]}: &{"bcdefghij"[i]} [{", ".join(["*" + "abcdefghi"[i]] * 9)}]' for i in range(9)),
    ],
    'laughs in texts': [f'a: &a {"x" * 100_000}', f'b: [{", ".join(["*a"] * 5000)}]'],
    'over a section': ['a0: {x: 1}', *(f'a{i}: {{x: "${{a{i - 1}}}", y: "${{a{i - 1}}}"}}' for i in range(1, 40))],
}


@pytest.mark.parametrize('bomb', BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_at_once(bomb, tmp_path, monkeypatch):
    monkeypatch.delenv('X', raising=False)
    path = tmp_path / 'bomb.yaml'
    path.write_text(yaml.safe_dump(VALUES) + '\n'.join(bomb))
    began = time.process_time()
    with pytest.raises(UserError) as error:
        load(path)
    assert time.process_time() - began < 10  # the slowest takes 1 s; without bounds they take minutes or gigabytes
    assert len(str(error.value)) < 2000


def test_a_bomb_in_a_base_is_refused_where_an_override_lies_over_it(tmp_path):
    path = tmp_path / 'bomb.yaml'
    path.write_text(yaml.safe_dump(VALUES) + '\n'.join(BOMBS['doubling lists']))
    with pytest.raises(UserError):
        load(path, ['a39.x=1'])


@pytest.fixture
def secret(tmp_path, monkeypatch):
    """A configuration with a secret in several places."""
    monkeypatch.setenv('PRETRAX_SECRET', SECRET)
    values = VALUES | {
        'data': {'text': 'https://user:${oc.env:PRETRAX_SECRET}@host/x.txt'},
        'log': {'wandb': '${oc.env:PRETRAX_SECRET}', 'mlflow': '${log.wandb}'},
        'sample': {'prompts': ['a', 'b ${oc.env:PRETRAX_SECRET} \\${c}']},
        'run_dir': '${oc.env:PRETRAX_UNSET,runs}/${name}',
    }
    path = tmp_path / 'run.yaml'
    path.write_text(yaml.safe_dump(values))
    return load(path)


def test_what_is_written_holds_references_and_no_secret(secret, tmp_path):
    config = settle(secret, mesh={'d': 2}, origin='planned')
    assert config.log.mlflow == SECRET
    for text in (resolved_yaml(config), json.dumps(written_values(config))):
        assert SECRET not in text
        assert text.count('${oc.env:PRETRAX_SECRET}') == 4
    (tmp_path / 'again.yaml').write_text(resolved_yaml(config))
    assert load(tmp_path / 'again.yaml') == config
    assert from_values(written_values(config)) == config


def test_resuming_finds_no_change_whatever_the_variable_is(secret, tmp_path, monkeypatch):
    written = json.loads(json.dumps(written_values(secret)))
    assert diff(from_manifest(written), secret) == []
    monkeypatch.setenv('PRETRAX_SECRET', 'another')
    assert diff(from_manifest(written), load(tmp_path / 'run.yaml')) == []
    changed = load(tmp_path / 'run.yaml', ['log.wandb=other', 'log.mlflow=null'])
    assert diff(from_manifest(written), changed) == [
        ('log.wandb', '${oc.env:PRETRAX_SECRET}', 'other'),
        ('log.mlflow', '${oc.env:PRETRAX_SECRET}', None),
    ]
    monkeypatch.delenv('PRETRAX_SECRET')
    assert from_manifest(written).log.wandb == '${oc.env:PRETRAX_SECRET}'
    before = json.loads(json.dumps(secret.model_dump(mode='json')))  # as written before references were kept
    before['sample']['prompts'] = ['a', 'b']
    monkeypatch.setenv('PRETRAX_SECRET', SECRET)
    assert [key for key, *_ in diff(from_manifest(before), load(tmp_path / 'run.yaml'))] == ['sample.prompts']


def test_a_variable_that_changes_what_is_trained_is_noticed(monkeypatch):
    values = VALUES | {
        'precision': {'compute': '${oc.env:PRETRAX_COMPUTE}'},
        'data': {'name': 'synthetic', 'vocab_size': '${oc.env:PRETRAX_VOCAB}'},
    }
    monkeypatch.setenv('PRETRAX_COMPUTE', 'f32')
    monkeypatch.setenv('PRETRAX_VOCAB', '300')
    written = written_values(from_values(values))
    monkeypatch.setenv('PRETRAX_COMPUTE', 'bf16')
    monkeypatch.setenv('PRETRAX_VOCAB', '301')
    changes = diff(from_manifest(written), from_values(values))
    assert changes == [('data.vocab_size', 300, 301), ('precision.compute', 'f32', 'bf16')]


def test_a_manifest_takes_no_variable_into_a_url(monkeypatch):
    monkeypatch.setenv('PRETRAX_SECRET', SECRET)
    for url in ('https://host/${oc.env:PRETRAX_SECRET}', 'https://${oc.env:PRETRAX_SECRET}.host/', 's3://theirs/${name}'
                '${oc.env:PRETRAX_SECRET}', 'x${oc.env:PRETRAX_UNSET,://}${oc.env:PRETRAX_SECRET}'):  # fmt: skip
        for values in ({'text': url}, {'text': '${log.wandb}'}):
            config = from_manifest(VALUES | {'data': values, 'log': {'wandb': url}})
            assert SECRET not in json.dumps(config.model_dump(mode='json'))
    own = from_manifest(VALUES | {'data': {'text': 's3://${oc.env:PRETRAX_SECRET}/x'}})
    assert own.model_dump()['data']['text'] == f's3://{SECRET}/x'


def test_a_manifest_imports_no_plugin(tmp_path: Path):
    plugin = tmp_path / 'plugin.py'
    plugin.write_text('raise SystemExit("imported")')
    assert from_manifest(VALUES | {'plugins': [str(plugin)]}).plugins == (str(plugin),)
    with pytest.raises(UserError, match='imported only if you name them'):
        from_manifest(VALUES | {'plugins': [str(plugin)], 'schedule': {'name': 'theirs'}})
