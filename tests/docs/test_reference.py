"""The generated pages of the reference leave out no key and lead to sections;
committed pictures are what the source makes.
"""

import functools
import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

import make_reference
import site_hooks
from pretrax import config_from_values
from pretrax.cli import _verbs
from pretrax.config import registry
from pretrax.config.one_of import OneOf
from pretrax.config.problems import known_keys
from pretrax.config.schema import RunConfig
from pretrax.run.loop import train
from pretrax.view.definitions import DEFINITIONS, definition_of
from reference_maker import collectives, errors, metrics, parts
from reference_maker.api import DTYPES
from reference_maker.markdown import DOCS, sections
from reference_maker.source import files
from runs import Quiet, documents, small, values  # noqa: F401  (fixtures)
from test_house import MAY_IMPORT

REGISTERED = [(kind, name) for kind in registry.DEFAULTS for name in registry.names(kind)]
BUILT_IN = [(kind, name) for kind, name in REGISTERED if isinstance(registry._components[kind][name].factory, str)]


@functools.cache
def text(page):
    return make_reference.PAGES[page]()


def rows(page):
    """The cells of the rows of the tables of a page that begin with code."""
    lines = [line.replace(r'\|', '\0') for line in page.splitlines() if line.startswith('| `')]
    return [[cell.strip().strip('`') for cell in line.strip('|').split('|')] for line in lines]


@pytest.mark.parametrize('name', make_reference.PICTURES)
def test_the_committed_picture_is_what_the_source_makes(name):
    committed = (make_reference.IMAGES / name).read_text()
    assert committed == make_reference.PICTURES[name](), f'renew docs/images/{name}: {make_reference.COMMAND}'


@pytest.mark.parametrize('name', make_reference.PAGES)
def test_links_of_a_page_lead_to_pages_and_sections(name):
    """Links between generated pages are checked when the site is built."""
    links = re.findall(r'\]\(\.\./([\w/-]+\.md)#?([^)]*)\)', text(name))
    assert links
    for page, section in set(links):
        assert (DOCS / page).exists(), page
        assert not section or section in dict(sections(page)), f'{page}#{section}'


def test_links_to_sections_of_the_overview_lead_to_the_generated_pages():
    known = {*site_hooks.PAGE_OF}
    assert {f'{page}.md' for page in site_hooks.PAGE_OF.values()} == {*make_reference.PAGES}
    assert known == {section for section, _ in sections('reference.md')} - {'', 'reference'}
    for path in DOCS.rglob('*.md'):
        assert set(re.findall(r'reference\.md#([\w-]+)\)', path.read_text())) <= known, path
    linked = site_hooks.linked('[Keys](../reference.md#keys), [all](reference.md)')
    assert linked == '[Keys](../reference/keys.md), [all](reference.md)'


def test_every_key_has_a_row():
    listed = {cells[0] for cells in rows(text('keys.md'))}
    sections = {kind for kind in RunConfig.model_fields if f'## `{kind}`\n' in text('keys.md')}
    keys = {key.removesuffix('.options') for key in known_keys(RunConfig)} - set(registry.DEFAULTS)
    assert keys - {'checkpoint.memory', 'faults.replay', 'log.notify', *sections} <= listed
    assert sections >= {*registry.DEFAULTS, 'batch', 'mesh', 'faults', 'log'}


def options_of(model, prefix=''):
    """The keys and fields of a model of options; those of a section one by one."""
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from options_of(type(field.default), f'{prefix}{name}.')
        else:
            yield f'{prefix}{name}', field


@pytest.mark.parametrize(('kind', 'name'), BUILT_IN)
def test_every_option_has_a_row_with_its_default_and_a_description(kind, name):
    part = text('keys.md').partition(f'### `{kind}.name: {name}`\n')[2].partition('\n#')[0]
    written = {cells[0]: cells for cells in rows(part)}
    model = registry.options_model(kind, name)
    for key, field in options_of(model):
        _, _, default, meaning, *_ = written[f'{kind}.{key}']
        assert field.description, f'{kind}.name={name}: {key} has no description'
        assert meaning, key
        if field.is_required():
            assert default == ('null' if isinstance(model, OneOf) else 'required'), (
                key
            )  # only one of the kinds needs it
        elif field.default_factory is None:
            assert json.loads(default) == json.loads(json.dumps(field.default)), key


def test_every_key_leads_to_the_page_that_explains_it():
    assert not [cells[0] for cells in rows(text('keys.md')) if '](' not in cells[3]]


