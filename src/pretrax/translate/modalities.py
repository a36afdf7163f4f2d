"""Modalities' configurations: YAML of components that refer to each other. github.com/Modalities/modalities

`flat` resolves references between values of the file. Those to the environment, `${cuda_env:WORLD_SIZE}`, stay as they
are.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pretrax.errors import UserError
from pretrax.translate.modalities_components import (
    MODEL_WRAPPERS,
    TABLES,
    Component,
    checkpoints,
    clipping,
    decoder,
    initial_weights,
    mesh,
    optimizer,
    schedule,
    trackers,
)
from pretrax.translate.translation import Translation, run_name

SOURCE = "Modalities' code"
MARK = 'component_key'
_REFERENCE = re.compile(r'\$\{([\w.]+)\}')
_DEEPEST = 16  # references to references
_UNKNOWN_STEPS = 1000
_PROFILE, _TARGET = 'settings.step_profile', 'settings.training_target'
_COMPONENTS = {kind: row for row in TABLES['components'] for kind in row['kinds'].split()}


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """{'model.config.n_layer': 2}: values below mappings and lists of mappings, references to other values replaced."""
    leaves = dict(_leaves(values, ''))
    return {key: _resolved(value, leaves, 0) for key, value in leaves.items()}


def translate(t: Translation, stem: str, devices: int | None) -> None:
    """Fills in a translation. `devices`: that the micro-batch per rank is meant for; None: its mesh's, or 1."""
    components = [Component(t, key.removesuffix(f'.{MARK}')) for key in t.given if key.endswith(f'.{MARK}')]
    decoders = [c for c in components if c.kind == 'model' and c.has('n_layer') and c.has('n_embd')]
    if len(decoders) != 1:
        raise UserError(
            f'{t.file} has {len(decoders)} models of Modalities with n_layer and n_embd; expected one\n'
            '  only decoders (variant_key: gpt2) can be translated'
        )
    t.set('name', run_name(stem), note='the name of the file')
    axes = mesh(t, components)
    decoder(decoders[0])
    initial_weights(t, components)
    _data(t, components)
    _batch(t, axes, devices)
    steps = _steps(t)
    optimizer(t, components)
    schedule(t, components, steps)
    clipping(t, components)
    checkpoints(t, components)
    trackers(t, components)
    for c in components:
        if c.variant == 'mask_loss_collator_wrapper':
            masked = t.matching(f'{c.path}.config.*')
            t.no_equivalent(
                'prompts do not count with data.messages_field or data.prompt_field (docs/data.md#conversations)',
                *masked,
            )
    for row in TABLES['not_needed']:
        t.not_needed(row['reason'], *t.matching(*row['keys'].split()))
    for c in components:
        if row := _COMPONENTS.get(c.kind):
            found = t.matching(f'{c.path}.config', f'{c.path}.config.*')
            (t.no_equivalent if row.get('is_lost') else t.not_needed)(row['reason'], *found)
        if c.kind == 'model' and c.variant in MODEL_WRAPPERS:
            t.not_needed('pretrax shards, compiles and initializes the model itself', *t.matching(f'{c.path}.config.*'))
        elif c.kind == 'number_conversion':
            t.not_needed('numbers of steps and tokens are written as numbers', *t.matching(f'{c.path}.config.*'))
    _progress(t)


def _data(t: Translation, components: list[Component]) -> None:
    datasets = {c.path: c for c in components if c.kind == 'dataset'}
    packed = {path: c for path, c in datasets.items() if c.has('raw_data_path') and c.variant != 'mem_map_dataset'}
    loaders = [c for c in components if c.kind == 'data_loader']
    train = next((c for c in loaders if 'train' in c.path), None)
    trained = _dataset_of(train, datasets) if train else None
    if trained and trained.path not in packed:
        _other_data(t, trained)
        t.set('eval.every', 0, note='TO DO: held-out text or tokens')
        t.no_equivalent('name the held-out text or tokens yourself (docs/data.md)', *t.matching('*.raw_data_path'))
    else:
        used = [trained, *(_dataset_of(c, datasets) for c in loaders if c is not train)]
        _packed_data(t, packed, list(dict.fromkeys(c.path for c in used if c and c.path in packed)) or list(packed))
    seeds = t.matching('*train*.sampler.config.seed')
    for key in seeds[:1]:
        t.set('seed', t.integer(key), key)
    if any(t.get(key) is False for key in t.matching('*train*.sampler.config.shuffle')):
        t.no_equivalent('training data is always shuffled', *t.matching('*train*.sampler.config.shuffle'))


def _packed_data(t: Translation, packed: Mapping[str, Component], paths: list[str]) -> None:
    """The first path is that of the training data, the second that of the held-out data."""
    if not paths:
        t.set('data.text', 'TEXT/*.jsonl', note='TO DO: the path of your text or tokens (docs/data.md)')
        t.no_equivalent('only packed datasets, *.pbin, can be read', *t.matching('*dataset*.config.*'))
        return
    for target, path in zip(('tokens', 'validation_tokens'), paths, strict=False):
        t.set(f'data.{target}', packed[path].text('raw_data_path'), packed[path].key('raw_data_path'))
    for path in paths[2:]:
        t.no_equivalent('one set of held-out tokens is evaluated', packed[path].key('raw_data_path'))
    if len(paths) == 1:
        t.set('eval.every', 0, note='there are no held-out tokens')


