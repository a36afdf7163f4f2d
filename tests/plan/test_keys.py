"""What plan/keys.yaml says of every key that may change the compiled step is true of predictions and programs."""

import functools
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from pretrax.config import effect_of, from_values, registry
from pretrax.config.problems import known_keys
from pretrax.config.schema import RunConfig
from pretrax.cost.topology import parse_topology
from pretrax.model.choices import TransformerOptions
from pretrax.plan.keys import keys_left_out, treatments
from pretrax.plan.plan import Planner, make_plan, report
from pretrax.run.compiled_step import lower_step
from pretrax.run.setup import prepare

BASE = {
    'name': 'keys',
    'steps': 3,
    'model': {'n_layers': 4, 'd_model': 256, 'attention': {'n_heads': 4}, 'feed_forward': {'d_ff': 512}},
    'data': {'name': 'synthetic', 'vocab_size': 512},
    'batch': {'tokens': 2**15, 'sequence_length': 512},
    'optimizer': {'learning_rate': 1e-3},
    'schedule': {'name': 'constant'},
    'mesh': {'d': 8},
}
EXPERTS = ['model.experts.n_experts=4', 'model.experts.experts_per_token=2']
LATENT = [f'model.attention.latent.{key}' for key in ('kv_rank=64', 'q_rank=64', 'd_nope=32', 'd_rope=16')]
DENSE_FIRST = [*EXPERTS, 'model.experts.dense_layers=1', 'model.experts.d_ff_dense=512']
WINDOWS = ['model.attention.window=128', 'model.attention.global_every=2']
OWN_HEADS = [*WINDOWS, 'model.attention.global_d_head=128', 'model.attention.global_n_kv_heads=2']
DELTA = ['model.layer_types=[delta, full]']
CHUNKS = ['model.pipeline.schedule=interleaved', 'mesh.p=2', 'mesh.d=4']
TEACHERS = Path(__file__).parents[2] / 'benchmarks' / 'teachers'
TAUGHT = [f'distill.teacher=hf:{TEACHERS / "3b"}', 'data.vocab_size=32000']
MUON, SOAP = ['optimizer.name=muon'], ['optimizer.name=soap']

