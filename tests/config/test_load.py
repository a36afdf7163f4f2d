"""Reading a configuration: layers, interpolation, plugins, and where each value came from."""

from pathlib import Path

import pytest

from config.smallest import VALUES
from pretrax.config import RunConfig, build, diff, from_values, load, origin, resolved_yaml
from pretrax.errors import UserError

BASE = """\
name: base
steps: 300
model: {n_layers: 2, d_model: 64, attention: {n_heads: 2}}
data: {text: stdlib}
batch:
  tokens: 1024
  sequence_length: 128
optimizer: {learning_rate: 1e-3, b1: 0.8}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / 'base.yaml', BASE)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def refused(path: Path | str, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load(path, overrides)
    message = str(error.value)
    assert 1 <= len(message.splitlines()) <= 10
    return message


def test_every_value_knows_where_it_came_from(base: Path) -> None:
    config = load(base, ['mesh.d=4', 'sample={tokens: 5}'])
    assert origin(config, 'steps') == f'{base}:2'
    assert origin(config, 'batch', 'sequence_length') == f'{base}:7'
    assert origin(config, 'model', 'n_layers') == f'{base}:3'
    assert origin(config, 'optimizer', 'b1') == f'{base}:8'
    assert origin(config, 'optimizer', 'b2') == 'default'
    assert origin(config, 'optimizer', 'name') == 'default'
    assert origin(config, 'schedule', 'warmup') == 'default'
    assert origin(config, 'mesh', 'd') == 'override'
    assert origin(config, 'mesh', 'r') == 'derived'
    assert origin(config, 'sample', 'tokens') == 'override'
    assert origin(config, 'run_dir') == 'derived'


def test_yaml_floats_without_a_point_are_numbers(base: Path) -> None:
    assert load(base).optimizer.learning_rate == 1e-3
    assert load(base, ['optimizer.learning_rate=3e-4']).optimizer.learning_rate == 3e-4


def test_derived_values() -> None:
    config = from_values(VALUES)
    assert config.run_dir == Path('runs/test')
    assert (config.mesh.r, config.mesh.d, config.mesh.t) == ('auto', 'auto', 1)
    assert from_values(VALUES, ['mesh.d=4']).mesh.r == 1
    assert from_values(VALUES, ['mesh.r=2']).mesh.d == 1
    assert from_values(VALUES, ['mesh.d=auto']).mesh.r == 1


def test_files_extend_files_and_later_ones_win(base: Path) -> None:
    write(base.parent / 'small.yaml', 'batch: {tokens: 512}\nseed: 1\n')
    child = write(base.parent / 'sub' / 'run.yaml', 'extends: [../base.yaml, ../small.yaml]\nseed: 2\n')
    config = load(child)
    assert (config.batch.tokens, config.batch.sequence_length, config.seed) == (512, 128, 2)
    assert origin(config, 'batch', 'tokens').endswith('small.yaml:1')
    assert origin(config, 'seed') == f'{child}:2'


def test_two_files_may_extend_one_but_not_in_a_circle(base: Path) -> None:
    write(base.parent / 'left.yaml', 'extends: base.yaml\n')
    write(base.parent / 'right.yaml', 'extends: base.yaml\n')
    assert load(write(base.parent / 'both.yaml', 'extends: [left.yaml, right.yaml]\n')).name == 'base'
    write(base.parent / 'a.yaml', 'extends: b.yaml\n')
    write(base.parent / 'b.yaml', 'extends: a.yaml\n')
    assert 'a.yaml -> b.yaml -> a.yaml' in refused(base.parent / 'a.yaml')
    assert 'circular' in refused(write(base.parent / 'self.yaml', 'extends: self.yaml\n'))


def test_a_missing_base_is_named_with_the_file_that_wants_it(base: Path) -> None:
    message = refused(write(base.parent / 'child.yaml', 'seed: 1\nextends: bsae.yaml\n'))
    assert 'bsae.yaml does not exist; did you mean' in message
    assert 'child.yaml:2' in message


def test_overrides_are_yaml_but_globs_need_no_quotes(base: Path) -> None:
    config = load(base, ['sample.prompts=["a", "b c"]', 'optimizer.clip_norm=null', 'data.text=*.txt', 'log.wandb=x=y'])
    assert config.sample.prompts == ('a', 'b c')
    assert config.optimizer.clip_norm is None
    assert config.data.model_dump()['text'] == '*.txt'
    assert config.log.wandb == 'x=y'


@pytest.mark.parametrize(
    ('override', 'said'),
    [
        ('foo', 'no "="'),
        ('=3', 'not a dotted name'),
        ('a..b=1', 'not a dotted name'),
        ('sample.prompts[0]=x', 'not a dotted name'),
        ('steps=', 'no value'),
        ('log.wandb=a #b', "'#b' would be ignored"),
        ('sample.prompts=[a', 'not YAML'),
        ('extends=base.yaml', 'belongs in a file'),
        ('steps=010', 'octal'),
        ('stesp=3', 'did you mean steps?'),
        ('learning_rate=1', 'write optimizer.learning_rate=1'),
        ('distill.cach=x', 'did you mean cache?'),
        ('data.teacher=x', 'did you mean distill.teacher?'),
        ('batch.tokens=16k', 'write 16384 or 16000'),
        ('steps=3.0', 'write 3'),
        ('steps=[1]', 'is [1]; expected an integer\n'),
        ('log.report=3', 'is 3; expected a boolean, true or false\n'),
        ('mesh.d=[1]', "is [1]; expected an integer or 'auto'\n"),
        ('compiler.options.xla_a=[1]', 'is [1]; expected a number, a string, true or false'),
        ('name=on', 'in quotes'),
        ('name=???', '???'),
        ('run_dir=~/runs', 'shell'),
        ('run_dir=ftp://host/runs', r'ftp:// is not supported'),
        ('run_dir=gs:/bucket/run', r'gs://bucket/run'),
    ],
)
def test_overrides_that_are_refused(base: Path, override: str, said: str) -> None:
    message = refused(base, override)
    assert said in message
    assert 'override' in message


def test_a_key_given_twice_is_refused(base: Path) -> None:
    assert 'steps is already given' in refused(base, 'steps=1', 'steps=2')
    assert 'mesh is already given' in refused(base, 'mesh={d: 1}', 'mesh.t=2')
    twice = write(base.parent / 'twice.yaml', BASE + 'steps: 400\n')
    assert f'{twice}:9' in refused(twice)
    assert 'steps' in refused(twice)


def test_environment_variables(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('PRETRAX_STEPS', '12')
    monkeypatch.setenv('PRETRAX_NAME', '34')
    text = BASE.replace('300', '${oc.env:PRETRAX_STEPS}').replace('name: base', 'name: ${oc.env:PRETRAX_NAME}')
    path = write(base.parent / 'env.yaml', text + 'run_dir: ${oc.env:PRETRAX_UNSET,out}/${name}\n')
    config = load(path)
    assert (config.steps, config.name, config.run_dir) == (12, '34', Path('out/34'))  # text only where text belongs
    assert origin(config, 'steps') == f'{path}:2, environment PRETRAX_STEPS'
    monkeypatch.setenv('PRETRAX_STEPS', 'many')
    assert 'environment PRETRAX_STEPS: steps is ${oc.env:PRETRAX_STEPS}; expected an integer' in refused(path)
    monkeypatch.delenv('PRETRAX_STEPS')
    assert "env.yaml:2: steps cannot be resolved: Environment variable 'PRETRAX_STEPS' not found" in refused(path)


@pytest.mark.parametrize('override', [
    'log.notify.url=hooks.example/SECRET', 'log.notify.url=[https://h/SECRET]', 'log.notify.url="https://h/ SECRET"',
    'log.notify={url: "ftp://h/SECRET"}', 'log.notify=https://h/SECRET', 'log.notify.url=${oc.env:HOOK}',
])  # fmt: skip
def test_a_secret_that_is_refused_is_not_shown(base: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setenv('HOOK', 'hooks.example/SECRET')
    said = refused(base, override)
    assert 'log.notify' in said
    assert 'SECRET' not in said


@pytest.mark.parametrize(
    'secret',
    [
        'hunter2',
        'q7 z',
        '12,000',
        '[hunter2]',
        'it\'s "quoted" and \\ long',
        'line one\nline two',
        's3cr3t-' * 20,
        '4.5e99999',
        '../../hunter2',
    ],
)
@pytest.mark.parametrize('key', [
    'steps', 'name', 'optimizer.name', 'model.preset', 'model.d_model', 'mesh.d', 'batch.tokens', 'batch',
    'sample.prompts.x', 'plugins', 'init_from',
    'data.name', 'precision.compute', 'log.notify.url', 'log.notify.command', 'storage.endpoint',
    'optimizer.learning_rate', 'schedule.name',
])  # fmt: skip
def test_a_refused_value_from_the_environment_is_its_reference_in_the_error(
    base: Path, monkeypatch: pytest.MonkeyPatch, key: str, secret: str
) -> None:
    """Quoted, shortened or on one line: no three words of it are in a message."""
    monkeypatch.setenv('PRETRAX_SECRET', secret)
    for value in ('${oc.env:PRETRAX_SECRET}', 'a${oc.env:PRETRAX_SECRET}b', '[1, "${oc.env:PRETRAX_SECRET}"]'):
        try:
            load(base, [f'{key}={value}'])
        except UserError as error:
            said = str(error)
            assert secret[:20] not in said.replace('${oc.env:PRETRAX_SECRET}', ''), said
            assert 'hunter2' not in said
            assert 's3cr3t' not in said
            assert 'line two' not in said


def test_merge_keys_keep_the_line_of_the_anchor(base: Path) -> None:
    text = BASE.replace('optimizer: {', 'eval: &every {every: 7}\nlog: {<<: *every}\noptimizer: {')
    config = load(write(base.parent / 'anchors.yaml', text))
    assert (config.log.every, config.eval.every) == (7, 7)
    assert origin(config, 'log', 'every').endswith('anchors.yaml:8')


def test_choosing_another_component_drops_the_options_of_the_first_and_says_so(base: Path) -> None:
    config = load(base, ['optimizer.name=sgd'])
    assert config.optimizer.name == 'sgd'
    assert config.optimizer.learning_rate == 1e-3
    assert config.notes == (f'optimizer.b1 ({base}:8) was an option of adamw; sgd was chosen instead',)
    assert config.notes[0] in resolved_yaml(config)
    assert load(base, ['optimizer.name=adamw']).notes == ()


def test_options_of_a_component_are_checked_in_one_file(base: Path) -> None:
    message = refused(base, 'optimizer.bee1=0.5')
    assert 'did you mean b1?' in message
    message = refused(base, 'optimizer.name=adamv')
    assert 'did you mean adamw?' in message


PLUGIN = """\
from pretrax.config import register

