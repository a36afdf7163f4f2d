"""The JSON Schema accepts what pretrax accepts, refuses wrong keys, and describes every key;
the one in the repository is current.
"""

from pathlib import Path

import jsonschema
import pytest
import yaml
from omegaconf import OmegaConf

from config.smallest import VALUES
from pretrax.config import from_values, json_schema, json_schema_text, registry, resolved_yaml
from pretrax.config.packaged import packaged_schema

REPOSITORY = Path(__file__).parents[2]
OTHER_FILES = {'configs/search.yaml', 'configs/sweeps/quick.yaml', 'examples/skypilot.yaml'}
PARTS = {'configs/coming-from/seqax-c4.yaml'}  # complete with what extends it

FILES = sorted(
    {
        str(path.relative_to(REPOSITORY))
        for name in ('configs', 'examples')
        for path in (REPOSITORY / name).rglob('*.yaml')
    }
    - OTHER_FILES
    - PARTS
)


@pytest.fixture(scope='module', autouse=True)
def built_in_components():
    """Leaves out what other tests have registered."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, entries in registry._components.items():
            own = {name: entry for name, entry in entries.items() if isinstance(entry.factory, str)}
            patch.setitem(registry._components, kind, own)
        yield


@pytest.fixture(scope='module')
def schema(built_in_components):
    return json_schema()


def problems(schema, values):
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(values)]


def test_the_file_in_the_repository_is_current():
    assert packaged_schema().read_text() == json_schema_text(), (
        'renew it: uv run pretrax config schema > configs/pretrax-schema.json'
    )


@pytest.mark.parametrize('file', FILES)
def test_every_configuration_of_the_repository_is_valid(schema, file):
    assert not problems(schema, OmegaConf.to_container(OmegaConf.load(REPOSITORY / file)))


@pytest.mark.parametrize('change', [
    {'model': None, 'init_from': 'hf:model'},
    {'mesh': 'auto'},
    {'steps': '${batch.tokens}'},
    {'batch': {'tokens': '1_024', 'sequence_length': [[0, 64], [10, 128]]}},
    {'optimizer': {'name': 'mine', 'own': 1, 'learning_rate': 1}, 'plugins': ['mine.py']},
    {'optimizer': {'learning_rate': 1, 'groups': [{'match': 'embed'}, {'match': ['a', 'b']}]}},
])  # fmt: skip
def test_other_forms_that_pretrax_takes_are_valid(schema, change):
    assert not problems(schema, VALUES | change)


def test_a_file_that_extends_another_needs_only_what_it_changes(schema):
    assert not problems(schema, {'extends': 'base.yaml', 'batch': {'tokens': 64}, 'optimizer': {'b1': 0.8}})
    assert not problems(
        schema, {'extends': 'base.yaml', 'model': {'arguments': {'width': 8}}, 'optimizer': {'iterations': 3}}
    )


@pytest.mark.parametrize(('change', 'problem'), [
    ({'stepps': 5}, "'stepps' was unexpected"),
    ({'steps': 'many'}, "'many' is not valid"),
    ({'precision': {'compute': 'bf17'}}, "'bf17' is not one of"),
    ({'mesh': {'q': 2}}, "{'q': 2} is not valid"),
    ({'batch': {'tokens': 64}}, "'sequence_length' is a required property"),
    ({'optimizer': {'learning_rate': 1, 'lr': 2}}, "'lr': 2} is not valid"),
    ({'optimizer': {'name': 'sgd', 'b1': 0.9, 'learning_rate': 1}}, 'is not valid'),
    ({'optimizer': {'name': 'adamww', 'learning_rate': 1}}, "'adamww' is not one of"),
    ({'optimizer': {'iterations': 3, 'learning_rate': 1}}, 'does not allow 3'),  # of muon, which is not named
    ({'data': {'name': 'synthetic'}}, "'vocab_size' is a required property"),
    ({'model': None}, "None is not of type 'object'"),
])  # fmt: skip
def test_mistakes_are_marked(schema, change, problem):
    assert any(problem in message for message in problems(schema, VALUES | change))


def test_every_key_has_a_description(schema):
    def keys(node):
        if isinstance(node, dict):
            yield from node.get('properties', {}).items()
        for below in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from keys(below)

    described = list(keys({key: value for key, value in schema.items() if key != 'allOf'}))
    assert len(described) > 300
    assert not [key for key, value in described if not value.get('description')]


def test_the_schema_has_every_key_and_every_component(schema):
    assert {'extends', 'name', 'sample'} <= set(schema['properties'])
    options = {choice['properties']['name'].get('const'): choice for choice in schema['$defs']['Optimizer']['anyOf']}
    assert {'adamw', 'adafactor', 'lion', 'sgd', 'muon', 'soap', 'schedule_free'} <= set(options)
    assert {'learning_rate', 'b1', 'weight_decay'} <= set(options['adamw']['properties'])
    written = yaml.safe_load(resolved_yaml(from_values(VALUES)))
    for key, value in written.items():
        definition = schema['$defs'].get(key.capitalize(), {})
        for choice in definition.get('anyOf', [definition]):
            if isinstance(value, dict) and choice['properties'].get('name', {}).get('const') == value.get('name'):
                keys = {'name', *registry.options_model('data', 'text').model_fields} if key == 'data' else set(value)
                assert keys == set(choice['properties']), key
                assert set(value) <= keys, key


def test_every_reference_in_the_schema_is_defined(schema):
    def references(node: object):
        if isinstance(node, dict):
            yield from ([node['$ref']] if isinstance(node.get('$ref'), str) else [])
            for below in node.values():
                yield from references(below)
        elif isinstance(node, list):
            for below in node:
                yield from references(below)

    found = set(references(schema))
    assert found
    assert {reference.rpartition('/')[2] for reference in found} <= set(schema['$defs'])
