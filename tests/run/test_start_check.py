"""What would not start is refused before text is read, a step is compiled or a directory is made.

One table, for `train`, `train --dry-run` and the check of `launch`.
"""

import json
import sys
from pathlib import Path

import pytest

import pretrax.data.text
from pretrax import config_from_values, pretrain, register
from pretrax.errors import UserError
from pretrax.run import dry_run, loop, session, setup
from pretrax.run.start_check import check_start
from pretrax.system.target import Target
from runs import BIGRAM, Quiet

HERE = Target(8, 'cpu')


@register('schedule', 'not-a-number')
def not_a_number(steps):
    return lambda step: step * float('nan')


@register('optimizer', 'none')
def no_optimizer():
    return None


@register('model', 'without-init')
class WithoutInit:
    def __init__(self, request):
        del request


def _nothing(run):
    del run


def _file(name):
    def make(run):
        run.mkdir()
        (run / name).write_text('')

    return make


def _trained(run):
    """A run that has made a checkpoint with another seed."""
    pretrain(config_from_values(json.loads((run.parent / 'values.json').read_text())), progress=Quiet())


# What stands in the way, what is changed, and what is answered. `$` is the directory of the test,
# and two spaces separate changes.
REFUSALS = [
    (_nothing, 'init_from=runs/nope', 'neither a checkpoint nor a run'),
    (_nothing, 'init_from=gpt2', 'write init_from=hf:gpt2'),
    (_nothing, 'init_from=allenai/OLMo-2-0425-1B', 'write init_from=hf:allenai/OLMo-2-0425-1B'),
    (_nothing, 'data.text=wikitext', 'is written hf:wikitext'),
    (_nothing, 'data.text=allenai/c4', 'is written hf:allenai/c4'),
    (_nothing, 'init_from.path=runs/nope  init_from.partial=true', 'neither a checkpoint nor a run'),
    (_nothing, 'distill.teacher=runs/nope', 'neither a checkpoint nor a run'),
    (_nothing, 'distill.cache=cache/nope', 'cache/nope'),
    (_nothing, 'log.trackio=mine', 'needs the package trackio'),
    (_nothing, 'log.wandb=mine', 'there is no WANDB_API_KEY'),
    (_nothing, 'mesh.r=1  mesh.d=1  mesh.t=8', 'is not divisible by mesh.t = 8\nuse mesh.t=2'),
    (_nothing, 'mesh.r=1  mesh.d=1  mesh.t=1  mesh.p=8', 'mesh.p'),
    (_nothing, 'mesh.d=3', 'mesh: r=2 d=3 t=2 makes 12 devices, but there are 8 cpu devices'),
    (_nothing, 'mesh.d=1  mesh.t=1  mesh.e=4  model.experts.n_experts=6', 'mesh.e'),
    (_nothing, 'mesh.r=8  mesh.d=1  mesh.t=1  batch.tokens=64', 'cannot be sharded evenly'),
    (_nothing, 'mesh.d=1  mesh.t=1  mesh.c=4  batch.sequence_length=6  batch.tokens=48', 'use mesh.c=1'),
    (_nothing, 'optimizer.name=none', 'optimizer none: it returned None'),
    (_nothing, 'model.attention.kernel=cudnn', 'it needs an NVIDIA GPU, not cpu'),
    (_nothing, 'model.mup.base_width=8  optimizer.name=sgd', 'optimizer.name = sgd'),
    (_nothing, 'schedule={name: not-a-number}', 'schedule not-a-number: the schedule returned nan'),
    (_nothing, 'model={name: without-init}  data.tokenizer=bytes  data.vocab_size=null', 'without-init'),
    (_nothing, 'data.text=$/nope.txt', 'nope.txt: no such file or directory'),
    (_nothing, 'data.text=[$/documents.jsonl,$/nope/*.txt]', 'nope'),
    (_nothing, 'data.text=$/empty.txt', 'the file is empty'),
    (_nothing, 'data={tokens: $/nope.bin, vocab_size: 300}', 'nope.bin: no such file or directory'),
    (_nothing, 'data.tokenizer=$/nope.json', 'nope.json: no such tokenizer.json file'),
    (_nothing, 'data.tokenizer=$/wrong.json  data.text=$/nope.txt', 'wrong.json'),
    (_nothing, 'data.tokenizer=bytes', 'data.vocab_size: 300 was given, but bytes has 257'),
    (
        _nothing,
        'data={tokenizer: bytes, mixture: [{name: a, weight: 1, text: stdlib}, {name: b, weight: 1, text: $/no.txt}]}',
        'no.txt: no such file or directory',
    ),
    (_nothing, 'run_dir=/proc/nope', 'run_dir: /proc/nope cannot be used'),
    (_nothing, 'run_dir=$/documents.jsonl', 'documents.jsonl is a file'),
    (_file('checkpoints'), '', 'checkpoints is a file'),
    (_file('stacks'), '', 'stacks is a file'),
    (_trained, 'seed=8', 'seed: 0 -> 8'),
]