# {key: (arguments of a base, arguments that change the key)}
CHANGES: dict[str, tuple[list[str], list[str]]] = {
    'batch.micro': ([], ['batch.micro=2']),
    'batch.sequence_length': ([], ['batch.sequence_length=1024']),
    'batch.tokens': ([], ['batch.tokens=65536']),
    'memory.offload': ([], ['memory.offload=[optimizer]']),
    'mesh.c': ([], ['mesh.c=2', 'mesh.d=4']),
    'mesh.d': ([], ['mesh.r=2', 'mesh.d=4']),
    'mesh.e': (EXPERTS, ['mesh.e=2', 'mesh.d=4']),
    'mesh.p': ([], ['mesh.p=2', 'mesh.d=4']),
    'mesh.r': ([], ['mesh.r=2', 'mesh.d=4']),
    'mesh.t': ([], ['mesh.t=2', 'mesh.d=4']),
    'optimizer.ema_decay': ([], ['optimizer.ema_decay=0.99']),
    'optimizer.freeze': ([], ["optimizer.freeze=['layers.up']"]),
    'optimizer.name': ([], ['optimizer.name=lion']),
    'optimizer.iterations': (MUON, ['optimizer.iterations=3']),
    'optimizer.precision': (MUON, ['optimizer.precision=bf16']),
    'optimizer.neuron_b2': (MUON, ['optimizer.neuron_b2=0.9']),
    'optimizer.precondition_frequency': (SOAP, ['optimizer.precondition_frequency=2']),
    'optimizer.max_precond_dim': (SOAP, ['optimizer.max_precond_dim=300']),
    'optimizer.qk_clip': (MUON, ['optimizer.qk_clip=100.0']),
    'optimizer.momentum': (['optimizer.name=sgd'], ['optimizer.momentum=0.9']),
    'precision.compute': (['precision.compute=bf16'], ['precision.compute=f32']),
    'precision.exempt': (['precision.matmul=fp8'], ["precision.exempt=['head']"]),
    'precision.matmul': ([], ['precision.matmul=fp8']),
    'precision.reduction': (['mesh.r=2', 'mesh.d=4'], ['precision.reduction=bf16']),
    'model.save': ([], ['model.save=none']),
    'model.layers': ([], ['model.layers=unroll']),
    'model.loss_chunks': ([], ['model.loss_chunks=4']),
    'model.batch_parts': (['mesh.t=2', 'mesh.d=4'], ['model.batch_parts=2']),
    'model.pipeline.rounds': (['mesh.p=2', 'mesh.d=4'], ['model.pipeline.rounds=2']),
    'model.n_layers': ([], ['model.n_layers=6']),
    'model.d_model': ([], ['model.d_model=512']),
    'model.vocab_size': ([], ['model.vocab_size=1024']),
    'model.attention.n_heads': ([], ['model.attention.n_heads=8', 'model.attention.d_head=64']),
    'model.attention.n_kv_heads': ([], ['model.attention.n_kv_heads=2']),
    'model.attention.d_head': ([], ['model.attention.d_head=32']),
    'model.attention.window': ([], ['model.attention.window=128']),
    'model.attention.gate': ([], ['model.attention.gate=true']),
    'model.attention.latent.kv_rank': (LATENT, ['model.attention.latent.kv_rank=128']),
    'model.attention.latent.q_rank': (LATENT, ['model.attention.latent.q_rank=128']),
    'model.attention.latent.d_nope': (LATENT, ['model.attention.latent.d_nope=64']),
    'model.attention.latent.d_rope': (LATENT, ['model.attention.latent.d_rope=32']),
    'model.feed_forward.d_ff': ([], ['model.feed_forward.d_ff=1024']),
    'model.feed_forward.activation': ([], ['model.feed_forward.activation=gelu']),
    'model.block.norms': ([], ['model.block.norms=sandwich']),
    'model.embedding.tied': ([], ['model.embedding.tied=true']),
    'model.experts.n_experts': (EXPERTS, ['model.experts.n_experts=8']),
    'model.experts.experts_per_token': (EXPERTS, ['model.experts.experts_per_token=1']),
    'model.experts.d_shared': (EXPERTS, ['model.experts.d_shared=128']),
    'model.experts.shared_gate': ([*EXPERTS, 'model.experts.d_shared=128'], ['model.experts.shared_gate=true']),
    'model.experts.dense_layers': (EXPERTS, ['model.experts.dense_layers=1']),
    'model.experts.every': (EXPERTS, ['model.experts.every=2']),
    'model.experts.d_ff_dense': (DENSE_FIRST, ['model.experts.d_ff_dense=1024']),
    'model.experts.capacity': (EXPERTS, ['model.experts.capacity=1.5']),
    'model.attention.window_type': (['model.attention.window=128'], ['model.attention.window_type=chunked']),
    'model.attention.global_every': (WINDOWS, ['model.attention.global_every=4']),
    'model.attention.global_d_head': (OWN_HEADS, ['model.attention.global_d_head=64']),
    'model.attention.global_n_kv_heads': (OWN_HEADS, ['model.attention.global_n_kv_heads=1']),
    'model.attention.global_k_as_v': (OWN_HEADS, ['model.attention.global_k_as_v=true']),
    'model.attention.qk_norm': ([], ['model.attention.qk_norm=head']),
    'model.attention.context': (['mesh.c=2', 'mesh.d=4'], ['model.attention.context=ring']),
    'model.layer_types': ([], DELTA),
    'model.recurrent.n_heads': (DELTA, ['model.recurrent.n_heads=8']),
    'model.recurrent.n_key_heads': (DELTA, ['model.recurrent.n_key_heads=2']),
    'model.recurrent.d_head': (DELTA, ['model.recurrent.d_head=32']),
    'model.recurrent.d_key': (DELTA, ['model.recurrent.d_key=32']),
    'model.max_sequence_length': (['model.positions=learned'], ['model.max_sequence_length=2048']),
    'model.pipeline.schedule': (CHUNKS, ['model.pipeline.schedule=1f1b']),
    'distill.teacher': (TAUGHT[1:], TAUGHT[:1]),
    'distill.hidden.layers': (TAUGHT, ['distill.hidden.layers=[[1, 1]]']),
    'distill.chunks': (TAUGHT, ['distill.chunks=1']),
    'model.multi_token.n_layers': ([], ['model.multi_token.n_layers=1']),
    'model.bias': ([], ['model.bias=true']),
    'model.norm.bias': (['model.norm.kind=layernorm'], ['model.norm.bias=true']),
    'model.block.shared_norm': (['model.block.parallel=true'], ['model.block.shared_norm=true']),
    'model.block.layer_scale': ([], ['model.block.layer_scale=true']),
    'model.attention.qkv_bias': ([], ['model.attention.qkv_bias=true']),
    'model.attention.o_bias': ([], ['model.attention.o_bias=true']),
    'model.recurrent.conv_width': (DELTA, ['model.recurrent.conv_width=8']),
    'model.recurrent.conv_bias': (DELTA, ['model.recurrent.conv_bias=true']),
    'model.feed_forward.bias': ([], ['model.feed_forward.bias=true']),
    'model.head.bias': ([], ['model.head.bias=true']),
    'model.positions': ([], ['model.positions=learned']),
    'model.experts.router.bias': (EXPERTS, ['model.experts.router.bias=true']),
}  # fmt: skip
MEMORY_ONLY = {'model.layers'}  # the plan prints that unrolled layers are faster
# {key: a base whose step has the key, and another value}
LEFT_OUT: dict[str, tuple[list[str], str]] = {
    'model.block.dropout': ([], 'model.block.dropout=0.1'),
    'model.attention.dropout': ([], 'model.attention.dropout=0.1'),
    'model.embedding.dropout': ([], 'model.embedding.dropout=0.1'),
    'model.attention.kernel': ([], 'model.attention.kernel=blockwise'),
    'model.attention.softcap': ([], 'model.attention.softcap=50.0'),
    'model.attention.sinks': ([], 'model.attention.sinks=true'),
    'model.block.parallel': ([], 'model.block.parallel=true'),
    'distill.cache': ([], 'distill.cache=teacher'),
    'compiler.options': ([], 'compiler.options.xla_gpu_enable_triton_gemm=false'),
}  # fmt: skip
GROUPS = ['model.experts.n_experts=8', 'model.experts.experts_per_token=2', 'model.experts.router.n_groups=4']
DECAY = ['optimizer.weight_decay=0.1']
# {key: a base whose step has the key, and another value}
FREE: dict[str, tuple[list[str], str]] = {
    'precision.compute=fp16': (['precision.compute=bf16'], 'precision.compute=fp16'),
    'optimizer.nesterov': (['optimizer.name=sgd', 'optimizer.momentum=0.9'], 'optimizer.nesterov=true'),
    'optimizer.cautious_decay': (DECAY, 'optimizer.cautious_decay=true'),
    'faults.spike': ([], 'faults.spike=5.0'),
    'distill.direction': (TAUGHT, 'distill.direction=reverse'),
    'model.norm.kind': ([], 'model.norm.kind=layernorm'),
    'model.norm.offset': ([], 'model.norm.offset=1.0'),
    'model.attention.v_norm': ([], 'model.attention.v_norm=true'),
    'model.attention.qk_norm=l2': ([], 'model.attention.qk_norm=l2'),
    'model.attention.temperature': (['model.rope.nope_every=2'], 'model.attention.temperature=0.1'),
    'model.rope.scaling.kind': ([], 'model.rope.scaling.kind=yarn'),
    'model.rope.fraction': ([], 'model.rope.fraction=0.5'),
    'model.rope.nope_every': ([], 'model.rope.nope_every=2'),
    'model.rope.nope_global': (WINDOWS, 'model.rope.nope_global=true'),
    'model.block.norms=post': ([], 'model.block.norms=post'),
    'model.feed_forward.activation=swiglu_oai': ([], 'model.feed_forward.activation=swiglu_oai'),
    'model.feed_forward.activation=geglu': ([], 'model.feed_forward.activation=geglu'),
    'model.embedding.scale': ([], 'model.embedding.scale=true'),
    'model.embedding.multiplier': ([], 'model.embedding.multiplier=2.0'),
    'model.head.softcap': ([], 'model.head.softcap=30.0'),
    'model.z_loss': ([], 'model.z_loss=0.0001'),
    'model.experts.router.scores': (EXPERTS, 'model.experts.router.scores=sigmoid'),
    'model.experts.router.n_groups': (EXPERTS, 'model.experts.router.n_groups=2'),
    'model.experts.router.groups_per_token': (GROUPS, 'model.experts.router.groups_per_token=2'),
    'model.experts.router.group_scores': (GROUPS, 'model.experts.router.group_scores=top2'),
    'model.experts.router.normalize': (EXPERTS, 'model.experts.router.normalize=false'),
    'model.experts.router.weigh_inputs': (EXPERTS, 'model.experts.router.weigh_inputs=true'),
    'model.experts.router.balance_over': (EXPERTS, 'model.experts.router.balance_over=batch'),
    'model.experts.router.z_loss': (EXPERTS, 'model.experts.router.z_loss=0.1'),
}  # fmt: skip

