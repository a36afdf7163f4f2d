"""The page of features and the lists of pages say what is true: every page is linked, and what they name exists."""

import re
from pathlib import Path
from typing import get_args

import pytest

import make_reference
from pretrax.cli import main
from pretrax.config import registry
from pretrax.config.schema import Mesh, Precision
from pretrax.model.choices import TransformerOptions
from pretrax.model.families import FAMILY_NAMES
from pretrax.model.option_names import RENAMED, SECTIONS
from reference_maker.markdown import sections

REPOSITORY = Path(__file__).parents[2]
FEATURES = (REPOSITORY / 'docs/features.md').read_text()
PAGES = sorted(str(path.relative_to(REPOSITORY / 'docs')) for path in (REPOSITORY / 'docs').rglob('*.md'))
ALL_PAGES = ['README.md', 'CONTRIBUTING.md', *(f'docs/{page}' for page in PAGES)]
OUTSIDE = [
    'README.md',
    *sorted(path.name for path in REPOSITORY.glob('C*.md')),
    '.github/SECURITY.md',
    'benchmarks/lab-notes.md',
]
AXES = {'r': 'replica', 'd': 'data', 'e': 'expert', 'c': 'context', 't': 'tensor', 'p': 'pipeline'}
KINDS = ('model', 'data', 'optimizer', 'schedule')


def item(title):
    """The bullet `- title: ...` of the page of features, with its continuation lines."""
    [text] = re.findall(rf'^- (?:{title}|\[{title}\]\(.*\)): (.*\n(?:  .*\n)*)', FEATURES, re.MULTILINE)
    return text


def code(text):
    return re.findall(r'`([^`\n]+)`', text)


def built_in(kind):
    return [name for name in registry.names(kind) if isinstance(registry._components[kind][name].factory, str)]


def help_text(capsys, *words):
    """What `pretrax WORDS --help` prints; '' if there is no such command."""
    try:
        main([*words, '--help'])
        status = 0
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr().out
    return printed if status in (0, None) else ''


def subcommands(capsys, *words):
    listed = help_text(capsys, *words).partition('Commands')[2]
    return set(re.findall(r'^[ │]*([a-z][a-z-]+)  ', listed, re.MULTILINE))


@pytest.mark.parametrize('listing', ['docs/index.md', 'mkdocs.yml'])
def test_every_page_is_listed(listing):
    text = (REPOSITORY / listing).read_text()
    pattern = r':\s+([\w/-]+\.md)$' if listing == 'mkdocs.yml' else r'\]\(([\w/-]+\.md)\)'
    generated = {f'reference/{page}' for page in make_reference.PAGES} if listing == 'mkdocs.yml' else set()
    assert set(re.findall(pattern, text, re.MULTILINE)) | {'index.md'} == {*PAGES, *generated}


@pytest.mark.parametrize('page', OUTSIDE)
def test_links_lead_to_files_and_sections(page):
    """Those of docs/ are checked when the site is built."""
    links = re.findall(r'\]\((?!https?:)([^)#]+)#?([^)]*)', (REPOSITORY / page).read_text())
    assert links
    for target, section in links:
        file = (REPOSITORY / page).parent / target
        assert file.exists(), target
        assert not section or section in dict(sections(str(file.resolve()))), section


@pytest.mark.parametrize(
    'page', [page for page in ALL_PAGES if 'coming-from' not in page]
)  # those name other tools' files
def test_the_files_that_a_page_names_exist(page):
    text = re.sub(r'^```.*?^```', '', (REPOSITORY / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    source = REPOSITORY / 'src' / 'pretrax'
    tops = {
        'tests',
        'benchmarks',
        'scripts',
        'configs',
        'examples',
        'notebooks',
        *(path.name for path in source.iterdir()),
    }
    named = [
        name for name in re.findall(r'`([\w./-]+/[\w.-]+\.(?:py|yaml|ipynb))`', text) if name.split('/')[0] in tops
    ]
    assert not [name for name in named if not any((root / name).exists() for root in (REPOSITORY, source))]


@pytest.mark.parametrize('page', ALL_PAGES)
def test_tables_have_a_head_and_rows_of_one_width(page):
    text = re.sub(r'^```.*?^```', '', (REPOSITORY / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r'(?:^\|.*\|\n)+', text, re.MULTILINE):
        rows = [re.sub(r'\\\|', '', row) for row in table.splitlines()]
        assert set(rows[1]) <= set('|-: '), table
        assert len({row.count('|') for row in rows}) == 1, table


@pytest.mark.parametrize('page', ALL_PAGES)
def test_advice_to_install_keeps_extras_and_names_no_package_index(page):
    text = (REPOSITORY / page).read_text()
    assert not re.findall(r"pip install '?pretrax.*", text)
    assert not [line for line in re.findall(r'uv sync.*--extra.*', text) if '--inexact' not in line]


@pytest.mark.parametrize(('title', 'kind'), [('Optimizers', 'optimizer'), ('Schedules', 'schedule')])
def test_the_features_name_every_registered_component(title, kind):
    assert sorted(code(item(title))) == built_in(kind)


def test_the_models_page_has_every_option_of_the_decoder():
    page = (REPOSITORY / 'docs/models.md').read_text()
    keys = {*TransformerOptions.model_fields, *RENAMED.values()} - {*SECTIONS}
    assert len(keys) == 96
    assert not [key for key in keys if f'`{key}`' not in page]


def test_the_features_name_every_mesh_axis():
    named = re.findall(r'`(\w+)` \(([^)]+)\)', ' '.join(item('Mesh axes').split()))
    assert {axis for axis, _ in named} == set(Mesh.model_fields) == set(AXES)
    assert all(AXES[axis] in meaning for axis, meaning in named)


def test_the_features_name_every_precision():
    compute, matmul = (get_args(Precision.model_fields[key].annotation) for key in ('compute', 'matmul'))
    assert set(code(item('Precision'))) == {*compute, *matmul} - {'auto', 'compute'}


def test_the_features_name_every_family():
    named = code(item('Families').partition('Logits')[0])
    assert sorted(named) == sorted(FAMILY_NAMES)


def test_the_features_name_every_command(capsys):
    named = {tuple(words.split()) for words in re.findall(r'`pretrax ([a-z][a-z-]*(?: local)?)', FEATURES)}
    assert not [words for words in named if not help_text(capsys, *words)]
    assert subcommands(capsys) <= {words[0] for words in named}