@pytest.fixture
def dear(monkeypatch):
    """Names of the work that is done after the checks, in order."""
    done = []

    def record(module, name, what):
        original = getattr(module, name)

        def recorded(*args, **options):
            done.append(what)
            return original(*args, **options)

        monkeypatch.setattr(module, name, recorded)

    record(session, 'open_directory', 'directory')
    record(setup, 'open_source', 'data')
    record(pretrax.data.text, 'prepare', 'tokenize')
    record(loop, 'compile_step', 'compile')
    record(dry_run, 'compile_step', 'compile')
    return done


@pytest.mark.parametrize(
    ('make', 'changes', 'answer'), REFUSALS, ids=[f'{make.__name__} {changes}' for make, changes, _ in REFUSALS]
)
def test_what_is_cheap_to_find_out_is_refused_before_dear_work(
    make, changes, answer, values, tmp_path, monkeypatch, dear
):
    monkeypatch.setitem(sys.modules, 'wandb', sys)  # a package without credentials
    for name in ('WANDB_API_KEY', 'WANDB_MODE'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty.txt').touch()
    (tmp_path / 'wrong.json').write_text('{"model_type": "llama"}')
    if make is _trained:
        values['model'] = BIGRAM
    (tmp_path / 'values.json').write_text(json.dumps(values | {'steps': 2}))
    make(tmp_path / 'run')
    dear.clear()
    before = sorted(tmp_path.rglob('*'))
    words = list(filter(None, changes.replace('$', str(tmp_path)).split('  ')))
    replaced = {word.partition('=')[0] for word in words if '={' in word}  # sections as a whole
    config = config_from_values({key: value for key, value in values.items() if key not in replaced}, words)
    for start in (
        lambda: pretrain(config, progress=Quiet()),
        lambda: dry_run.dry_run(config, report=lambda text: None),
        lambda: check_start(config, lambda text: None, target=HERE),
    ):
        with pytest.raises(UserError) as refused:
            start()
        assert answer in str(refused.value)
        assert len(refused.value.short_text().splitlines()) <= 10
        assert dear == []
    assert sorted(tmp_path.rglob('*')) == before


def test_a_run_whose_text_is_gone_names_its_tokens_and_continues_with_them(values, tmp_path):
    values |= {'model': BIGRAM, 'steps': 2}
    pretrain(config_from_values(values), progress=Quiet())
    Path(values['data']['text']).unlink()
    with pytest.raises(UserError) as refused:
        pretrain(config_from_values(values | {'steps': 4}), progress=Quiet())
    words = str(refused.value).rpartition('to continue with them: ')[2].split()
    assert words[-1] == '--allow-changes'
    assert 'no such file' in str(refused.value)
    continued = config_from_values(values | {'steps': 4}, words[:-1])
    assert int(pretrain(continued, progress=Quiet(), allow_changes=True).state.step) == 4


def test_dear_work_is_done_in_this_order_by_a_run_that_starts(values, dear):
    config = config_from_values(values | {'model': BIGRAM, 'steps': 2})
    check_start(config, lambda text: None, target=HERE)
    assert dear == []
    pretrain(config, progress=Quiet())
    assert dear == ['directory', 'data', 'tokenize', 'compile']
