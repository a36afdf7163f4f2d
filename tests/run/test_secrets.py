"""What a configuration reads from the environment is in no file that a run writes, and in no message."""

import json
import types

import pytest

from pretrax.cli import main
from pretrax.config import from_manifest, from_values, resolved_yaml, shown_prompts, written_values
from pretrax.errors import UserError
from pretrax.run.step_metrics import StepMetrics

SECRET = 'hunter2-is-the-password'
VALUES = {
    'name': 'x', 'steps': 2, 'model': {'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}},
    'data': {'text': 'nowhere.txt'}, 'batch': {'tokens': 128, 'sequence_length': 16},
    'optimizer': {'learning_rate': 0.001},
}  # fmt: skip


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv('PRETRAX_SECRET', SECRET)


@pytest.mark.parametrize(
    ('prompts', 'shown'),
    [
        (['${oc.env:PRETRAX_SECRET}', 'def '], ['${oc.env:PRETRAX_SECRET}', 'def ']),
        (['key: ${oc.env:PRETRAX_SECRET}.'], ['key: ${oc.env:PRETRAX_SECRET}.']),
        ('${oc.env:PRETRAX_LIST}', ['${oc.env:PRETRAX_LIST}'] * 2),
    ],
)
def test_samples_begin_with_the_reference_of_a_prompt(prompts, shown, monkeypatch):
    monkeypatch.setenv('PRETRAX_LIST', json.dumps([SECRET, 'def ']))
    config = from_values(VALUES | {'sample': {'prompts': prompts}})
    assert SECRET in ''.join(config.sample.prompts)
    written, said = [], []
    references = shown_prompts(config.sample.prompts, config.references)
    metrics = types.SimpleNamespace(
        _run=types.SimpleNamespace(sample=config.sample, shown_prompts=references),
        _report=said.append,
        _log=types.SimpleNamespace(sample=lambda *given: written.append(given)),
    )
    StepMetrics.show(metrics, 7, [f'{prompt} and more' for prompt in config.sample.prompts])
    texts = [f'{prompt} and more' for prompt in shown]
    assert written == [(7, tuple(shown), tuple(texts))]
    assert said == [f'sample at step 7: {text}' for text in texts]


def test_a_list_from_the_environment_is_written_as_its_reference(monkeypatch):
    monkeypatch.setenv('PRETRAX_LIST', json.dumps([SECRET, 'def ']))
    config = from_values(VALUES | {'sample': {'prompts': '${oc.env:PRETRAX_LIST}'}})
    assert config.sample.prompts == (SECRET, 'def ')
    assert SECRET not in resolved_yaml(config)
    assert SECRET not in json.dumps(written_values(config))
    assert from_manifest(written_values(config)) == config
    monkeypatch.delenv('PRETRAX_LIST')  # as for somebody else
    assert from_manifest(written_values(config)).sample.prompts == ('hidden', 'hidden')


FILTERS = [{'field': 'x', 'equals': SECRET, 'missing': 'drop'}]
SOURCES = [{'name': name, 'weight': [[0, 1], [9, 2]], 'text': SECRET} for name in ('a', 'b')]

SHARING = {'name': 'a', 'weight': 1.0, 'text': 'x'}  # which takes over the keys next to the mixture


@pytest.mark.parametrize(
    ('data', 'value'),
    [
        ({'filters': '${oc.env:PRETRAX_VALUE}'}, FILTERS),
        ({'filters': ['${oc.env:PRETRAX_VALUE}']}, FILTERS[0]),
        ({'filters': [{'field': 'x', 'one_of': '${oc.env:PRETRAX_VALUE}'}]}, [SECRET]),
        ({'text': None, 'mixture': '${oc.env:PRETRAX_VALUE}'}, SOURCES),
        ({'text': None, 'mixture': [SOURCES[0] | {'text': 'x', 'filters': '${oc.env:PRETRAX_VALUE}'}]}, FILTERS),
        ({'text': None, 'mixture': [SHARING], 'field': '${oc.env:PRETRAX_VALUE}'}, SECRET),
        ({'text': None, 'mixture': [SHARING], 'filters': '${oc.env:PRETRAX_VALUE}'}, FILTERS),
        (
            {'text': None, 'mixture': [SHARING], 'filters': [{'field': 'x', 'equals': '${oc.env:PRETRAX_VALUE}'}]},
            SECRET,
        ),
        ({'text': ['${oc.env:PRETRAX_VALUE}']}, SECRET),
        ({'text': 'hf:x', 'hugging_face': '${oc.env:PRETRAX_VALUE}'}, {'revision': SECRET}),
        ('${oc.env:PRETRAX_VALUE}', {'text': SECRET, 'tokenizer': 'bytes'}),
    ],
)
def test_a_list_or_section_of_the_data_is_written_as_its_reference(data, value, monkeypatch):
    monkeypatch.setenv('PRETRAX_VALUE', value if isinstance(value, str) else json.dumps(value))
    given = {'text': 'x', 'tokenizer': 'bytes'} | data if isinstance(data, dict) else data
    config = from_values(VALUES | {'data': given})
    assert SECRET in str(config.data)
    assert SECRET not in resolved_yaml(config)
    assert SECRET not in json.dumps(written_values(config))
    assert from_manifest(written_values(config)) == config
    monkeypatch.delenv('PRETRAX_VALUE')  # as for somebody else, who sees what a run is made of
    data = from_manifest(written_values(config)).data
    assert SECRET not in str(data)
    assert type(data.options) is type(config.data.options)


@pytest.mark.parametrize('endpoint', [f'http://me:{SECRET}@host:9000', f'https://{SECRET}@host/x', f'host/{SECRET}'])
def test_credentials_in_the_url_of_a_service_are_refused_and_not_shown(endpoint):
    with pytest.raises(UserError, match=r'storage\.endpoint must be a URL') as error:
        from_values(VALUES | {'storage': {'endpoint': endpoint}})
    assert SECRET not in str(error.value)
    assert from_values(VALUES | {'storage': {'endpoint': 'http://127.0.0.1:9000/x'}}).storage.endpoint


@pytest.mark.parametrize(
    'key', ['data.text', 'data.tokens', 'data.tokenizer', 'init_from', 'model.preset', 'plugins', 'extends']
)
def test_an_error_of_the_run_names_the_variable(key, tmp_path, capsys):
    value = '${oc.env:PRETRAX_SECRET}'
    (tmp_path / 'text.txt').write_text('some text ' * 100)
    values: dict = VALUES | {
        'run_dir': str(tmp_path / 'run'),
        'data': {'text': str(tmp_path / 'text.txt'), 'validation': 0},
    }
    if key == 'data.tokens':
        values['data'] = {'tokens': value}
    elif key.startswith('data.'):
        values['data'] |= {key.removeprefix('data.'): value}
    elif key == 'model.preset':
        values['model'] = {'preset': value}
    else:
        values[key] = [value] if key == 'plugins' else value
    (tmp_path / 'x.yaml').write_text(json.dumps(values))
    with pytest.raises(SystemExit) as ended:
        main(['train', str(tmp_path / 'x.yaml')])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert value in said.err
    assert SECRET not in said.err + said.out


@pytest.mark.slow
def test_no_file_of_a_run_has_the_secret(tmp_path, capsys, monkeypatch):
    text = 'the quick brown fox jumps over the lazy dog ' * 100
    (tmp_path / 'rows.jsonl').write_text(json.dumps({'text': text, 'x': 'public'}) + '\n')
    monkeypatch.setenv('PRETRAX_FILTERS', json.dumps([{'field': 'x', 'differs': SECRET}]))
    values = VALUES | {
        'run_dir': str(tmp_path / 'run'), 'data': {'text': str(tmp_path / 'rows.jsonl'), 'tokenizer': 'bytes',
        'validation': 0, 'filters': '${oc.env:PRETRAX_FILTERS}'},
        'sample': {'prompts': ['${oc.env:PRETRAX_SECRET}'], 'every': 1, 'tokens': 2}, 'log': {'tensorboard': True,
        'every': 1},
        'checkpoint': {'every': 1},
    }  # fmt: skip
    (tmp_path / 'x.yaml').write_text(json.dumps(values))
    with pytest.raises(SystemExit) as ended:
        main(['train', str(tmp_path / 'x.yaml'), '--verbose'])
    said = capsys.readouterr()
    assert ended.value.code in (0, None), said.err
    assert SECRET not in said.out + said.err
    files = [path for path in (tmp_path / 'run').rglob('*') if path.is_file()]
    assert {'samples.jsonl', 'report.html', 'config.yaml', 'environment.json'} <= {path.name for path in files}
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []
    assert '${oc.env:PRETRAX_SECRET}' in (tmp_path / 'run' / 'samples.jsonl').read_text()
