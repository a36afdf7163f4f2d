"""What CONTRIBUTING.md offers exists: the commands of `just`, the hooks of pre-commit,
and what templates ask for; versions agree.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pretrax import __version__
from pretrax.run import rollback, startup
from repository.commands import REPOSITORY, check_line

CONTRIBUTING = (REPOSITORY / 'CONTRIBUTING.md').read_text()
CHANGELOG = (REPOSITORY / 'CHANGELOG.md').read_text()
HOOKS = yaml.safe_load((REPOSITORY / '.pre-commit-config.yaml').read_text())['repos']
FORMS = sorted((REPOSITORY / '.github' / 'ISSUE_TEMPLATE').glob('[!c]*.yml'))


def recipes():
    just = [str(Path(sys.executable).with_name('just')), '--dump', '--dump-format', 'json']
    done = subprocess.run(just, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)['recipes']


def test_every_recipe_is_one_line_with_a_description_and_those_of_contributing_exist():
    found = recipes()
    assert all(len(recipe['body']) == 1 for recipe in found.values())
    assert all(recipe['doc'] or recipe['private'] for recipe in found.values())
    named = set(re.findall(r'uv run just ([a-z][a-z-]*)', CONTRIBUTING))
    assert {'check', 'release'} <= named <= set(found)


@pytest.mark.slow
def test_the_command_of_every_recipe_exists():
    for recipe in recipes().values():
        line = ''.join(part if isinstance(part, str) else '' for part in recipe['body'][0])
        check_line(line.removeprefix('@'))


def test_hooks_fetch_nothing():
    assert [repository['repo'] for repository in HOOKS] == ['local']
    assert {hook['language'] for hook in HOOKS[0]['hooks']} == {'system'}


@pytest.mark.slow
@pytest.mark.parametrize('hook', HOOKS[0]['hooks'], ids=lambda hook: hook['id'])
def test_the_command_of_a_hook_exists(hook):
    check_line(hook['entry'])
    re.compile(hook.get('files', ''))


def test_the_hosted_workflow_runs_the_checks_of_ci_and_may_write_nothing():
    workflow = yaml.safe_load((REPOSITORY / '.github' / 'workflows' / 'checks.yml').read_text())
    assert workflow['permissions'] == {'contents': 'read'}
    lines = [step['run'] for job in workflow['jobs'].values() for step in job['steps'] if 'run' in step]
    assert {'.ci/run', '.ci/nightly'} <= {*lines}
    for line in lines:
        check_line(line) if line.startswith('.ci/') else None
    used = {step['uses'] for job in workflow['jobs'].values() for step in job['steps'] if 'uses' in step}
    assert all(re.fullmatch(r'actions/\w+@v\d+', action) for action in used)


@pytest.mark.parametrize('form', FORMS, ids=lambda form: form.stem)
def test_a_form_for_issues_is_valid(form):
    read = yaml.safe_load(form.read_text())
    assert read['name']
    assert read['description']
    fields = [element for element in read['body'] if element['type'] != 'markdown']
    assert len({field['id'] for field in fields}) == len(fields)
    assert all(field['type'] == 'textarea' and field['attributes']['label'] for field in fields)
    assert any(field.get('validations', {}).get('required') for field in fields)


def test_the_form_for_bugs_asks_for_files_that_a_run_writes():
    labels = {element['attributes'].get('label') for element in yaml.safe_load(FORMS[0].read_text())['body']}
    assert {'`pretrax doctor`', 'config.yaml', startup.FILE, rollback.REPORT} <= labels


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((REPOSITORY / 'CITATION.cff').read_text())
    assert citation['cff-version'] == '1.2.0'
    assert {'message', 'title', 'authors'} <= set(citation)
    assert citation['version'] == __version__


def test_the_changelog_has_a_section_for_each_version_and_begins_with_this_one():
    versions = re.findall(r'^## \[([\d.]+)\] - (?:unreleased|\d{4}-\d\d-\d\d)$', CHANGELOG, re.MULTILINE)
    assert versions[0] == __version__
    assert versions == sorted(versions, key=lambda version: [*map(int, version.split('.'))], reverse=True)
    assert len(versions) == len({*versions}) == CHANGELOG.count('\n## ')
    assert set(re.findall(r'^### (.*)$', CHANGELOG, re.MULTILINE)) <= {
        'Added',
        'Changed',
        'Deprecated',
        'Removed',
        'Fixed',
    }