def _other_data(t: Translation, c: Component) -> None:
    """Training data that is not one packed file."""
    if c.variant == 'mem_map_dataset':
        t.set('data.text', c.text('raw_data_path'), c.key('raw_data_path'))
        t.set('data.field', c.text('jq_pattern', '.text').lstrip('.'), c.key('jq_pattern'))
        t.set(
            'data.tokenizer',
            'tokenizer.json',
            *t.matching(c.key('tokenizer*')),
            note='TO DO: the file of the tokenizer',
        )
        t.not_needed('the text is read without an index', c.key('index_path'))
        return
    t.set('data.text', 'TEXT/*.jsonl', note='TO DO: the path of your text or tokens (docs/data.md)')
    if c.variant == 'combined':
        reason = 'several files are a mixture (docs/data.md#mixtures), or one file after pretrax data merge'
    else:
        reason = 'only packed datasets, *.pbin, and .jsonl can be read'
    t.no_equivalent(reason, f'{c.path}.variant_key', *t.matching(f'{c.path}.config.*'))


def _dataset_of(loader: Component, datasets: Mapping[str, Component]) -> Component | None:
    """The dataset that the loader names, or has inside."""
    inside = loader.key('dataset')
    return datasets.get(loader.t.given.get(loader.key('dataset.instance_key'), loader.t.given.get(inside, inside)))


def _batch(t: Translation, axes: Mapping[str, int | str], devices: int | None) -> None:
    length = t.integer(f'{_PROFILE}.sequence_length', 0) or t.values.pop('sequence_length', 0)
    if not length:
        raise UserError(f'{t.file}: {_PROFILE}.sequence_length is missing; expected the tokens in one sequence')
    rows = t.integer(f'{_PROFILE}.local_train_micro_batch_size', 1)
    accumulation = t.integer(f'{_PROFILE}.gradient_accumulation_steps', 1)
    given = _PROFILE + '.local_train_micro_batch_size'
    model = math.prod(int(axes[axis]) for axis in 'ctp')
    if devices is not None and devices % model:
        raise UserError(
            f'--devices {devices} is not a multiple of {model}, the product of the axes c, t and p of {t.file}'
        )
    ranks = devices // model if devices else None
    if ranks is None and axes['r'] != 'auto' and axes['d'] != 'auto':
        ranks = int(axes['r']) * int(axes['d'])
    note = (
        'sequence_length x micro-batch x accumulation x data-parallel ranks = '
        f'{length} x {rows} x {accumulation} x {ranks or 1}'
    )
    keys = (given, f'{_PROFILE}.gradient_accumulation_steps')
    t.set('batch.tokens', length * rows * accumulation * (ranks or 1), *keys, note=note)
    t.set('batch.sequence_length', length, f'{_PROFILE}.sequence_length')
    if accumulation > 1:
        t.set('batch.micro', rows, given)
    if ranks is None:
        t.changed(
            'batch.tokens counts all devices, and the number of them is not in the file: translate with --devices N',
            given,
        )
    else:
        t.changed('batch.tokens counts all devices, and stays the same on another number of them', given)


def _steps(t: Translation) -> int:
    tokens = t.values['batch.tokens']
    steps, total = t.given.get(f'{_TARGET}.num_target_steps'), t.given.get(f'{_TARGET}.num_target_tokens')
    if isinstance(steps, int) and not isinstance(steps, bool):
        t.set('steps', steps, f'{_TARGET}.num_target_steps')
    elif isinstance(total, int) and not isinstance(total, bool):
        t.set(
            'steps',
            max(total // tokens, 1),
            f'{_TARGET}.num_target_tokens',
            note=f'num_target_tokens / batch.tokens = {total} / {tokens}',
        )
    else:
        keys = t.matching(f'{_TARGET}.*component_key', f'{_TARGET}.num_target_steps', f'{_TARGET}.num_target_tokens')
        t.set(
            'steps',
            _UNKNOWN_STEPS,
            note=f'TO DO: tokens of the training set / batch.tokens; {_UNKNOWN_STEPS} is a placeholder',
        )
        t.changed('Modalities counts the tokens of the file; write steps as a number', *keys)
    return t.values['steps']


def _progress(t: Translation) -> None:
    for key in t.matching('settings.training_progress.*'):
        if t.given[key] in (0, -1, None):
            t.not_needed('a run resumes by itself', key)
        else:
            t.no_equivalent(
                'a run resumes its own checkpoints only; the optimizer of Modalities cannot be taken over', key
            )
    t.no_equivalent(
        'the same command resumes a run; init_from starts from weights (docs/coming-from/modalities.md#warm-start)',
        *t.matching(
            'settings.warmstart_checkpoint_paths',
            'settings.warmstart_checkpoint_paths.*',
            'checkpoint_loading.config.*',
        ),
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    below: Any = None
    if isinstance(value, Mapping) and value:
        below = value.items()
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        below = enumerate(value)
    if below is None:
        yield path, value
        return
    for key, item in below:
        yield from _leaves(item, f'{path}.{key}' if path else str(key))


def _resolved(value: Any, leaves: Mapping[str, Any], depth: int) -> Any:
    """The value with `${a.b}` replaced; references to the environment, and to what is not a value, stay."""
    if not isinstance(value, str) or depth > _DEEPEST:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return _resolved(leaves[whole[1]], leaves, depth + 1) if whole[1] in leaves else value

    def inside(match: re.Match[str]) -> str:
        found = _resolved(leaves.get(match[1], match[0]), leaves, _DEEPEST)
        return str(found) if isinstance(found, str | int | float) and '${' not in str(found) else match[0]

    return _REFERENCE.sub(inside, value)