MANY = [
    'schedule.name=cosine', *DECAY, 'precision.compute=fp16', *WINDOWS, 'model.rope.nope_every=4',
    'model.rope.local_base=500.0', 'model.attention.temperature=0.1', 'model.multi_token.n_layers=1',
    'model.head.multiplier=1.5',
    *(f'model.rope.scaling.{key}' for key in ('kind=yarn', 'factor=4.0', 'original_length=256')),
]  # fmt: skip
YARN = [f'model.rope.scaling.{key}' for key in ('kind=yarn', 'factor=4.0', 'mscale=1.0', 'mscale_all_dim=0.5')]
LLAMA3 = ['model.rope.scaling.kind=llama3', 'model.rope.scaling.factor=4.0', 'model.rope.scaling.original_length=256']
LONGROPE = [
    'model.rope.scaling.kind=longrope', 'model.rope.scaling.factor=4.0', 'model.rope.scaling.original_length=1024',
    *(f'model.rope.scaling.{key}_factor={[1.5] * 32}' for key in ('short', 'long')),
]  # fmt: skip
LONG = [LONGROPE[0], LONGROPE[1], 'model.rope.scaling.original_length=256', *LONGROPE[3:]]
ADAFACTOR = ['optimizer.name=adafactor']
ROUTED = [*EXPERTS, 'model.experts.router.bias=true', 'model.feed_forward.activation=swiglu_oai']
MUP = [*DECAY, 'model.mup.base_width=128', 'model.mup.base_layers=2', 'model.mup.depth_power=0.75']
TAUGHT_STATES = [*TAUGHT, 'distill.hidden.layers=[[1, 1]]']
# {key: a base whose step has the key, and another value}
NO_EFFECT: dict[str, tuple[list[str], str]] = {
    'seed': (MANY, 'seed=1'),
    'steps': (MANY, 'steps=5'),
    'optimizer.learning_rate': (MANY, 'optimizer.learning_rate=0.002'),
    'optimizer.weight_decay': (MANY, 'optimizer.weight_decay=0.2'),
    'optimizer.b1': (MANY, 'optimizer.b1=0.8'),
    'optimizer.b2': (MANY, 'optimizer.b2=0.9'),
    'optimizer.eps': (MANY, 'optimizer.eps=0.000001'),
    'optimizer.clip_norm': (MANY, 'optimizer.clip_norm=null'),
    'optimizer.groups': (MANY, 'optimizer.groups=[{match: "*", learning_rate_scale: 0.5}]'),
    'optimizer.no_decay': (MANY, 'optimizer.no_decay=[]'),
    'precision.loss_scale': (MANY, 'precision.loss_scale=1024.0'),
    'precision.loss_scale_steps': (MANY, 'precision.loss_scale_steps=100'),
    'schedule.name': ([], 'schedule.name=cosine'),
    'schedule.options': (MANY, 'schedule.final=0.2'),
    'model.norm.eps': (MANY, 'model.norm.eps=0.001'),
    'model.block.residual_multiplier': (MANY, 'model.block.residual_multiplier=0.5'),
    'model.attention.query_pre_attn_scalar': (MANY, 'model.attention.query_pre_attn_scalar=100.0'),
    'model.attention.temperature_length': (MANY, 'model.attention.temperature_length=100'),
    'model.rope.base': (MANY, 'model.rope.base=500000.0'),
    'model.rope.local_base': (MANY, 'model.rope.local_base=700.0'),
    'model.rope.scaling.factor': (MANY, 'model.rope.scaling.factor=8.0'),
    'model.rope.scaling.original_length': (MANY, 'model.rope.scaling.original_length=128'),
    'model.rope.scaling.beta_fast': (MANY, 'model.rope.scaling.beta_fast=16.0'),
    'model.rope.scaling.beta_slow': (MANY, 'model.rope.scaling.beta_slow=2.0'),
    'model.rope.scaling.truncate': (MANY, 'model.rope.scaling.truncate=false'),
    'model.rope.scaling.attention_factor': (MANY, 'model.rope.scaling.attention_factor=1.5'),
    'model.rope.scaling.mscale': (YARN, 'model.rope.scaling.mscale=0.8'),
    'model.rope.scaling.mscale_all_dim': (YARN, 'model.rope.scaling.mscale_all_dim=0.7'),
    'model.rope.scaling.low_freq_factor': (LLAMA3, 'model.rope.scaling.low_freq_factor=2.0'),
    'model.rope.scaling.high_freq_factor': (LLAMA3, 'model.rope.scaling.high_freq_factor=8.0'),
    'model.rope.scaling.short_factor': (LONGROPE, f'model.rope.scaling.short_factor={[3.0] * 32}'),
    'model.rope.scaling.long_factor': (LONG, f'model.rope.scaling.long_factor={[3.0] * 32}'),
    'model.rope.scaling.fraction': (['model.rope.scaling.kind=proportional'], 'model.rope.scaling.fraction=0.5'),
    'model.head.multiplier': (MANY, 'model.head.multiplier=2.0'),
    'model.multi_token.loss': (MANY, 'model.multi_token.loss=0.1'),
    'model.init.kind': (MANY, 'model.init.kind=normal'),
    'model.init.std': (MANY, 'model.init.std=0.1'),
    'optimizer.decay_rate': (ADAFACTOR, 'optimizer.decay_rate=0.7'),
    'optimizer.clip': (ADAFACTOR, 'optimizer.clip=2.0'),
    'optimizer.rms': (MUON, 'optimizer.rms=0.3'),
    'optimizer.polynomials': (MUON, 'optimizer.polynomials=polar_express'),
    'model.feed_forward.swiglu_limit': (ROUTED, 'model.feed_forward.swiglu_limit=5.0'),
    'model.experts.router.bias_rate': (ROUTED, 'model.experts.router.bias_rate=0.01'),
    'model.experts.router.scale': (ROUTED, 'model.experts.router.scale=2.0'),
    'model.experts.router.balance_loss': (ROUTED, 'model.experts.router.balance_loss=0.1'),
    'model.mup.base_width': (MUP, 'model.mup.base_width=64'),
    'model.mup.base_layers': (MUP, 'model.mup.base_layers=1'),
    'model.mup.depth_power': (MUP, 'model.mup.depth_power=0.5'),
    'model.mup.base_d_head': (MUP, 'model.mup.base_d_head=32'),
    'model.mup.independent_decay': (MUP, 'model.mup.independent_decay=false'),
    'distill.temperature': (TAUGHT_STATES, 'distill.temperature=2.0'),
    'distill.weight': (TAUGHT_STATES, 'distill.weight=0.3'),
    'distill.hidden.weight': (TAUGHT_STATES, 'distill.hidden.weight=0.3'),
}  # fmt: skip
# Of the keys that choose values for others, those are tested.
CHOOSERS = {'model.preset', 'model.family', 'model.dropout', 'optimizer.options'}
# Chosen for other devices than CPUs, read from a directory, and applied by XLA
NOT_LOWERED = {'model.attention.kernel', 'distill.cache', 'compiler.options'}
FIRST_VALUES = {'seed', 'model.init.kind', 'model.init.std', 'precision.loss_scale'}  # not in the program at all