@register('optimizer', 'plugin-{name}')
def mine(*, decay: float = 0.9, order: int, names: tuple[str, ...] = ()):
    return decay, order, names
"""


def test_plugins_are_files_beside_the_configuration(base: Path) -> None:
    write(base.parent / 'mine.py', PLUGIN.format(name='a'))
    text = BASE.replace('optimizer: {', 'plugins: [mine.py]\noptimizer: {name: plugin-a, order: 2, names: [x], ')
    path = write(base.parent / 'plug.yaml', text.replace(', b1: 0.8', ''))
    config = load(path)
    assert config.optimizer.options.model_dump() == {'decay': 0.9, 'order': 2, 'names': ('x',)}
    assert config.plugins == (str(base.parent / 'mine.py'),)
    assert "optimizer.decay is 'slow'; expected a number" in refused(path, 'optimizer.decay=slow')
    again = write(base.parent / 'runs' / 'config.yaml', resolved_yaml(config))
    assert load(again) == config


@pytest.mark.parametrize(
    ('source', 'said'),
    [
        ('x = 1\n1 / 0\n', ':2 failed: ZeroDivisionError: division by zero'),
        ('def f(:\n', ':1 failed: SyntaxError'),
        ('import nowhere_at_all\n', ":1 failed: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ('raise SystemExit(3)\n', ':1 failed: SystemExit'),
        ('from pretrax.config import register\nregister("optimiser", "x")\n', 'did you mean optimizer?'),
        ('from pretrax.config import register\n@register("optimizer", "adamw")\ndef f(): ...\n', 'already registered'),
    ],
)
def test_a_failing_plugin_is_told_with_its_line(base: Path, source: str, said: str) -> None:
    write(base.parent / 'bad.py', source)
    message = refused(write(base.parent / 'run.yaml', BASE + 'plugins: [bad.py]\n'))
    assert 'run.yaml:9: plugins: ' in message
    assert 'bad.py' in message
    assert said in message


def test_a_missing_plugin_is_told(base: Path) -> None:
    assert 'nowhere.py does not exist' in refused(base, 'plugins=[nowhere.py]')
    assert "there is no module 'nowhere'" in refused(base, 'plugins=[nowhere]')


def test_problems_beyond_the_first_few_are_counted(base: Path) -> None:
    message = refused(write(base.parent / 'many.yaml', BASE + ''.join(f'wrong{i}: 1\n' for i in range(9))))
    assert 'many.yaml:9: wrong0' in message
    assert 'and 5 more' in message


def test_rules_between_keys(base: Path) -> None:
    assert 'nearest: 896 or 1024' in refused(base, 'batch.tokens=1000')
    assert 'schedule.warmup is 301, more than steps (300)' in refused(base, 'schedule.warmup=301')
    assert 'batch.micro is 9 sequences; expected at most 8' in refused(base, 'batch.micro=9')
    assert 'write a-b' in refused(base, 'name=a/b')


def test_a_configuration_is_frozen_and_equal_by_value(base: Path) -> None:
    config = load(base)
    with pytest.raises(ValueError, match='frozen'):
        config.steps = 3  # type: ignore[misc]
    assert config == load(base, ['steps=300'])
    assert config != load(base, ['steps=301'])


def test_a_directory_suggests_the_configuration_in_it(base: Path) -> None:
    assert f'did you mean {base}?' in refused(base.parent)


def test_from_values_is_the_same_as_a_file() -> None:
    config = from_values(VALUES, ['seed=3'])
    assert isinstance(config, RunConfig)
    assert origin(config, 'batch', 'tokens') == 'given'
    assert diff(from_values(VALUES), config) == [('seed', 0, 3)]
    with pytest.raises(UserError, match='did you mean steps'):
        from_values(VALUES | {'stpes': 3})


PAGE = (Path(__file__).parents[2] / 'docs' / 'configuration.md').read_text()


def test_the_example_in_the_documentation_is_valid(tmp_path: Path) -> None:
    example = PAGE.split('```yaml title="big.yaml"\n')[1].split('```')[0]
    assert len(example.splitlines()) < 30
    config = load(write(tmp_path / 'big.yaml', example))
    assert (config.mesh.r, config.mesh.d) == (1, 'auto')


def test_the_plugin_in_the_documentation_works(base: Path) -> None:
    write(base.parent / 'mine.py', PAGE.split('```python\n')[1].split('```')[0])
    used = PAGE.split('```\nplugins:')[1].split('```')[0]
    text = BASE[: BASE.index('optimizer')] + 'plugins:' + used
    config = load(write(base.parent / 'documented.yaml', text))
    assert build('optimizer', config.optimizer).update is not None
    assert config.optimizer.options.model_dump() == {'decay': 0.95}
