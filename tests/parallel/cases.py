"""Small models on meshes of simulated devices, compared with one device: what the matrix and the mutations share."""

import dataclasses
import functools
import itertools
import math

import jax
import numpy as np

from pretrax.train import optimizer
from pretrax.train.groups import DEFAULT_NO_DECAY
from pretrax.train.step import Recipe, make_gradients, make_step
from pretrax.train.validation import make_evaluate
from run.test_equivalence import ADAM, fresh_state
from small import mesh_of, random_batch, random_weights, transformer

ROWS, STEPS = 8, 20
RATE = 0.02
# At this rate, a step of training with states multiplies a difference by 2.5, and one with a number for each layer by 2
FEWER_STEPS = {'states': 4, 'global heads': 4}
QUICK = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}

DENSE = {
    'family': 'llama', 'n_layers': 2, 'd_model': 32, 'n_heads': 8, 'n_kv_heads': 4, 'd_head': 4, 'd_ff': 32,
    'window': 7, 'layers': 'scan', 'z_loss': 0.02,
}  # fmt: skip
MIXTURE = DENSE | {
    'd_ff': 16, 'n_experts': 4, 'experts_per_token': 2, 'd_shared': 16, 'balance_loss': 0.3, 'router_z_loss': 0.02,
}  # fmt: skip
PARALLEL_BLOCK = DENSE | {
    'norm': 'layernorm', 'bias': True, 'unembed_bias': True, 'activation': 'gelu_erf', 'qk_norm': 'full',
    'rotary_fraction': 0.5, 'parallel_block': True, 'shared_norm': True, 'embedding_multiplier': 2.0,
    'residual_multiplier': 0.5, 'logit_multiplier': 1.5,
}  # fmt: skip
GLOBAL_HEADS = DENSE | {
    'n_layers': 4, 'global_every': 2, 'attention.global_d_head': 8, 'attention.global_n_kv_heads': 2,
    'attention.global_k_as_v': True, 'attention.v_norm': True, 'block.layer_scale': True, 'qk_norm': 'head',
    'block_norms': 'sandwich', 'local_rope_base': 100.0, 'rope_scaling': {'kind': 'proportional', 'fraction': 0.5},
}  # fmt: skip
STATES = {
    'family': 'mamba2', 'n_layers': 2, 'd_model': 32, 'linear_heads': 8, 'linear_key_heads': 4, 'linear_d_head': 4,
    'linear_d_key': 6, 'layers': 'scan',
}  # fmt: skip
DROPOUT = {'attention_dropout': 0.2, 'residual_dropout': 0.1, 'embedding_dropout': 0.3}
EIGHT = {'n_layers': 8, 'context': 'ring', 'save': 'none'}
MODELS = {
    'dense': DENSE | {'context': 'ring'},
    'dense, all_to_all': DENSE | {'context': 'all_to_all'},
    'dense, 2 parts': DENSE | {'context': 'ring', 'batch_parts': 2},
    'dropout': DENSE | DROPOUT | {'context': 'ring'},
    'parallel block': PARALLEL_BLOCK | {'context': 'ring'},
    'global heads': GLOBAL_HEADS | {'context': 'ring'},
    'experts': MIXTURE | {'context': 'ring'},
    'latent attention': {
        'family': 'deepseek-v3',
        'n_layers': 3,
        'd_model': 32,
        'n_heads': 4,
        'd_head': 8,
        'kv_rank': 16,
        'q_rank': 8,
        'd_rope': 4,
        'd_nope': 6,
        'd_ff': 16,
        'd_ff_dense': 32,
        'd_shared': 16,
        'dense_layers': 1,
        'n_experts': 8,
        'experts_per_token': 2,
        'n_expert_groups': 4,
        'groups_per_token': 2,
        'balance_loss': 0.3,
        'router_bias_rate': 0.0,
        'context': 'ring',
        'layers': 'scan',
    },
    # Two layers: with more, rounding changes a token's experts within the steps on some meshes.
    'chunked attention': MIXTURE
    | {
        'family': 'llama4',
        'window': 5,
        'global_every': 2,
        'nope_every': 2,
        'expert_every': 2,
        'd_ff_dense': 32,
        'attention_temperature': 0.5,
        'temperature_length': 3,
        'context': 'ring',
    },
    'experts, capacity': MIXTURE | {'capacity': 0.75},
    'experts, biases': MIXTURE
    | {
        'context': 'ring',
        'd_shared': 0,
        'bias': True,
        'norm_bias': False,
        'attention_sinks': True,
        'activation': 'swiglu_oai',
        'swiglu_limit': 0.5,
    },
    'experts, mixed': MIXTURE | {'context': 'ring', 'n_layers': 3, 'dense_layers': 1, 'd_ff_dense': 32},
    'states': STATES | {'layer_types': ('mamba', 'delta'), 'd_ff': 32},
    'stages, interleaved': DENSE | EIGHT | {'pipeline_schedule': 'interleaved'},
    'stages, 1f1b': DENSE | EIGHT | {'pipeline_schedule': '1f1b'},
    'stages, 1f1b, 2 rounds': DENSE | EIGHT | {'pipeline_schedule': '1f1b', 'pipeline_rounds': 2},
    'stages, 1f1b, 2 rounds, dropout': DENSE
    | EIGHT
    | DROPOUT
    | {'n_layers': 4, 'pipeline_schedule': '1f1b', 'pipeline_rounds': 2},
    # Two layers: with more, rounding changes a token's experts within the steps on any mesh (as c=2 alone does with 8).
    'stages, experts, 1f1b': MIXTURE | EIGHT | {'n_layers': 2, 'pipeline_schedule': '1f1b'},
    'dense, muon': DENSE | {'context': 'ring', 'n_layers': 3},  # layers that no axis divides
    'experts, muon': MIXTURE | {'context': 'ring'},
    'stages, 1f1b, muon': DENSE | EIGHT | {'n_layers': 4, 'pipeline_schedule': '1f1b'},
}
OPTIMIZERS = {'muon': optimizer.muon()}  # by the last part of a name; AdamW for the others
AXES_OF = {
    'dense': 'rdctp', 'dense, all_to_all': 'ctp', 'dense, 2 parts': 'rdct', 'experts': 'rdectp',
    'experts, capacity': 'de',
    'experts, mixed': 'rdect', 'experts, biases': 'ect', 'latent attention': 'rdect', 'parallel block': 'rdctp',
    'states': 'rdt',
    'dropout': 'rdctp', 'global heads': 'rdctp', 'chunked attention': 'rdect',
    'dense, muon': 'rdct', 'experts, muon': 'rdectp',
}  # fmt: skip


