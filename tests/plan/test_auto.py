"""`auto` becomes a number with a reason: planned for a mesh, measured for a micro-batch,
and the same when a run goes on.
"""

import json

import jax
import pytest

import pretrax
from pretrax.config import from_values, load, resolved_yaml
from pretrax.cost.topology import parse_topology
from pretrax.errors import UserError
from pretrax.plan import auto
from pretrax.plan.auto import Here, settled
from pretrax.plan.plan import Planner
from pretrax.run import micro_batch as measure

TINY = {
    'name': 'auto', 'steps': 3, 'model': {'family': 'llama', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 4},
    'feed_forward': {'d_ff': 32}},
    'data': {'name': 'synthetic', 'vocab_size': 64}, 'batch': {'tokens': 16 * 8, 'sequence_length': 8, 'micro': 'auto'},
    'optimizer': {'name': 'adamw', 'learning_rate': 1e-3}, 'mesh': {'r': 1, 'd': 2, 't': 4},
}  # fmt: skip
QUICK = TINY | {'mesh': {'r': 8}}  # two sizes, and nothing to gather
LARGE = TINY | {
    'model': {'family': 'llama', 'n_layers': 24, 'd_model': 2048, 'attention': {'n_heads': 16, 'n_kv_heads': 8},
    'feed_forward': {'d_ff': 5632}},
    'batch': {'tokens': 64 * 2048, 'sequence_length': 2048, 'micro': 'auto'}, 'mesh': 'auto',
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path / 'cache' / 'pretrax' / 'micro.json'


@pytest.mark.slow
def test_a_measured_micro_batch_is_reported_recorded_and_cached(cache, tmp_path, monkeypatch):
    said = []
    config = settled(from_values(QUICK | {'run_dir': str(tmp_path / 'run')}), said.append)
    assert config.batch.micro in (1, 2)
    assert config.batch.tokens == TINY['batch']['tokens']
    assert 'auto: measured, tokens/s' in resolved_yaml(config)
    assert said[-1].startswith(f'batch.micro: {config.batch.micro} (auto: measured, tokens/s by micro-batch 1: ')
    assert [entry['micro'] for entry in json.loads(cache.read_text()).values()] == [config.batch.micro]
    monkeypatch.setattr(measure, '_speed', lambda config: pytest.fail('it was measured again'))
    again = settled(from_values(QUICK | {'run_dir': str(tmp_path / 'run')}), said.append)
    assert again.batch.micro == config.batch.micro
    assert 'measured earlier' in said[-1]
    with pytest.raises(pytest.fail.Exception):  # another model is another answer
        settled(from_values(QUICK | {'model': TINY['model'] | {'feed_forward': {'d_ff': 64}}}), said.append)


@pytest.mark.parametrize(
    ('speeds', 'chosen', 'tried', 'ended'),
    [
        ([100, 150, 151, 400], 4, [1, 2, 4], '4 is not faster'),
        ([100, 150, 300, 400], 8, [1, 2, 4, 8], 'the largest is all sequences at once'),
        ([100, 150, 'does not fit: 3 GB of 2 GB'], 2, [1, 2, 4], '4 does not fit: 3 GB of 2 GB'),
    ],
)
def test_micro_batches_grow_until_they_do_not_pay_or_memory_is_full(speeds, chosen, tried, ended, monkeypatch):
    asked = []

    def speed(config):
        asked.append(config.batch.micro)
        return speeds[len(asked) - 1]

    monkeypatch.setattr(measure, '_speed', speed)
    config = settled(from_values(TINY), lambda text: None)
    assert (config.batch.micro, asked) == (chosen, tried)
    assert ended in config.origins['batch', 'micro']


def test_a_step_that_does_not_fit_is_not_run(monkeypatch):
    monkeypatch.setattr(measure, 'available_memory', lambda: 8 * 1000)
    monkeypatch.setattr(measure, 'init_state', lambda *_: pytest.fail('it was run'))
    with pytest.raises(UserError, match=r'1 does not fit: .* of 1 kB\nuse model.save=none'):
        settled(from_values(QUICK), lambda text: None)


def test_a_damaged_cache_only_costs_a_measurement(cache, monkeypatch):
    cache.parent.mkdir(parents=True)
    cache.write_text('{"half')
    monkeypatch.setattr(measure, '_speed', lambda config: 1.0)
    assert settled(from_values(TINY), lambda text: None).batch.micro == 1


def test_a_resumed_run_keeps_its_mesh_and_micro_batch(tmp_path, monkeypatch):
    config = from_values(TINY | {'run_dir': str(tmp_path)})
    other = from_values(
        TINY | {'model': TINY['model'] | {'feed_forward': {'d_ff': 64}}, 'batch': TINY['batch'] | {'micro': 2}}
    )
    (tmp_path / 'config.yaml').write_text(resolved_yaml(other))
    monkeypatch.setattr(auto, 'measured_micro', lambda *_: (4, 'measured'))
    assert settled(config, lambda text: None).batch.micro == 4  # another run has been here
    began = auto.settle(config, micro=2, origin='auto: measured')
    (tmp_path / 'config.yaml').write_text(resolved_yaml(began))
    assert settled(config, lambda text: None).batch.micro == 2
    assert load(tmp_path / 'config.yaml').batch.micro == 2
    planned = from_values(TINY | {'run_dir': str(tmp_path), 'mesh': 'auto', 'batch': TINY['batch'] | {'micro': None}})
    assert settled(planned, lambda text: None).batch.micro == 2


def test_the_chosen_mesh_is_the_fastest_that_fits():
    topology, said = parse_topology('v5e-16'), []
    config = settled(from_values(LARGE), said.append, topology)
    planner = Planner(from_values(LARGE), topology, lambda text: None)
    best = planner.search(('all',)).found[0]
    assert {axis: n for axis, n in config.mesh.model_dump().items() if n > 1} == {
        axis: n for axis, n in best.mesh.items() if n > 1
    }
    assert config.batch.micro == best.micro
    assert said[0].startswith('mesh: ')
    assert 'auto: planned, ' in said[0]
    given = settled(from_values(LARGE | {'mesh': {'d': 2, 't': 'auto'}}), said.append, topology)
    assert (given.mesh.d, given.mesh.t) == (2, 8)
    with pytest.raises(UserError, match=r'none of \d+ candidates fits v5e:4x4'):
        settled(from_values(LARGE | {'model': LARGE['model'] | {'n_layers': 600}}), said.append, topology)


def test_unknown_devices_get_the_default_mesh_also_in_a_program(tmp_path):
    values = TINY | {'mesh': 'auto', 'batch': TINY['batch'] | {'micro': 2}, 'run_dir': str(tmp_path)}
    config = pretrax.prepare(from_values(values), lambda text: None).config
    assert config.mesh.model_dump() == {'r': 8, 'd': 1, 'e': 1, 'c': 1, 't': 1, 'p': 1}
    assert 'the plan does not know this device' in config.origins['mesh',]


def test_the_plan_uses_the_memory_that_devices_report(monkeypatch):
    node = parse_topology('h200x8')
    monkeypatch.setattr(auto, '_here', lambda: Here(**vars(node), reported=node.memory * 3 // 4))
    monkeypatch.setattr(auto, 'measured_micro', lambda *_: (1, 'measured'))
    config = settled(from_values(LARGE), lambda text: None)
    assert 'planned' in config.origins['mesh',]
    monkeypatch.setattr(auto, '_here', lambda: Here(**vars(node), reported=10**9))
    with pytest.raises(UserError, match=r'8 x H200 SXM in this machine\ntried: .*\nthe smallest needs'):
        settled(from_values(LARGE), lambda text: None)


@pytest.mark.parametrize('values', [{'mesh': 'auto'}, {'mesh': {'t': 'auto'}}])
def test_a_program_must_resolve_auto_before_training(values):
    from pretrax.run.setup import prepare

    with pytest.raises(UserError, match=r'pretrax\.plan\.auto\.settled'):
        prepare(from_values(TINY | values), lambda text: None)
    if 'mesh' in values:
        assert jax.device_count() == 8
    with pytest.raises(UserError, match='measures auto'):
        prepare(from_values(TINY), lambda text: None)
