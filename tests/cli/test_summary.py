"""The summary of `pretrax train`: the files it names exist, and the commands it suggests work."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bigram import Bigram
from pretrax import config_from_values, load_config, pretrain, register
from pretrax.cli import main
from pretrax.cli._summary import summary
from pretrax.config import resolve_mesh
from runs import Quiet

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def result(values):
    return pretrain(config_from_values({**values, 'mesh': {}, 'eval': {'every': 6, 'batches': 1}}), progress=Quiet())


def commands(lines):
    start = lines.index('Try next:')
    found = [shlex.split(line.replace('uv run ', ''), comments=True) for line in lines[start + 1 :]]
    return [command[1:] for command in found if command[:1] == ['pretrax']]


def test_files_and_numbers_are_those_of_the_run(result):
    lines = summary(result, [])
    paths = [Path(line.split('   ')[0]) for line in lines if line.startswith(str(result.run.config.run_dir))]
    assert [path.name for path in paths] == ['metrics.jsonl', '6', 'config.yaml']
    assert all(path.exists() for path in paths)
    assert f'Done: 6 steps, validation loss {result.validation["val_loss"]:.4f}' in lines
    assert lines[lines.index('The model writes:') + 1].startswith('    def ')


def test_the_next_commands_are_configurations_that_exist(result, values, tmp_path):
    (tmp_path / 'small.yaml').write_text(json.dumps(values))
    given = ['train', str(tmp_path / 'small.yaml')]
    for typed in (
        [],  # as a library
        given,
        [*given, '--allow-changes', 'steps=6', 'seed=0', 'name=small'],
        [*given, '--compiled', 'a.step', '--verbose', 'seed=0', '--compiled=b.step'],
        [*given, f'data.text={values["data"]["text"]}', f'run_dir={tmp_path / "run"}'],
        [*given, 'log.notify.url=https://h/SECRET', 'log.notify={url: "https://h/SECRET"}'],
    ):
        found = commands(summary(result, typed))
        assert found[0] == ['generate', str(tmp_path / 'run'), '--prompt', 'class ']
        assert found[-1] == ['plot', str(tmp_path / 'run')]
        assert 'SECRET' not in str(found)
        (on,) = (load_config(command[1], command[2:]) for command in found[1:-1])
        assert (on.name, on.steps, on.run_dir) == ('small', 12, tmp_path / 'run')


def test_an_island_that_has_ended_is_not_told_to_train_with_other_values(result, values, tmp_path):
    """Its federation would refuse them."""
    config = config_from_values(values | {'federation': {'bucket': str(tmp_path / 'two')}})
    island = dataclasses.replace(result, run=dataclasses.replace(result.run, config=config))
    found = commands(summary(island, []))
    assert [command[0] for command in found] == ['generate', 'federation', 'plot']
    assert found[1] == ['federation', 'status', str(tmp_path / 'two')]
    again = commands(summary(dataclasses.replace(island, stopped=True), ['train', 'small.yaml']))
    assert again[1] == ['train', 'small.yaml']


def test_a_stopped_run_is_told_how_to_go_on(result):
    typed = ['train', 'small.yaml', 'steps=6']
    lines = summary(dataclasses.replace(result, stopped=True), typed)
    assert lines[1] == 'Stopped at step 6 of 6. The checkpoint is complete.'
    assert typed in commands(lines)


@pytest.mark.slow
def test_a_sample_is_as_long_as_learned_positions_allow(values, capsys):
    """A run that is done ends well, and so does what it tells to try: 16 positions, and 128 tokens asked for.
    Who asks for them by name is refused."""
    model = {'family': 'gpt2', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}}
    values |= {'model': model, 'mesh': {}, 'steps': 1, 'schedule': {}, 'sample': {'tokens': 128}}
    lines = summary(pretrain(config_from_values(values), progress=Quiet()), [])
    assert 'The model writes:' in lines
    generate = commands(lines)[0]
    assert generate[:1] == ['generate']
    with pytest.raises(SystemExit) as ended:
        main(generate)
    assert ended.value.code in (0, None)
    with pytest.raises(SystemExit) as ended:
        main([*generate, '--tokens', '128'])
    assert ended.value.code == 2


@register('model', 'bigram-that-cannot-generate')
class CannotGenerate(Bigram):
    can_generate = False

    def __init__(self, request):
        super().__init__(request.vocab_size)


def test_a_model_that_cannot_generate_text_is_not_asked_to(values):
    values |= {'model': {'name': 'bigram-that-cannot-generate'}, 'mesh': {}}
    lines = summary(pretrain(config_from_values(values), progress=Quiet()), [])
    assert 'The model writes:' not in lines
    assert [command[0] for command in commands(lines)] == ['train', 'plot']


@pytest.mark.slow
def test_the_quickstart_trains_samples_and_suggests_commands(tmp_path):
    """The configuration of README's first command, with fewer steps."""
    typed = ['train', str(REPOSITORY / 'configs' / 'quickstart.yaml'), 'steps=2', 'schedule.warmup=1', 'eval.batches=1']
    program = [sys.executable, '-c', 'from pretrax.cli import main; main()', *typed]
    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}  # as a user's: no 8 devices
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (sample,) = map(json.loads, (tmp_path / 'runs' / 'quickstart' / 'samples.jsonl').read_text().splitlines())
    assert sample['text'].splitlines()[0] == lines[lines.index('The model writes:') + 1].removeprefix('    ')
    assert json.dumps(sample['text'])[1:40] in (tmp_path / 'runs' / 'quickstart' / 'report.html').read_text()
    assert [line.split()[1] for line in lines if line.startswith('step ')] == ['1/2', '2/2', '2/2']
    essential = ('text', 'tokens', 'devices', 'mesh', 'batch', 'model', 'compute', 'memory', 'mfu')
    assert {line.split(':')[0] for line in lines}.issuperset(essential)
    written = (tmp_path / 'runs' / 'quickstart' / 'startup.txt').read_text().splitlines()
    assert {line.split(':')[0] for line in written}.issuperset({*essential, 'tokenizer', 'attention', 'layers'})
    generate, *trainings, _ = commands(lines)
    assert (tmp_path / generate[1] / 'checkpoints' / '2').is_dir()
    on, own, eight = (load_config(command[1], command[2:]) for command in trainings)
    assert (on.name, on.steps) == ('quickstart', 4)
    assert (own.name, own.run_dir, own.data.options.text) == ('mine', Path('runs/mine'), 'path/to/*.txt')
    assert eight.run_dir == Path('runs/eight')
    assert resolve_mesh(eight.mesh, 8, 'cpu') == {'r': 1, 'd': 4, 'e': 1, 'c': 1, 't': 2, 'p': 1}
