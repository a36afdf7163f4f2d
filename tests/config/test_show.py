"""The resolved configuration as text, and differences."""

from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from pydantic import BaseModel, model_validator

from config.smallest import VALUES
from pretrax.config import ABSENT, diff, from_values, load, origin, register, resolved_yaml, written_values


def reloaded(text: str, directory: Path):
    path = directory / 'config.yaml'
    path.write_text(text, encoding='utf-8')
    return load(path)


def test_the_resolved_file_loads_as_the_same_configuration(tmp_path: Path) -> None:
    config = from_values(VALUES, ['mesh.t=2', 'optimizer.eps=1e-10', 'model.save={q: keep}', 'run_dir=a b/c'])
    text = resolved_yaml(config)
    again = reloaded(text, tmp_path)
    assert again == config
    assert origin(again, 'optimizer', 'eps').startswith(str(tmp_path / 'config.yaml:'))
    steps = next(line for line in text.splitlines() if line.startswith('steps:'))
    assert steps.split('#')[1].strip() == 'given'
    assert all('  # ' in line for line in text.splitlines()[1:] if not line.endswith(':'))


@pytest.mark.parametrize(('given', 'written'), [
    ('https://h/SECRET', '${oc.env:PRETRAX_NOTIFY_URL,null}'),
    ('${oc.env:HOOK,https://h/SECRET}', '${oc.env:PRETRAX_NOTIFY_URL,null}'),
    ('https://h/SECRET/${oc.env:HOOK,x}', '${oc.env:PRETRAX_NOTIFY_URL,null}'),
    ('${oc.env:NOTIFY_HERE}', '${oc.env:NOTIFY_HERE}'),
    ('${oc.env:NOTIFY_HERE,null}', '${oc.env:NOTIFY_HERE,null}'),
])  # fmt: skip
def test_the_url_of_a_webhook_is_written_as_a_reference(monkeypatch, given, written):
    monkeypatch.setenv('NOTIFY_HERE', 'https://h/SECRET')
    config = from_values(VALUES, [f'log.notify.url={given}'])
    assert config.log.notify.url.startswith('https://h/SECRET')
    assert written_values(config)['log']['notify']['url'] == written
    assert 'SECRET' not in resolved_yaml(config)


def test_text_that_yaml_would_read_otherwise_survives(tmp_path: Path) -> None:
    survives(['1e-3', 'on', '~', 'null', '${oc.env:HOME}', '\\${x}', '?', ' a', 'a: b', '#', '=', '<<', '*x'], tmp_path)


any_text = st.text(st.characters(codec='utf-8') | st.sampled_from('${}\\?:#\'"\n'), max_size=20)
printed = any_text.filter(
    lambda text: not text.endswith('???')
)  # OmegaConf's mark of a missing value; refused when read


@hypothesis.given(st.lists(printed, min_size=1, max_size=10))
@hypothesis.settings(
    max_examples=30, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_any_text_survives(tmp_path: Path, texts: list[str]) -> None:
    survives(texts, tmp_path)


def survives(texts: list[str], directory: Path) -> None:
    config = from_values(VALUES)
    config = config.model_copy(update={'sample': config.sample.model_copy(update={'prompts': tuple(texts)})})
    assert reloaded(resolved_yaml(config), directory).sample.prompts == tuple(texts)


def test_diff_names_the_keys_that_differ() -> None:
    old = from_values(VALUES)
    new = from_values(VALUES, ['steps=20', 'optimizer.name=sgd', 'eval.every=5'])
    changes = {key: (before, after) for key, before, after in diff(old, new)}
    assert changes['steps'] == (10, 20)
    assert changes['optimizer.name'] == ('adamw', 'sgd')
    assert changes['optimizer.b1'] == (0.9, ABSENT)
    assert diff(old, old) == []


class Preset(BaseModel):
    preset: str | None = None
    width: int | None = None
    depth: int | None = None

    @model_validator(mode='before')
    @classmethod
    def _fill(cls, values: dict) -> dict:
        return ({'width': 8} if values.get('preset') else {}) | {'depth': 2} | values


@register('model', 'show-test', options=Preset)
def show_test(*, options: Preset) -> Preset:
    return options


def test_what_a_preset_fills_in_is_said(tmp_path: Path) -> None:
    config = from_values(VALUES | {'model': {'name': 'show-test', 'preset': 'wide', 'depth': 3}})
    assert origin(config, 'model', 'width') == 'preset wide'
    assert origin(config, 'model', 'depth') == 'given'
    config = from_values(VALUES | {'model': {'name': 'show-test'}})
    assert origin(config, 'model', 'depth') == 'derived'
    assert reloaded(resolved_yaml(config).replace('show-test', 'show-test'), tmp_path) == config
