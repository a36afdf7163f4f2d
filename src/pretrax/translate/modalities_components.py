"""What the components of Modalities mean: the model, mesh, optimizer, schedule, checkpoints and trackers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrax.config.problems import shown
from pretrax.errors import UserError
from pretrax.tables import read_table
from pretrax.translate.translation import Translation

TABLES = read_table(Path(__file__).with_name('modalities.yaml'))
MODEL_WRAPPERS: list[str] = TABLES['wrappers'].split()
_MULTIPLE = 256  # what the width of a SwiGLU is rounded up to
_NORMS: dict[str, str] = TABLES['norms']
_DTYPES: dict[str, str] = TABLES['dtypes']
_NO_DECAY: dict[str, list[str]] = TABLES['no_decay']


@dataclasses.dataclass(frozen=True)
class Component:
    """A mapping with `component_key` and `variant_key` at `path`, and its `config`."""

    t: Translation
    path: str

    @property
    def kind(self) -> str:
        return str(self.t.given[f'{self.path}.component_key'])

    @property
    def variant(self) -> str:
        return str(self.t.given.get(f'{self.path}.variant_key', ''))

    def key(self, name: str) -> str:
        return f'{self.path}.config.{name}'

    def has(self, name: str) -> bool:
        return self.key(name) in self.t.given

    def text(self, name: str, default: str = '') -> str:
        return self.t.text(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.t.number(self._existing(name, default), default)

    def integer(self, name: str, default: int | None = None) -> int:
        return self.t.integer(self._existing(name, default), default)

    def _existing(self, name: str, default: Any) -> str:
        if default is None and not self.has(name):
            raise UserError(f'{self.t.file}: {self.key(name)} is missing')
        return self.key(name)


def decoder(c: Component) -> None:
    """The sizes and choices of Modalities' GPT2 model, whose blocks can be those of Llama."""
    t = c.t
    t.set('model.family', 'gpt2', f'{c.path}.variant_key')
    t.set('model.n_layers', c.integer('n_layer'), c.key('n_layer'))
    t.set('model.d_model', c.integer('n_embd'), c.key('n_embd'))
    t.set('model.attention.n_heads', c.integer('n_head_q'), c.key('n_head_q'))
    t.set('model.attention.n_kv_heads', c.integer('n_head_kv', c.integer('n_head_q')), c.key('n_head_kv'))
    activation, hidden = c.text('activation_type', 'gelu'), c.integer('ffn_hidden')
    if activation in ('swiglu', 'fused_swiglu'):
        multiple = c.integer('enforce_swiglu_hidden_dim_multiple_of', _MULTIPLE)
        width = multiple * -(-int(2 * hidden / 3) // multiple)
        keys = (c.key('ffn_hidden'), c.key('enforce_swiglu_hidden_dim_multiple_of'))
        t.set(
            'model.feed_forward.d_ff', width, *keys, note=f'2/3 of ffn_hidden, rounded up to a multiple of {multiple}'
        )
        t.changed(
            f'Modalities makes {width} of it for a SwiGLU: 2/3, rounded up to a multiple of {multiple}',
            c.key('ffn_hidden'),
        )
        t.set('model.feed_forward.activation', 'swiglu', c.key('activation_type'))
    elif activation == 'gelu':
        t.set('model.feed_forward.d_ff', hidden, c.key('ffn_hidden'))
        t.set(
            'model.feed_forward.activation',
            'gelu_erf',
            c.key('activation_type'),
            note='activation_type: the exact form',
        )
    else:
        raise t.mistake(c.key('activation_type'), activation, 'gelu, swiglu or fused_swiglu')
    t.set('model.vocab_size', c.integer('vocab_size'), c.key('vocab_size'))
    t.set('model.bias', t.flag(c.key('bias'), False), c.key('bias'))
    tied = t.flag(c.key('use_weight_tying'), True)
    t.set(
        'model.embedding.tied',
        tied,
        c.key('use_weight_tying'),
        note='' if c.has('use_weight_tying') else 'releases without use_weight_tying tie it',
    )
    if c.number('dropout', 0):
        t.set('model.dropout', c.number('dropout'), c.key('dropout'))
    t.not_needed('there is no dropout by default', c.key('dropout'))
    _positions(c)
    _norms(c)
    t.not_needed('the kernel is chosen, and printed', c.key('attention_implementation'))
    t.not_needed('names of tensors are not configured', c.key('prediction_key'), c.key('sample_key'))
    t.not_needed('a model never exists on one device as a whole', c.key('use_meta_device'))
    t.not_needed('batch.sequence_length', c.key('sequence_length'))
    if c.has('sequence_length') and 'settings.step_profile.sequence_length' not in t.given:
        t.values['sequence_length'] = c.integer('sequence_length')
    if c.has('seed'):
        t.not_needed('seed draws the weights too', c.key('seed'))


def _positions(c: Component) -> None:
    t, kind = c.t, c.text('poe_type', 'NOPE')
    transforms = [
        key
        for key in t.given
        if key.startswith(c.key('attention_config.qkv_transforms')) and key.endswith('.type_hint')
    ]
    rotary = next((key.removesuffix('.type_hint') for key in transforms if t.given[key] == 'RotaryTransform'), None)
    if rotary:
        t.set('model.positions', 'rope', c.key('poe_type'), f'{rotary}.type_hint')
        t.set('model.rope.base', float(t.number(f'{rotary}.config.base_freq', 10000)), f'{rotary}.config.base_freq')
        t.not_needed('they follow from the sizes of the model', *t.matching(f'{rotary}.config.*'))
    elif kind == 'ABSOLUTE':
        t.set('model.positions', 'learned', c.key('poe_type'))
    else:
        t.set('model.positions', 'rope', c.key('poe_type'))
        t.set('model.rope.nope_every', 1, c.key('poe_type'), note='poe_type: no positions in any layer')
    t.not_needed('an identity', *(key for key in transforms if t.given[key] == 'IdentityTransform'))
    t.no_equivalent('not a transform of pretrax', *(key for key in transforms if key not in t.fates))


def _norms(c: Component) -> None:
    """The norms of a decoder, which all have to be of one kind. Their keys depend on the release."""
    t, found = c.t, {}
    for name in ('attention_norm', 'ffn_norm', 'lm_head_norm'):
        for key in (c.key(f'{name}.variant_key'), c.key(f'{name}_config.norm_type')):
            if key in t.given:
                found[key] = str(t.given[key])
    kinds = set(found.values())
    if len(kinds) > 1 or kinds - _NORMS.keys():
        raise UserError(
            f'{t.file}: the norms of {c.path} are {shown(sorted(kinds))}; expected one of {", ".join(_NORMS)} for all '
            'of them'
        )
    if found:
        kind = _NORMS[kinds.pop()]
        t.set('model.norm.kind', kind, *found)
        options = t.matching(*(c.key(f'{name}*.config.*') for name in ('attention_norm', 'ffn_norm', 'lm_head_norm')))
        eps = [key for key in options if key.endswith(('.eps', '.epsilon'))]
        if eps:
            t.set('model.norm.eps', t.number(eps[0]), *eps)
        biases = [key for key in options if key.endswith('.bias')]
        if kind == 'layernorm':
            bias = t.flag(biases[0]) if biases else True
            t.set('model.norm.bias', bias, *biases, note='' if biases else "LayerNorm's default")
        elif any(t.given[key] is True for key in biases):
            t.no_equivalent('RMSNorm has no bias here, nor in the paper', *biases)
        t.not_needed('they follow from the sizes', *(key for key in options if key not in t.fates))
    qk = t.matching(c.key('attention_config.qk_norm_config.*'))
    if qk or t.get(c.key('attention_config.use_qk_norm'), False) is True:
        t.set('model.attention.qk_norm', 'head', *qk, c.key('attention_config.use_qk_norm'))


def mesh(t: Translation, components: Sequence[Component]) -> dict[str, int | str]:
    """Sets the mesh and the dtypes of the model's wrapper. Returns the axes; those not given are 1 or auto."""
    axes: dict[str, int | str] = {'r': 1, 'd': 'auto', 'c': 1, 't': 1, 'p': 1}
    for c in components:
        if c.kind == 'device_mesh':
            for name, axis in TABLES['mesh'].items():
                if c.has(name):
                    size = c.integer(name)
                    axes[axis] = 'auto' if size == -1 else size
                    t.set(f'mesh.{axis}', axes[axis], c.key(name))
            t.not_needed('JAX finds the devices', *t.matching(c.key('device_type'), c.key('world_size')))
            t.not_needed('losses of vocabularies are always sharded', *t.matching(c.key('enable_loss_parallel')))
        elif c.kind == 'model' and c.has('sharding_strategy'):
            strategy = c.text('sharding_strategy')
            if strategy == 'NO_SHARD':
                axes |= {'r': 'auto', 'd': 1}
            t.set('mesh.r', axes['r'], c.key('sharding_strategy'))
            t.set('mesh.d', axes['d'], c.key('sharding_strategy'))
            if strategy in ('HYBRID_SHARD', '_HYBRID_SHARD_ZERO2'):
                t.changed(
                    'mesh.r copies of mesh.d shards: write mesh.r as the number of nodes', c.key('sharding_strategy')
                )
            elif strategy == 'SHARD_GRAD_OP':
                t.changed('weights are gathered again in the backward pass', c.key('sharding_strategy'))
        if c.kind == 'model' and c.variant in MODEL_WRAPPERS:
            _wrapper(c)
    for axis in 'ctp':
        if axes[axis] == 'auto':
            raise UserError(f'{t.file}: the axis {axis} of the device mesh is -1; expected a number')
    return axes


def _wrapper(c: Component) -> None:
    t = c.t
    for name, target in (('mixed_precision_settings', 'compute'), ('mixed_precision_settings.param_dtype', 'compute')):
        if c.has(name):
            dtype = c.text(name)
            if dtype not in _DTYPES:
                raise t.mistake(c.key(name), dtype, 'one of ' + ', '.join(_DTYPES))
            t.set(f'precision.{target}', _DTYPES[dtype], c.key(name))
    if c.has('mixed_precision_settings.reduce_dtype'):
        t.changed(
            'gradients are summed in f32; precision.reduction: bf16_r_d sums them over mesh.r and mesh.d in bf16',
            c.key('mixed_precision_settings.reduce_dtype'),
        )
    if c.variant == 'activation_checkpointed' or c.has('activation_checkpointing_modules'):
        t.set(
            'model.save',
            'none',
            *t.matching(c.key('activation_checkpointing_modules'), c.key('ac_variant'), c.key('layers_fqn')),
        )
        if c.text('ac_variant', 'full_activation_checkpointing') != 'full_activation_checkpointing':
            t.changed(
                'every activation is recomputed; model.save can keep some (docs/numerics.md#activations)',
                c.key('ac_variant'),
            )
        t.no_equivalent('model.save names the activations to keep', *t.matching(c.key('ac_fun_params*')))


def initial_weights(t: Translation, components: Sequence[Component]) -> None:
    """How weights are drawn."""
    for c in components:
        if c.kind != 'model_initialization':
            continue
        kind = c.text('weight_init_type', 'plain')
        t.set('model.init.kind', 'normal' if kind == 'plain' else 'scaled', c.key('weight_init_type'))
        if kind == 'scaled_embed':
            t.changed('the embedding is drawn with init_std too, not with sqrt(0.4)', c.key('weight_init_type'))
        if isinstance(t.given.get(c.key('std')), int | float):
            t.set('model.init.std', c.number('std'), c.key('std'))
        elif c.has('std'):
            t.no_equivalent('write model.init.std as a number; the default is 0.02', c.key('std'))
        if c.number('mean', 0):
            t.no_equivalent('weights are drawn around 0', c.key('mean'))
        t.not_needed('they follow from the model', *t.matching(c.key('*')))


def optimizer(t: Translation, components: Sequence[Component]) -> None:
    """AdamW; weights that do not decay are named by pattern."""
    found = [c for c in components if c.kind == 'optimizer' and c.has('lr')]
    if len(found) != 1:
        raise UserError(f'{t.file} has {len(found)} optimizers with lr; expected one')
    c = found[0]
    if c.variant not in ('adam_w', 'adam'):
        raise t.mistake(f'{c.path}.variant_key', c.variant, 'adam_w or adam')
    t.set('optimizer.name', 'adamw', f'{c.path}.variant_key')
    t.set('optimizer.learning_rate', c.number('lr'), c.key('lr'))
    betas = t.given.get(c.key('betas'), [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2:
        raise t.mistake(c.key('betas'), betas, 'two numbers, such as [0.9, 0.95]')
    for target, beta in zip(('b1', 'b2'), betas, strict=True):
        t.set(f'optimizer.{target}', beta, c.key('betas'), note='' if c.has('betas') else "PyTorch's default")
    t.set('optimizer.eps', c.number('eps', 1e-8), c.key('eps'))
    decay = c.number('weight_decay', 0.01 if c.variant == 'adam_w' else 0)
    t.set('optimizer.weight_decay', decay, c.key('weight_decay'))
    if c.variant == 'adam' and decay:
        t.changed('decoupled from the gradient, as in AdamW', c.key('weight_decay'))
    groups = t.given.get(c.key('weight_decay_groups_excluded'), [])
    if not isinstance(groups, list) or set(map(str, groups)) - _NO_DECAY.keys():
        raise t.mistake(c.key('weight_decay_groups_excluded'), groups, 'a list of ' + ', '.join(_NO_DECAY))
    patterns = [pattern for group in groups for pattern in _NO_DECAY[group]]
    if t.values.get('model.positions') != 'learned':
        patterns = [pattern for pattern in patterns if pattern != 'positions*']
    t.set('optimizer.no_decay', patterns, c.key('weight_decay_groups_excluded'))
    t.not_needed('updates are compiled', *t.matching(c.key('foreach'), c.key('fused')))


def schedule(t: Translation, components: Sequence[Component], steps: int) -> None:
    """The learning-rate schedule; schedules with rates of their own replace that of the optimizer."""
    c = next((c for c in components if c.kind in ('scheduler', 'lr_scheduler')), None)
    if c is None or c.variant == 'dummy_lr':
        t.set('schedule.name', 'constant', *([f'{c.path}.variant_key'] if c else []), note='there is no scheduler')
        return
    rate = t.values['optimizer.learning_rate']
    variant = f'{c.path}.variant_key'
    if c.variant == 'onecycle_lr':
        peak = c.number('max_lr')
        kind = 'linear' if c.text('anneal_strategy', 'cos') == 'linear' else 'cosine'
        t.set('optimizer.learning_rate', peak, c.key('max_lr'))
        t.set('schedule.name', kind, variant, c.key('anneal_strategy'))
        start = c.number('pct_start', 0.3)
        t.set('schedule.warmup', round(start * steps), c.key('pct_start'), note=f'pct_start x {steps} steps')
        divided = c.number('div_factor', 25) * c.number('final_div_factor', 1e4)
        t.set(
            'schedule.final',
            round(1 / divided, 9),
            c.key('final_div_factor'),
            c.key('div_factor'),
            note='1 / (div_factor x final_div_factor)',
        )
        momenta = [c.key(name) for name in ('cycle_momentum', 'base_momentum', 'max_momentum')]
        cycled = (
            '; beta1 stays, which PyTorch moves from 0.95 to 0.85 and back' if t.get(momenta[0], True) is True else ''
        )
        t.changed(
            f'the warm-up is a straight line from 0, not a cosine from max_lr / div_factor{cycled}',
            variant,
            c.key('div_factor'),
            *momenta,
        )
        t.not_needed(
            'the cycle ends with the run', *(c.key(name) for name in ('total_steps', 'epochs', 'steps_per_epoch'))
        )
        t.no_equivalent(
            'the schedule has two parts', *(key for key in t.matching(c.key('three_phase')) if t.get(key) is True)
        )
        t.not_needed('the schedule has two parts', *t.matching(c.key('three_phase')))
        for key in t.matching('*optimizer*.config.lr'):
            t.changed('onecycle_lr replaces it with max_lr', key)
        if 'optimizer.config.lr' in t.given:
            t.changed('onecycle_lr replaces it with max_lr', 'optimizer.config.lr')
    elif c.variant == 'step_lr':
        t.set('schedule.name', 'step', variant)
        t.set('schedule.every', c.integer('step_size'), c.key('step_size'))
        t.set('schedule.factor', c.number('gamma', 0.1), c.key('gamma'))
    elif c.variant in ('cosine_annealing_lr', 'linear_warmup_cosine_annealing_lr'):
        t.set('schedule.name', 'cosine', variant)
        final = c.number('eta_min', 0) if c.has('eta_min') else c.number('final_lr', 0)
        if c.has('max_lr'):
            rate = c.number('max_lr')
            t.set('optimizer.learning_rate', rate, c.key('max_lr'))
        t.set('schedule.warmup', c.integer('warmup_steps', 0), c.key('warmup_steps'))
        t.set('schedule.final', round(final / rate, 9) if rate else 0.0, c.key('eta_min'), c.key('final_lr'))
        t.changed('the warm-up starts at 0', c.key('initial_lr'))
        t.changed('the cosine ends with the run', c.key('t_max'), c.key('total_steps'))
    elif c.variant in ('constant_lr', 'linear_lr'):
        end = c.integer('total_iters', 5)
        first, last = ('factor', '') if c.variant == 'constant_lr' else ('start_factor', 'end_factor')
        points = [[0, c.number(first, 1 / 3)], [end, c.number(last, 1.0) if last else 1.0]]
        t.set('schedule.name', 'piecewise', variant)
        if last:
            t.set('schedule.between', 'linear', variant)
        keys = [c.key(name) for name in (first, last, 'total_iters') if name]
        t.set('schedule.points', points, *keys, note='[step, part of the rate]')
    else:
        t.set('schedule.name', 'constant', note='TO DO: choose a schedule (docs/configuration.md)')
        t.no_equivalent('write it as a schedule of docs/configuration.md', variant, *t.matching(c.key('*')))
    t.not_needed('a run resumes by itself', *t.matching(c.key('last_epoch')))


def clipping(t: Translation, components: Sequence[Component]) -> None:
    """Gradients are clipped by their global norm, or not at all."""
    c = next((c for c in components if c.kind == 'gradient_clipper'), None)
    if c is None or not c.has('max_norm') or 'dummy' in c.variant:
        t.set('optimizer.clip_norm', None, *([f'{c.path}.variant_key'] if c else []), note='gradients are not clipped')
        return
    t.set('optimizer.clip_norm', c.number('max_norm'), c.key('max_norm'))
    if c.text('norm_type', 'P2_NORM') == 'P2_NORM':
        t.not_needed('it is the global L2 norm', c.key('norm_type'))
    else:
        t.changed('the global L2 norm is clipped', c.key('norm_type'))


def checkpoints(t: Translation, components: Sequence[Component]) -> None:
    """Intervals, and how many checkpoints are kept."""
    intervals = 'settings.intervals'
    for target, name in (
        ('log.every', 'training_log'),
        ('checkpoint.every', 'checkpointing'),
        ('eval.every', 'evaluation'),
    ):
        key = f'{intervals}.{name}_interval_in_steps'
        if key in t.given and target not in t.values:
            t.set(target, t.integer(key), key)
    for c in components:
        if c.kind == 'checkpoint_saving_strategy' and c.has('k'):
            if c.integer('k') == -1:
                t.set(
                    'checkpoint.keep_every', t.values.get('checkpoint.every', 1), c.key('k'), note='k: -1, all are kept'
                )
            else:
                t.set('checkpoint.keep', max(c.integer('k'), 1), c.key('k'))
        elif c.kind == 'checkpoint_saving_strategy' and c.has('every_k'):
            t.set('checkpoint.keep_every', c.integer('every_k'), c.key('every_k'))
        elif c.kind == 'checkpoint_saving_execution':
            t.changed(
                f'checkpoints are in runs/{t.values["name"]}; set run_dir for another place', c.key('checkpoint_path')
            )
            t.not_needed('the run directory has one writer', *t.matching(c.key('*')))


def trackers(t: Translation, components: Sequence[Component]) -> None:
    """W&B, if the results go there."""
    for c in components:
        if c.kind == 'results_subscriber' and c.variant == 'wandb':
            t.set(
                'log.wandb', c.text('project', 'modalities') or 'modalities', f'{c.path}.variant_key', c.key('project')
            )
            t.changed(
                'set WANDB_MODE=offline in the environment',
                *(k for k in (c.key('mode'),) if t.given.get(k) == 'OFFLINE'),
            )
            t.not_needed('W&B reads its own environment variables', *t.matching(c.key('*')))
