"""A plan uses what the compiler said of the same step by the same versions, and nothing else."""

import pytest

from pretrax.config import from_values
from pretrax.cost.topology import parse_topology
from pretrax.plan import compiled_facts
from pretrax.plan.compiled_facts import CompiledFact, CompiledFacts
from pretrax.plan.plan import Planner, make_plan, report

VALUES = {
    'name': 'compiled', 'steps': 3,
    'model': {'n_layers': 24, 'd_model': 2048, 'attention': {'n_heads': 16}, 'feed_forward': {'d_ff': 5632}},
    'data': {'name': 'synthetic', 'vocab_size': 32000}, 'batch': {'tokens': 64 * 2048, 'sequence_length': 2048},
    'optimizer': {'name': 'adamw', 'learning_rate': 3e-3},
}  # fmt: skip
TOPOLOGY = parse_topology('v5e-16')


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return tmp_path / 'pretrax' / 'plan.json'


def facts(topology=TOPOLOGY, say=pytest.fail, **changes):
    return CompiledFacts(from_values(VALUES | changes), topology, say)


def planned(compiled=None):
    return make_plan(from_values(VALUES), TOPOLOGY, lambda text: None, compiled)


def plant(choice, n_bytes, exposed=0.25):
    facts().add(choice.written(), CompiledFact(n_bytes, exposed))


def test_a_plan_uses_the_memory_of_the_compiler():
    best = planned().found[0]
    plant(best, 3 * 10**9)
    again = planned(facts())
    known = next(one for one in again.found if one.compiled)
    assert known.written() == best.written()
    assert (known.needed, known.memory, known.prediction) == (3 * 10**9, best.memory, best.prediction)
    assert sum(one.compiled is not None for one in again.found) == 1
    assert any('3 GB compiled' in line and best.written() in line for line in report(again))


def test_what_did_not_fit_when_it_was_compiled_is_not_proposed_again():
    best = planned().found[0]
    plant(best, TOPOLOGY.memory + 1)
    again = planned(facts())
    assert best.written() not in [one.written() for one in again.found]
    assert (best.mesh, best.micro) in [(one.mesh, one.micro) for one in again.found]  # with more recomputation


def test_what_fitted_when_it_was_compiled_needs_no_room():
    planner = Planner(from_values(VALUES), TOPOLOGY, lambda text: None)
    one = next(found for found in planner.search().found if found.save != 'all')
    everything = planner.choice(one.mesh, one.micro, 'all')
    assert not planner.fits(everything)
    plant(everything, TOPOLOGY.memory)
    known = next(found for found in planned(facts()).found if found.compiled)
    assert (known.mesh, known.micro, known.save) == (one.mesh, one.micro, 'all')


def test_the_configuration_itself_says_what_was_compiled():
    plant(planned().now, 3 * 10**9)
    text = '\n'.join(report(planned(facts())))
    assert 'compiled earlier: 3 GB per device; 0.25 s of communication not overlapped' in text
    plant(planned().now, TOPOLOGY.memory - 1)
    assert 'fits, so closely that XLA may hide little communication' in '\n'.join(report(planned(facts())))


def test_other_versions_hardware_and_models_do_not_share_facts(monkeypatch):
    best = planned().found[0]
    plant(best, 3 * 10**9)
    assert facts().get(best.written()) == CompiledFact(3 * 10**9, 0.25)
    assert facts(mesh={'d': 16}).get(best.written())  # a search chooses the mesh
    assert facts(parse_topology('v5e-8')).get(best.written()) is None
    assert facts(model=VALUES['model'] | {'n_layers': 25}).get(best.written()) is None
    assert facts(data={'name': 'synthetic', 'vocab_size': 32001}).get(best.written()) is None
    here = compiled_facts.versions()
    for package in ('pretrax', 'jax', 'jaxlib'):
        monkeypatch.setattr(compiled_facts, 'versions', lambda package=package: here | {package: '0'})
        assert facts().get(best.written()) is None
    assert planned(facts()).found[0].compiled is None


def test_a_damaged_file_costs_one_line(cache):
    best = planned().found[0]
    plant(best, 3 * 10**9)
    cache.write_text(cache.read_text()[:-9])
    said = []
    damaged = facts(say=said.append)
    assert (len(said), damaged.get(best.written())) == (1, None)
    assert str(cache) in said[0]
    assert planned(damaged).found[0] == best
    damaged.add(best.written(), CompiledFact(3 * 10**9, None))
    assert facts().get(best.written()) == CompiledFact(3 * 10**9, None)


@pytest.mark.parametrize('fact', ['text', 3, [], {'exposed': 1.0}, {'needed': 'many', 'exposed': 1.0}])
def test_a_damaged_fact_is_unknown(fact):
    compiled = facts()
    compiled._known['mesh.d=16'] = fact
    assert compiled.get('mesh.d=16') is None