def meshes(name):
    """Every axis alone, every pair and every triple, 2 devices along each; and what is told of only one of them.

    For stages: 2, 4 and 8 of them, 4 with another axis, and 2 with another axis and with pairs of them.
    """
    if name.startswith('stages'):
        others = 'rdect' if 'experts' in name else 'rdct'
        sizes = {'stages, 1f1b': (1, 2), 'stages, experts, 1f1b': (1,)}.get(name, ())
        pairs = [c for n in sizes for c in itertools.combinations(others, n)]
        stages = (
            (2,)
            if 'experts' in name or 'dropout' in name or 'muon' in name
            else (2, 4)
            if '2 rounds' in name
            else (2, 4, 8)
        )
        return [
            *({'p': n} for n in stages),
            *({axis: 2, 'p': 4} for axis in others if 4 in stages),
            *(dict.fromkeys(c, 2) | {'p': 2} for c in pairs),
        ]
    axes = AXES_OF[name]
    chosen = [c for n in (1, 2, 3) for c in itertools.combinations(axes, n)]
    if name == 'dense, all_to_all':
        chosen = [c for c in chosen if 'c' in c]
    if name == 'dense, 2 parts':
        chosen = [c for c in chosen if 't' in c]
    if name in ('parallel block', 'dropout', 'global heads'):
        chosen = [c for c in chosen if len(c) == 1 or c in (tuple('dct'), tuple('dtp'))]
    if name == 'experts, capacity':
        chosen = [c for c in chosen if 'e' in c]
    return [dict.fromkeys(c, 2) for c in chosen]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a mesh made of the first steps: on the host, by name."""

    losses: np.ndarray  # of each step
    terms: dict  # of the first
    gradient: dict
    weights: dict  # after the last


def named(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator='.'): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def ordered(model, batch):
    """A batch in the order in which the model wants its columns."""
    order = model.column_order
    return batch if order is None else jax.tree.map(lambda x: x[:, order], batch)


def decoder(options, mesh):
    """A model for a mesh. There are as many micro-batches as stages; if a schedule is named, each sequence is one."""
    rows = ROWS // math.prod(mesh.get(axis, 1) for axis in 'rde')
    stages = mesh.get('p', 1)
    return transformer(
        options, mesh_of(**mesh), micro_batches=rows if stages > 1 and 'pipeline_schedule' in options else stages
    )


def trained(name, mesh):
    """Steps of an optimizer on a mesh: one compiled program tells everything."""
    model = decoder(MODELS[name], mesh)
    update = OPTIMIZERS.get(name.rsplit(', ', 1)[-1], optimizer.adamw(**ADAM))
    recipe = Recipe(model, update, lambda step: RATE, 0.1, DEFAULT_NO_DECAY, 0.5, 1)
    with jax.set_mesh(mesh_of(**mesh)):
        state = fresh_state(recipe, random_weights(model))
        batches = [ordered(model, random_batch(ROWS, seed=i)) for i in range(FEWER_STEPS.get(name, STEPS))]
        step = make_step(recipe).lower(state, batches[0]).compile(compiler_options=QUICK)
        told = []
        for batch in batches:
            state, metrics = step(state, batch)
            told.append(jax.device_get(metrics))
            if len(told) == 1:
                # The first momentum is the clipped gradient times a constant.
                scale = told[0]['grad_norm'] / told[0]['clipped_grad_norm']
                gradient = {key: m * scale for key, m in named(state.optimizer).items() if 'mu.' in key}
        terms = {key: told[0][key] for key in ('nll', 'balance_loss', 'router_z_loss', 'z_loss') if key in told[0]}
        return Outcome(np.array([line['loss'] for line in told]), terms, gradient, named(state.weights))


@functools.cache
def alone(name):
    return trained(name, {})


def differences(outcome, reference):
    """Largest relative difference of: losses of the first step, any gradient, any weight at the end, the loss curve."""
    return {
        'loss': max(abs(outcome.terms[key] / value - 1) for key, value in reference.terms.items()),
        'gradients': largest(outcome.gradient, reference.gradient),
        'weights': largest(outcome.weights, reference.weights),
        'curve': float(np.max(np.abs(outcome.losses / reference.losses - 1))),
    }


def largest(ours, theirs, floor=0.0):
    """`floor`: below that share of all arrays together an array's own size does not count."""
    assert ours.keys() == theirs.keys()
    least = floor * np.sqrt(sum(np.sum(np.square(x)) for x in theirs.values()))
    return max(float(np.linalg.norm(ours[key] - x) / max(np.linalg.norm(x), least)) for key, x in theirs.items())


# Relative, f32. A sum in another order differs by a few times 2^-24; steps of training let that grow.
ALLOWED = {'loss': 3e-6, 'gradients': 3e-5, 'weights': 1e-4, 'curve': 3e-5}


def gradients(options, mesh, accumulation=1, evaluates=False):
    """Gradient of one batch, and what is told of it: terms of the loss, tables, the terms in evaluation. By name."""
    model = decoder(options, mesh)
    batch = ordered(model, random_batch(ROWS, seed=1))
    with jax.set_mesh(mesh_of(**mesh)):
        run = jax.jit(make_gradients(model, accumulation), compiler_options=QUICK)
        gradient, *told = run(random_weights(model), batch, *[jax.random.key(7)] * model.draws)
        if evaluates:
            told.append(make_evaluate(model)(random_weights(model), batch))
        return named(gradient), named(told)
