"""Every key that may change the compiled step changes the prediction, or has a reason here why it does not."""

from collections.abc import Iterator
from typing import Any

import pytest

from pretrax.config import effect_of, from_values, registry
from pretrax.config.problems import known_keys
from pretrax.config.schema import RunConfig
from pretrax.cost.topology import parse_topology
from pretrax.model.choices import TransformerOptions
from pretrax.plan.plan import Planner

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
    'model.multi_token.n_layers': ([], ['model.multi_token.n_layers=1']),
}  # fmt: skip
# {reason: keys that may change the step, but not the prediction}
REASONS = {
    'a number in the program': """
        seed steps optimizer.learning_rate optimizer.weight_decay precision.loss_scale precision.loss_scale_steps
        optimizer.b1 optimizer.b2 optimizer.eps optimizer.decay_rate optimizer.clip optimizer.rms optimizer.nesterov
        optimizer.polynomials schedule.name schedule.options distill.temperature distill.weight distill.hidden.weight
        model.norm.eps model.norm.offset model.block.residual_multiplier model.attention.query_pre_attn_scalar
        model.attention.temperature model.attention.temperature_length model.rope.base model.rope.local_base
        model.rope.scaling.kind model.rope.scaling.factor model.rope.scaling.original_length
        model.rope.scaling.low_freq_factor model.rope.scaling.high_freq_factor model.rope.scaling.beta_fast
        model.rope.scaling.beta_slow model.rope.scaling.truncate model.rope.scaling.mscale
        model.rope.scaling.mscale_all_dim model.rope.scaling.short_factor model.rope.scaling.long_factor
        model.rope.scaling.fraction model.rope.scaling.attention_factor model.rope.fraction
        model.feed_forward.swiglu_limit model.embedding.scale model.embedding.multiplier model.head.multiplier
        model.experts.router.bias_rate model.experts.router.scale model.experts.router.balance_loss
        model.experts.router.z_loss model.multi_token.loss model.z_loss model.mup.base_width model.mup.base_layers
        model.mup.depth_power model.mup.base_d_head model.mup.independent_decay model.rope.nope_every
        model.rope.nope_global model.init.kind model.init.std
    """,
    'fused into a pass over the weights that is counted': """
        optimizer.cautious_decay optimizer.clip_norm optimizer.groups optimizer.no_decay faults.spike
    """,
    'a vector or a function of single values, fused into a pass over the activations that is counted': """
        model.bias model.norm.kind model.norm.bias model.block.shared_norm model.block.layer_scale
        model.attention.qkv_bias model.attention.o_bias model.attention.sinks model.attention.softcap
        model.attention.v_norm model.recurrent.conv_width model.recurrent.conv_bias model.feed_forward.bias
        model.head.softcap model.head.bias model.positions model.experts.router.scores model.experts.router.bias
        model.experts.router.n_groups model.experts.router.groups_per_token model.experts.router.group_scores
        model.experts.router.normalize model.experts.router.weigh_inputs model.experts.router.balance_over
    """,
    'chooses values for keys that are listed': 'model.preset model.family optimizer.options',
    'not modelled: random numbers': 'model.dropout model.block.dropout model.attention.dropout model.embedding.dropout',
    'not modelled': """
        optimizer.qk_clip compiler.options plugins distill.cache distill.chunks distill.direction model.attention.kernel
        model.experts.capacity model.block.parallel
    """,
    'modelled, and tested in test_roofline, test_memory or test_teacher': """
        distill.teacher distill.hidden.layers model.pipeline.schedule model.attention.context
        model.attention.window_type model.attention.global_every model.attention.global_d_head
        model.attention.global_n_kv_heads model.attention.global_k_as_v model.attention.qk_norm model.layer_types
        model.recurrent.n_heads model.recurrent.n_key_heads model.recurrent.d_head model.recurrent.d_key
        model.max_sequence_length model.experts.dense_layers model.experts.every model.experts.d_ff_dense
        model.experts.shared_gate
    """,
}


def step_keys() -> Iterator[str]:
    """Every key, without sections, that may change the compiled step."""
    every = [key for key in known_keys(RunConfig) if effect_of(key).on == 'step' and not key.startswith('model.')]
    every += [f'model.{key}' for key in known_keys(TransformerOptions)]
    for name in registry.names('optimizer'):
        every += [f'optimizer.{option}' for option in registry.options_model('optimizer', name).model_fields]
    sections = {key.rpartition('.')[0] for key in every}
    sections |= {section.rpartition('.')[0] for section in sections}
    return (key for key in every if key not in sections)


def predictions(*overrides: str) -> Any:
    config = from_values(BASE, {one.partition('=')[0]: one for one in overrides}.values())
    planned = Planner(config, parse_topology('h100x8'), lambda text: None).as_configured()
    return planned.memory, planned.prediction


def test_every_key_of_the_step_is_predicted_or_has_a_reason():
    reasons = [key for keys in REASONS.values() for key in keys.split()]
    assert len(reasons) == len(set(reasons))
    assert not set(reasons) & set(CHANGES)
    assert set(step_keys()) == set(reasons) | set(CHANGES)


@pytest.mark.parametrize('key', CHANGES)
def test_the_key_changes_the_prediction(key):
    base, change = CHANGES[key]
    assert predictions(*base, *change) != predictions(*base)
