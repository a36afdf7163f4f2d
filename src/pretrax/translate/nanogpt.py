"""nanoGPT's configurations: Python assignments, over the defaults in its train.py. github.com/karpathy/nanoGPT"""

import math
from pathlib import Path
from typing import Any

from pretrax.tables import read_table
from pretrax.translate.python_assignments import Computed
from pretrax.translate.translation import Translation, cosine_points, run_name

SOURCE = "nanoGPT's train.py"
_TABLES = read_table(Path(__file__).with_suffix('.yaml'))
DEFAULTS: dict[str, Any] = _TABLES['defaults']
# A file with none of these is not one of nanoGPT.
TYPICAL = {*DEFAULTS} - {'learning_rate', 'weight_decay', 'dropout', 'dataset', 'batch_size'}
COMPUTED = frozenset(_TABLES['computed'].split())
_PADDED_VOCABULARY = 50304  # train.py, without a meta.pkl: GPT-2's 50,257 tokens and padding
_SIZES = ('n_layer', 'n_head', 'n_embd')
_RELEASED: dict[str, str] = _TABLES['released']
_COMPUTE = {'bfloat16': 'bf16', 'float16': 'fp16', 'float32': 'f32'}


def translate(t: Translation, stem: str, devices: int | None) -> None:
    """Fills in a translation. `stem`: the file's name without its ending. The batch does not depend on devices."""
    label = t.given.get('wandb_run_name')
    if isinstance(label, str) and label:
        t.set('name', run_name(label), 'wandb_run_name')
    else:
        t.set('name', run_name(stem), note='the name of the file')
    for key, value in t.given.items():
        if isinstance(value, Computed):
            t.no_equivalent(f'nanoGPT computes it, and the file is not executed: {value.source}', key)
    steps = t.integer('max_iters')
    t.set('steps', steps, 'max_iters')
    _model(t)
    _data(t)
    _batch(t)
    _optimizer(t)
    _schedule(t, steps)
    _checkpoints_and_logs(t)
    t.not_needed('every program is compiled by XLA', 'compile')
    t.not_needed('JAX uses the accelerators that it finds; JAX_PLATFORMS=cpu selects the CPU', 'device')
    t.not_needed('processes find each other as docs/reliability.md describes', 'backend')
    t.changed(f'the run is written to runs/{t.values["name"]}; set run_dir for another place', 'out_dir')


def _model(t: Translation) -> None:
    start = t.text('init_from')
    if start.startswith('gpt2'):
        if start not in _RELEASED:
            raise t.mistake('init_from', start, 'scratch, resume or one of ' + ', '.join(_RELEASED))
        t.set('init_from', f'hf:openai-community/{start}', 'init_from')
        t.set('model.preset', _RELEASED[start], 'init_from')
        t.not_needed('init_from decides it, as in nanoGPT', *_SIZES, 'bias')
        if t.integer('block_size') < 1024:
            t.no_equivalent(
                'nanoGPT cuts the learned positions to block_size; here all 1,024 are kept, and the first ones are '
                'used',
                'block_size',
            )
    else:
        t.set('model.family', 'gpt2', note='the model of nanoGPT')
        t.set('model.n_layers', t.integer('n_layer'), 'n_layer')
        t.set('model.d_model', t.integer('n_embd'), 'n_embd')
        t.set('model.attention.n_heads', t.integer('n_head'), 'n_head')
        t.set('model.bias', t.flag('bias'), 'bias')
        if not t.text('dataset').endswith('_char'):
            t.set(
                'model.vocab_size',
                _PADDED_VOCABULARY,
                note=f"{SOURCE}: GPT-2's 50,257 and padding; remove it if there is a meta.pkl",
            )
        if start == 'resume':
            t.no_equivalent(
                'a ckpt.pt cannot be read: it is a pickle; pretrax train resumes its own runs by itself', 'init_from'
            )
        elif start == 'scratch':
            t.not_needed('a run without init_from starts from scratch', 'init_from')
        else:
            raise t.mistake('init_from', start, 'scratch, resume, gpt2, gpt2-medium, gpt2-large or gpt2-xl')
    if t.number('dropout'):
        t.set('model.dropout', t.number('dropout'), 'dropout')
    else:
        t.not_needed('there is no dropout by default', 'dropout')
    if 'dtype' in t.given and 'dtype' not in t.fates:
        dtype = t.text('dtype')
        if dtype not in _COMPUTE:
            raise t.mistake('dtype', dtype, 'one of ' + ', '.join(_COMPUTE))
        t.set('precision.compute', _COMPUTE[dtype], 'dtype')