OPTIMIZERS = registry.names('optimizer')  # before another test registers one of its own


def step_keys() -> Iterator[str]:
    """Every key, without sections, that may change the compiled step."""
    every = [key for key in known_keys(RunConfig) if effect_of(key).on == 'step' and not key.startswith('model.')]
    every += [f'model.{key}' for key in known_keys(TransformerOptions)]
    for name in OPTIMIZERS:
        every += [f'optimizer.{option}' for option in registry.options_model('optimizer', name).model_fields]
    sections = {key.rpartition('.')[0] for key in every}
    sections |= {section.rpartition('.')[0] for section in sections}
    return (key for key in every if key not in sections)


def predictions(*overrides: str) -> Any:
    planned = Planner(configured(*overrides), parse_topology('b200x8'), lambda text: None).as_configured()
    return planned.memory, planned.prediction


def configured(*overrides: str) -> RunConfig:
    """The base with changes, of which the last one of a key counts."""
    return from_values(BASE, {one.partition('=')[0]: one for one in overrides}.values())


@functools.cache
def program(*overrides: str) -> str:
    """The step that JAX lowers for eight CPU devices."""
    run = prepare(configured(*overrides), lambda text: None, jax.devices('cpu'))
    with jax.set_mesh(run.mesh):
        return lower_step(run).as_text()