def test_every_verb_has_a_section():
    headings = re.findall(r'^##+ (pretrax .*)', text('verbs.md'), re.MULTILINE)
    assert headings == [' '.join(['pretrax', *words]) for words in _verbs._commands(_verbs.ROOT)]


def test_every_key_that_the_source_writes_to_the_metrics_has_a_definition_and_a_source():
    emitted = metrics.emitted()
    assert set(emitted) == set(DEFINITIONS), 'view/definitions.yaml, or EMITTERS in scripts/reference_maker/metrics.py'


@pytest.mark.slow
def test_a_run_writes_only_files_and_metrics_that_the_pages_list(small):  # noqa: F811
    log = {'every': 1, 'layers': 2, 'graph': True, 'profile': 1, 'tensorboard': True}
    config = config_from_values(small | {'log': log, 'eval': {'every': 3, 'batches': 1}, 'steps': 6})
    train(config, progress=Quiet())
    directory = Path(config.run_dir)
    found = [path.relative_to(directory).parts for path in directory.rglob('*')]
    page = (DOCS / 'files.md').read_text()
    assert not [each for each in found if len(each) == 1 and f'`{each[0]}' not in page]
    assert {'metrics.jsonl', 'config.yaml', 'checkpoints', 'report.html'} <= {each[0] for each in found}
    lines = [json.loads(line) for line in (directory / 'metrics.jsonl').read_text().splitlines()]
    written = {key for line in lines for key in line} - {'nonfinite'}
    assert {'val_loss', 'loss', 'mfu'} <= written
    assert not [key for key in written if definition_of(key).meaning.startswith('a number that the model')]


@pytest.mark.parametrize('name', make_reference.PAGES)
def test_what_a_page_shows_in_angle_brackets_is_no_tag(name):
    """To mkdocs, a backslash before `<` is a backslash and a tag."""
    assert not re.findall(r'<\w+>', re.sub(r'```.*?```|`[^`]*`', '', text(name), flags=re.DOTALL))


def test_the_python_interface_has_what_pages_and_examples_import():
    files = [*DOCS.rglob('*.md'), *DOCS.parent.glob('examples/*.py'), *DOCS.parent.glob('notebooks/*.ipynb')]
    imports = [
        found
        for file in files
        for found in re.findall(r'^[ "]*from (pretrax\S*) import ([\w, ]+)', file.read_text(), re.M)
    ]
    wanted = {f'`{module}.{name.split()[0]}`' for module, names in imports for name in names.split(',')}
    assert len(wanted) > 20
    types = {f'`pretrax.shardlib.{name}`' for name in DTYPES}
    assert not [name for name in sorted(wanted - types - {'`pretrax.shardlib`'}) if name not in text('api.md')]


def test_the_index_has_a_message_with_its_advice():
    [found] = [each for each in errors.messages() if each.text.startswith('--compiled PATH: it is in a bucket')]
    assert found.advice.startswith('if you trust them, copy the file to')
    listed = {cells[0] for cells in rows(text('errors.md'))}
    assert found.text in listed
    assert 'is not a key that exists' in listed  # of a Problem


def test_the_index_of_errors_has_every_part_of_the_source():
    assert {each.file.partition('/')[0] for each in errors.messages()} <= set(errors.AREAS)
    assert set(errors.OF_OPTIONS) <= set(files())


def test_the_picture_of_the_parts_agrees_with_what_they_may_import():
    drawn = parts.imports()
    assert set(drawn) == set(MAY_IMPORT) - {'__main__'}
    assert all(found <= MAY_IMPORT[part] for part, found in drawn.items())
    assert 'shardlib' in drawn['model']


def test_the_pictures_of_the_axes_have_the_collectives_of_the_pages():
    """docs/parallelism.md describes them in words."""
    sent = {axis: {each.name for each in collectives.collectives(axis)} for axis in 'rdectp'}
    assert sent == {
        'r': set(),
        'd': {'all_gather'},
        'e': {'all_to_all'},
        'c': {'all_to_all', 'all_gather', 'ppermute'},
        't': {'all_gather', 'psum_scatter', 'psum'},
        'p': {'ppermute', 'psum_scatter', 'psum'},
    }
    assert collectives.declared('attention.py', 'AttentionWeights', 'q') == 'M/d H/t D'
    assert collectives.shards('M/d H/t D', 'd')
    assert not collectives.shards('M/d H/t D', 'p')
