"""What the schema declares of each key is true of the lowered training step."""

import jax
import pytest

from pretrax.config import effect_of, from_values, may_change_on_resume, values_in_step
from pretrax.config.problems import known_keys
from pretrax.config.schema import RunConfig
from pretrax.run.setup import prepare
from pretrax.train.step import make_step

VALUES = {
    'name': 'test',
    'steps': 10,
    'model': {'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}, 'feed_forward': {'d_ff': 32}},
    'data': {'name': 'synthetic', 'vocab_size': 32},
    'batch': {'tokens': 256, 'sequence_length': 16},
    'optimizer': {'learning_rate': 0.1},
    'mesh': {'d': 8},
}
# Another value of every key whose effect is not on the step.
OTHERS = [
    'name=other', 'run_dir=elsewhere', 'processes.count=1', 'storage.region=x',
    'federation={bucket: gs://bucket/model, name: north, islands: 4, every: 12, fragments: 2, delay: 3, mixing: 0.25, '
    'encoding: int4, outer_rate: 0.5, outer_momentum: 0.8, patience: 9.0, keep: 3}',
    'checkpoint={every: 7, minutes: 5.0, keep: 4, keep_every: 9, keep_best: 1}',
    'faults={rollback_after: 3, rollbacks: 5, time_limit_minutes: 50.0, hang_seconds: 99.0, heartbeat_seconds: 7, '
    'stack_trace_interval_seconds: 5.0, stack_trace_to: console}',
    'eval={every: 3, batches: 2}', 'log={every: 3, stall_seconds: 4.0, profile: 2, layers: 2, tensorboard: true}',
    'sample={prompts: [a], tokens: 3, temperature: 0.1, top_k: 3, top_p: 0.5}',
]  # fmt: skip


def lowered(*overrides: str, **values) -> str:
    run = prepare(from_values(VALUES | values, overrides), lambda text: None)
    with jax.set_mesh(run.mesh):
        return make_step(run.recipe).lower(run.like, run.abstract_batch()).as_text()


@pytest.fixture(scope='module')
def step() -> str:
    return lowered()


def test_every_key_has_a_declared_effect():
    assert {effect_of(key).on for key in known_keys(RunConfig)} == {'step', 'input', 'nothing'}
    with pytest.raises(KeyError, match='declares no effect'):
        effect_of('new.key')


def test_keys_without_effect_leave_the_step_as_it_is(step):
    before, after = (from_values(VALUES, overrides).model_dump() for overrides in ([], OTHERS))
    assert {key for key in before if before[key] != after[key]} == {
        key for key in before if effect_of(key).on == 'nothing'
    }
    assert lowered(*OTHERS) == step


@pytest.mark.parametrize(
    'override',
    [
        'steps=20',
        'optimizer.learning_rate=0.2',
        'optimizer.clip_norm=null',
        'optimizer.groups=[{"match":"embed","learning_rate_scale":0.5}]',
        'optimizer.freeze=[embed]',
        'optimizer.ema_decay=0.5',
        'batch.micro=1',
        'faults.spike=3.0',
        'mesh.d=4 mesh.t=2',
    ],
)
def test_keys_with_an_effect_change_the_step(step, override):
    assert all(effect_of(word.partition('=')[0]).on == 'step' for word in override.split())
    assert lowered(*override.split()) != step


def test_the_seed_is_in_a_step_that_draws_random_numbers():
    assert effect_of('seed').on == 'step'
    int8 = ('precision.matmul=int8', 'precision.exempt=[head]')
    assert lowered(*int8, 'seed=1') != lowered(*int8, 'seed=2')


def test_the_dtype_of_gradients_over_r_is_in_a_step_that_has_several_replicas(step):
    assert effect_of('precision.reduction').on == 'step'
    assert lowered('precision.reduction=bf16') == step  # mesh.r = 1
    replicas = ('mesh.r=2', 'mesh.d=4')
    assert lowered(*replicas, 'precision.reduction=bf16') != lowered(*replicas)


def test_a_run_may_be_resumed_with_more_steps_but_not_with_another_model():
    for key in (
        'steps',
        'eval.every',
        'faults.rollbacks',
        'memory.offload',
        'name',
        'processes.count',
        'federation.patience',
        'federation.keep',
        'federation.wait_for',
    ):
        assert may_change_on_resume(key)
    for key in (
        'optimizer.name',
        'model.steps',
        'faults.spike',
        'seed',
        'data.text',
        'mesh.d',
        'plugins',
        'precision.reduction',
        'federation.bucket',
        'federation.name',
        'federation.islands',
        'federation.every',
        'federation.encoding',
    ):
        assert not may_change_on_resume(key)


def test_values_in_the_step_leave_out_the_inputs():
    values = values_in_step(from_values(VALUES))
    assert values['model.d_model'] == 16
    assert values['faults.spike'] is None
    assert not {key for key in values if key.startswith(('data.', 'eval.', 'name', 'run_dir'))}
    assert values_in_step(from_values(VALUES), inputs=True).keys() - values.keys() == {
        'init_from', 'data.name', 'data.vocab_size', 'data.document_length'
    }  # fmt: skip