def operations(text: str) -> list[str]:
    """The operations of a program on arrays, with their shapes, but without values of constants or names of results."""
    lines = re.sub(r'dense(_resource)?<[^>]*>', 'dense', text).splitlines()
    return [re.sub(r'%\w+(:\d+)?(#\d+)?', '%', line) for line in lines if re.search(r'tensor<\d', line)]


def differ(base: Iterable[str], *changes: str) -> bool:
    return operations(program(*base)) != operations(program(*base, *changes))


def alternatives() -> Iterator[tuple[list[str], str]]:
    """Every choice of the keys that are modelled: base, change."""
    for key, (base, _) in CHANGES.items():
        *sections, name = key.removeprefix('model.').split('.')
        fields: Any = TransformerOptions if key.startswith('model.') else RunConfig
        for section in sections:
            annotation = fields.model_fields[section].annotation
            fields = next(one for one in (annotation, *typing.get_args(annotation)) if hasattr(one, 'model_fields'))
        if name in fields.model_fields:  # the options of optimizers have no alternatives but those in CHANGES
            values = literals(fields.model_fields[name].annotation)
            yield from ((base, f'{key}={value}') for value in values if value != 'auto')
    yield from (([], f'optimizer.name={name}') for name in OPTIMIZERS)
    for mixers in ('delta, full', 'mamba, full', 'mamba, delta, full', 'full, window'):
        yield WINDOWS[:1] if 'window' in mixers else [], f'model.layer_types=[{mixers}]'


def literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if typing.get_origin(annotation) in (dict, tuple):
        return []
    return [value for one in typing.get_args(annotation) for value in literals(one)]


def test_every_key_of_the_step_has_one_treatment():
    listed = [key for keys in treatments().values() for key in keys if '=' not in key]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(step_keys())
    assert set(CHANGES) == set(treatments()['modelled'])
    assert {*LEFT_OUT, 'plugins'} == set(treatments()['left_out'])
    assert set(FREE) == set(treatments()['free'])
    assert {*NO_EFFECT, *CHOOSERS} == set(treatments()['no_effect'])


@pytest.mark.parametrize('key', CHANGES)
def test_a_modelled_key_changes_the_prediction(key):
    base, change = CHANGES[key]
    (memory, time), (other_memory, other_time) = predictions(*base), predictions(*base, *change)
    assert time.seconds != other_time.seconds or (key in MEMORY_ONLY and memory != other_memory)


def test_every_choice_of_a_modelled_key_changes_the_prediction_or_is_named():
    found = list(alternatives())
    assert {'model.attention.qk_norm=l2', 'model.save=none', 'precision.matmul=int8', 'optimizer.name=lion'} <= {
        change for _, change in found
    }
    same = [(base, change) for base, change in found if predictions(*base, change) == predictions(*base)]
    assert {change for base, change in same if differ(base, change)} <= set(treatments()['free'])


