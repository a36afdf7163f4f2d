"""What plan/keys.yaml says of every key that may change the compiled step is true of predictions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrax.config import effect_of, from_values, registry
from pretrax.config.problems import known_keys
from pretrax.config.schema import RunConfig
from pretrax.cost.topology import parse_topology
from pretrax.model.choices import TransformerOptions
from pretrax.plan.keys import keys_left_out, treatments
from pretrax.plan.plan import Planner, make_plan, report

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
    'precision.compute': ([], ['precision.compute=f32']),
    'precision.exempt': (['precision.matmul=fp8'], ["precision.exempt=['head']"]),
    'precision.matmul': ([], ['precision.matmul=fp8']),
    'precision.reduction': ([], ['precision.reduction=bf16_r_d']),
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
}  # fmt: skip
# {key: a base whose step has the key, and another value}
LEFT_OUT: dict[str, tuple[list[str], str]] = {
    'model.block.dropout': ([], 'model.dropout=0.1'),
    'model.attention.dropout': ([], 'model.attention.dropout=0.1'),
    'model.embedding.dropout': ([], 'model.embedding.dropout=0.1'),
    'model.attention.kernel': ([], 'model.attention.kernel=blockwise'),
    'model.attention.softcap': ([], 'model.attention.softcap=50.0'),
    'model.attention.sinks': ([], 'model.attention.sinks=true'),
    'model.experts.capacity': (EXPERTS, 'model.experts.capacity=1.5'),
    'model.block.parallel': ([], 'model.family=gpt-neox'),
    'distill.cache': ([], 'distill.cache=teacher'),
    'compiler.options': ([], 'compiler.options.xla_gpu_enable_triton_gemm=false'),
}  # fmt: skip


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
    config = from_values(BASE, {one.partition('=')[0]: one for one in overrides}.values())
    planned = Planner(config, parse_topology('h100x8'), lambda text: None).as_configured()
    return planned.memory, planned.prediction


def configured(*overrides: str) -> RunConfig:
    return from_values(BASE, overrides)


def test_every_key_of_the_step_has_one_treatment():
    listed = [key for keys in treatments().values() for key in keys]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(step_keys())
    assert set(CHANGES) == set(treatments()['modelled'])
    assert {*LEFT_OUT, 'plugins'} == set(treatments()['left_out'])


@pytest.mark.parametrize('key', CHANGES)
def test_a_modelled_key_changes_the_prediction(key):
    base, change = CHANGES[key]
    assert predictions(*base, *change) != predictions(*base)


@pytest.mark.parametrize('key', LEFT_OUT)
def test_a_key_is_named_if_it_is_set_and_left_out(key):
    base, change = LEFT_OUT[key]
    assert key in keys_left_out(configured(*base, change))
    assert keys_left_out(configured(*base)) == []


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
