"""Every engine checks that the run would start there before it prints, submits or starts anything."""

import json
import types

import pytest

from launched import BASE
from pretrax.cli import main
from pretrax.launch import start_check

# The devices of each are eight or more; the model has two heads.
ENGINES = {
    'local': ['-n', '2', '--devices-per-process', '4'],
    'ssh': ['--hosts', 'a,b', '--devices-per-node', '4'],
    'ray': ['--workers', '2', '--devices-per-worker', '4'],
    'slurm': ['--nodes', '2', '--gpus-per-node', '4'],
    'kubernetes': ['--image', 'x', '--nodes', '2', '--gpus-per-node', '4', 'run_dir=/data/x', '--volume', 'c:/data'],
    'tpu-vm': ['--image', 'x', '--accelerator', 'v5e-8', '--zone', 'z', 'run_dir=gs://bucket/x'],
}


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """Runs `pretrax launch` without starting anything; returns its exit code, what it prints and its warnings."""
    monkeypatch.chdir(tmp_path)
    for name in ('WANDB_API_KEY', 'WANDB_MODE', 'JAX_NUM_CPU_DEVICES'):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / 'run.yaml').write_text(json.dumps(BASE | {'batch': {'tokens': 128, 'sequence_length': 16}}))
    before = sorted(tmp_path.iterdir())

    def run(engine, *words):
        with pytest.raises(SystemExit) as ended:
            main(['launch', engine, 'run.yaml', *ENGINES[engine], '--dry-run', *words])
        assert sorted(tmp_path.iterdir()) == before
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.mark.parametrize('engine', ENGINES)
def test_heads_that_the_mesh_does_not_divide_are_refused_with_the_fix(launch, engine):
    code, out, err = launch(engine, 'mesh.t=8')
    assert (code, 'sbatch' in out) == (2, False)
    assert err.splitlines()[-3:] == [
        'model.attention.n_heads = 2 is not divisible by mesh.t = 8',
        'use mesh.t=2',
        'the run would not start; to launch it without this check: --unchecked',
    ]


@pytest.mark.parametrize('engine', ['local', 'slurm'])
def test_an_optimizer_that_returns_nothing_is_refused_in_ten_lines(launch, engine, tmp_path_factory):
    plugin = tmp_path_factory.mktemp('plugin') / 'wrong.py'
    plugin.write_text(
        f'import pretrax\n\n@pretrax.register("optimizer", "returns-nothing-{engine}")\ndef optimizer(*_, **__):\n'
        '    return None\n'
    )
    code, out, err = launch(engine, f'plugins=[{plugin}]', f'optimizer={{name: returns-nothing-{engine}}}')
    assert (code, 'sbatch' in out) == (2, False)
    refusal = err[err.index('optimizer returns-nothing') :].splitlines()
    assert 'returned None' in refusal[0]
    assert len(refusal) <= 10
    assert refusal[-1] == 'the run would not start; to launch it without this check: --unchecked'


def test_a_run_that_would_start_and_one_that_is_not_checked_are_launched(launch):
    assert launch('slurm', 'mesh.t=2', 'mesh.d=4')[0] == 0
    code, out, _ = launch('slurm', 'mesh.t=8', '--unchecked')
    assert (code, '--unchecked' in out) == (0, False)


@pytest.mark.parametrize(
    ('words', 'answer'),
    [
        (['data.name=text', 'data.text=nope.txt', 'data.vocab_size=300'], 'nope.txt: no such file or directory'),
        (
            ['data.name=text', 'data.tokenizer=nope.json', 'data.vocab_size=null'],
            'nope.json: no such tokenizer.json file',
        ),
        (['init_from=runs/nope'], 'neither a checkpoint nor a run'),
        (['log.wandb=mine'], 'log.wandb needs'),
        (['run_dir=/proc/nope'], 'run_dir: /proc/nope cannot be used'),
    ],
)
def test_files_that_all_machines_share_have_to_be_here(launch, words, answer):
    code, _, err = launch('slurm', *words)
    assert (code, answer in err) == (2, True), err
    assert len(err.splitlines()) <= 10


@pytest.mark.parametrize(
    ('words', 'code', 'answer'),
    [
        (['init_from=/data/base'], 0, 'WARNING: init_from=/data/base: not here, so not checked'),
        (['init_from=hf:nobody/nothing'], 0, 'WARNING: init_from=hf:nobody/nothing: not here'),
        (
            ['data.name=text', 'data.vocab_size=300', 'data.text=s3://b/x.txt'],
            0,
            'WARNING: data=s3://b/x.txt: not here',
        ),
        (['log.wandb=mine'], 2, 'give the Secret that has it: --secret NAME'),
        (['log.wandb=mine', '--env', 'WANDB_API_KEY=k'], 0, ''),
        (['log.wandb=mine', '--secret', 'wandb'], 0, ''),
    ],
)
def test_containers_have_files_and_variables_of_their_own(launch, words, code, answer):
    found, _, err = launch('kubernetes', *words)
    assert (found, answer in err) == (code, True), err


def test_a_check_that_gives_no_answer_is_a_warning(launch, monkeypatch):
    monkeypatch.setattr(start_check, '_SECONDS', 0.01)
    code, _, err = launch('slurm', 'mesh.t=8')
    assert (code, 'whether the run would start was not checked: no answer in' in err) == (0, True)
    monkeypatch.setattr(start_check, '_SECONDS', 60)
    monkeypatch.setattr(start_check, 'sys', types.SimpleNamespace(executable='/bin/false'))
    code, _, err = launch('slurm', 'mesh.t=8')
    assert (code, 'was not checked: exit code 1' in err) == (0, True)