@pytest.mark.parametrize('key', {**LEFT_OUT, **FREE})
def test_a_key_is_named_if_it_is_set_and_not_modelled(key):
    base, change = {**LEFT_OUT, **FREE}[key]
    assert set(keys_left_out(configured(*base, change))) - set(keys_left_out(configured(*base))) == {key}


@pytest.mark.parametrize('key', FREE)
def test_a_free_key_leaves_the_prediction(key):
    base, change = FREE[key]
    assert predictions(*base, change) == predictions(*base)


@pytest.mark.parametrize('base', {tuple(base): None for base, _ in NO_EFFECT.values()}, ids=lambda base: base[:1])
def test_keys_without_effect_leave_the_operations_of_the_lowered_program(base):
    changes = [change for of, change in NO_EFFECT.values() if tuple(of) == base]
    assert program(*base) != program(*base, *changes)
    guilty = [change for change in changes if differ(base, change)] if differ(base, *changes) else []
    assert guilty == []
    assert not differ(base, *changes)


@pytest.mark.slow
@pytest.mark.parametrize('key', sorted({**LEFT_OUT, **FREE, **NO_EFFECT}.keys() - NOT_LOWERED))
def test_the_lowered_program_of_each_key_is_as_listed(key):
    base, change = {**LEFT_OUT, **FREE, **NO_EFFECT}[key]
    if key in NO_EFFECT:
        assert not differ(base, change)
        assert (program(*base) == program(*base, change)) == (key in FIRST_VALUES)
    else:
        assert differ(base, change)


def test_dropout_everywhere_is_named_by_place():
    places = ['model.block.dropout', 'model.attention.dropout', 'model.embedding.dropout']
    assert keys_left_out(configured('model.dropout=0.1')) == places


def test_a_plugin_is_left_out(tmp_path):
    (tmp_path / 'mine.py').write_text('')
    assert keys_left_out(configured(f'plugins=[{tmp_path}/mine.py]')) == ['plugins']


def test_the_plan_names_what_it_leaves_out_and_why_attention_is_slow():
    hardware = parse_topology('h100x8')
    softcap, plain = (
        report(make_plan(configured(*changes), hardware, lambda text: None))
        for changes in (['model.attention.softcap=50.0', 'model.block.dropout=0.1'], [])
    )
    named = '    set, but not in the prediction: model.block.dropout, model.attention.softcap'
    assert named in softcap
    assert any(line.startswith('    attention: blockwise (SLOW: not cudnn') for line in softcap)
    assert not any('not in the prediction' in line or 'attention: ' in line for line in plain)


def test_removed_compiler_options_are_in_the_prediction():
    hardware = parse_topology('v5p:4x4x4')
    mesh = {'mesh': {'d': 64}}
    chosen = make_plan(from_values(BASE | mesh), hardware, lambda text: None).options
    removed = {'compiler': {'options': {option.name: None for option in chosen}}}
    assert chosen
    assert make_plan(from_values(BASE | mesh | removed), hardware, lambda text: None).left_out == []
    removed['compiler']['options'].popitem()
    assert make_plan(from_values(BASE | mesh | removed), hardware, lambda text: None).left_out == ['compiler.options']