def _data(t: Translation) -> None:
    dataset = t.text('dataset')
    note = 'dataset: its train.bin and val.bin, relative to the directory where pretrax runs'
    t.set('data.tokens', f'data/{dataset}', 'dataset', note=note)
    if not dataset.endswith('_char'):
        t.set('data.tokenizer', 'tiktoken:gpt2', 'dataset', note='prepare.py uses it; needs the extra tiktoken')


def _batch(t: Translation) -> None:
    rows, length = t.integer('batch_size'), t.integer('block_size')
    accumulation = t.integer('gradient_accumulation_steps')
    note = f'batch_size x block_size x gradient_accumulation_steps = {rows} x {length} x {accumulation}'
    t.set(
        'batch.tokens',
        rows * length * accumulation,
        'batch_size',
        'block_size',
        'gradient_accumulation_steps',
        note=note,
    )
    t.set('batch.sequence_length', length, 'block_size')
    if accumulation > 1:
        t.set('batch.micro', rows, 'batch_size', note='batch_size: sequences per device in one forward pass')


def _optimizer(t: Translation) -> None:
    t.set('optimizer.name', 'adamw', note=SOURCE)
    t.set('optimizer.learning_rate', t.number('learning_rate'), 'learning_rate')
    t.set('optimizer.b1', t.number('beta1'), 'beta1')
    t.set('optimizer.b2', t.number('beta2'), 'beta2')
    t.set('optimizer.weight_decay', t.number('weight_decay'), 'weight_decay')
    t.set('optimizer.clip_norm', t.number('grad_clip') or None, 'grad_clip')


def _schedule(t: Translation, steps: int) -> None:
    if not t.flag('decay_lr'):
        t.set('schedule.name', 'constant', 'decay_lr')
        t.not_needed('decay_lr is False', 'warmup_iters', 'lr_decay_iters', 'min_lr')
        return
    t.not_needed('a cosine schedule decays', 'decay_lr')
    warmup, end = t.integer('warmup_iters'), t.integer('lr_decay_iters')
    rate = t.number('learning_rate')
    if not rate > 0:
        raise t.mistake('learning_rate', rate, 'a number above 0')
    final = round(t.number('min_lr') / rate, 6)
    if end == steps:
        t.set('schedule.name', 'cosine', 'lr_decay_iters')
        t.set('schedule.warmup', warmup, 'warmup_iters')
        t.set('schedule.final', final, 'min_lr', note=f'min_lr / learning_rate = {t.number("min_lr"):g} / {rate:g}')
        return
    t.set('schedule.name', 'piecewise', 'lr_decay_iters', note=f'a cosine that ends at step {end}')
    t.set('schedule.warmup', warmup, 'warmup_iters')
    t.set('schedule.between', 'linear', 'lr_decay_iters')
    points = cosine_points(warmup, end, steps, final, final)
    t.set('schedule.points', points, 'lr_decay_iters', 'min_lr', note='[step, part of the peak]')
    t.changed('the cosine is drawn with straight lines, since it does not end with the run', 'lr_decay_iters')


def _checkpoints_and_logs(t: Translation) -> None:
    every = t.integer('eval_interval')
    batches = math.ceil(t.integer('eval_iters') / t.integer('gradient_accumulation_steps'))
    t.set('checkpoint.every', every, 'eval_interval')
    if t.flag('always_save_checkpoint'):
        t.not_needed('a run writes checkpoints in any case', 'always_save_checkpoint')
    else:
        t.set('checkpoint.keep_best', 1, 'always_save_checkpoint')
        t.changed('checkpoints are written anyway; the one with the lowest loss is kept', 'always_save_checkpoint')
    t.set('eval.every', every, 'eval_interval')
    t.set('eval.batches', batches, 'eval_iters', note='eval_iters / gradient_accumulation_steps')
    t.changed('batches of the whole step, in a fixed order, and of held-out tokens only', 'eval_iters')
    if t.flag('eval_only'):
        t.no_equivalent(
            'this configuration trains; a run evaluates at eval.every and at its end, and pretrax eval MODEL on tasks '
            'and texts',
            'eval_only',
        )
    else:
        t.not_needed('a run trains', 'eval_only')
    t.set('log.every', t.integer('log_interval'), 'log_interval')
    if t.flag('wandb_log'):
        t.set('log.wandb', t.text('wandb_project'), 'wandb_log', 'wandb_project')
    else:
        t.not_needed('W&B is off', 'wandb_log', 'wandb_project')
