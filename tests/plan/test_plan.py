"""Plans propose candidates that fit, sorted by their predicted time, and report what is impossible."""

import jax
import pytest

from pretrax.cli import main
from pretrax.config import from_values
from pretrax.cost.topology import parse_topology
from pretrax.model.option_names import nest
from pretrax.plan.plan import MARGIN, Planner, having, make_plan, report
from pretrax.run.setup import memory_of_run, prepare
from pretrax.train.state import init_state

VALUES = {
    'name': 'planned',
    'steps': 3,
    'model': {
        'family': 'llama',
        'n_layers': 24,
        'd_model': 2048,
        'attention': {'n_heads': 16, 'n_kv_heads': 8},
        'feed_forward': {'d_ff': 5632},
    },
    'data': {'name': 'synthetic', 'vocab_size': 32000},
    'batch': {'tokens': 64 * 2048, 'sequence_length': 2048},
    'optimizer': {'name': 'adamw', 'learning_rate': 3e-3},
}


def plan(**changes):
    return make_plan(from_values(VALUES | changes), parse_topology('v5e-16'), lambda text: None)


def test_candidates_fit_are_sorted_and_match_their_own_prediction():
    found = plan().found
    ranks = [one.rank for one in found]
    assert ranks == sorted(ranks)
    limit = 16 * 2**30
    assert all(one.memory.total <= MARGIN * limit for one in found)
    best = found[0]
    mesh = {axis: n for axis, n in best.mesh.items() if n > 1}
    batch = VALUES['batch'] | {'micro': best.micro}
    again = plan(mesh=mesh, batch=batch, model=VALUES['model'] | {'save': best.save}).now
    assert (again.memory, again.prediction) == (best.memory, best.prediction)


def test_verifying_compiles_the_proposed_configuration():
    config, topology = from_values(VALUES), parse_topology('v5e-16')
    for one in plan().found[:2]:
        assert Planner(having(config, one), topology, lambda text: None).as_configured() == one


def test_the_step_is_printed_with_the_interval_of_published_steps_but_not_in_f32():
    now = plan().now.prediction
    low, high = (now.seconds * share for share in (now.published.low, now.published.high))
    line = f'step {now.seconds:.3g} s (80% interval {low:.3g} to {high:.3g} s, from {now.published.runs} published runs'
    assert any(line in text for text in report(plan()))
    assert not any('published runs' in text for text in report(plan(precision={'compute': 'f32'})))


def test_an_impossible_mesh_is_reported_and_others_are_found():
    impossible = plan(mesh={'d': 5})
    assert impossible.now is None
    assert any('impossible' in line and 'mesh' in line for line in report(impossible))
    assert impossible.found


def test_the_plan_names_the_compiler_options_and_what_the_defaults_of_xla_would_cost():
    """By default, XLA all-reduces on v5p: twice the bytes, in three rings, and all of it waits."""
    config, hardware = VALUES | {'mesh': {'d': 64}}, parse_topology('v5p:4x4x4')
    tuned = make_plan(from_values(config), hardware, lambda text: None)
    tables = 2 * 32000 * 2048
    n_bytes = (2 + 4) * tables + (2 + 2 + 4) * (tuned.n_params - tables)
    collectives = 2 * (3 * 24 + 2)  # two gathers and a sum of each layer, and of the tables one
    latency = collectives * (3 + 3 + 3) * hardware.device.reach.hop
    assert tuned.by_default.exposed == pytest.approx(2 * n_bytes * 63 / 64 / (6 * 90e9) + latency)
    name = 'xla_tpu_enable_sparse_core_collective_offload_reduce_scatter'
    assert f'        {name}=true' in report(tuned)
    removed = {option.name: None for option in tuned.options}
    plain = make_plan(from_values(config | {'compiler': {'options': removed}}), hardware, lambda text: None)
    assert plain.now.prediction == tuned.by_default
    assert (plain.options, plain.by_default) == ([], None)
    assert not any(name in line for line in report(plain))


def test_the_plan_says_on_several_gpus_that_unrolled_layers_are_faster():
    hardware, said = parse_topology('h100x8'), 'model.layers=unroll: '
    for layers, expected in (('auto', True), ('unroll', False)):
        found = make_plan(
            from_values(VALUES | {'model': VALUES['model'] | {'layers': layers}}), hardware, lambda text: None
        )
        assert any(said in line for line in report(found)) == expected


def test_the_plan_says_what_layers_on_halves_of_the_batch_would_hide():
    hardware, said = parse_topology('v5p:4x4x4'), 'model.batch_parts=2: '
    model, batch = VALUES['model'], {'tokens': 2048 * 64, 'sequence_length': 2048, 'micro': 4}
    for mesh, parts, expected in (({'d': 16, 't': 4}, 1, True), ({'d': 16, 't': 4}, 2, False), ({'d': 64}, 1, False)):
        values = VALUES | {'mesh': mesh, 'model': model | {'batch_parts': parts}, 'batch': batch}
        if mesh == {'d': 64}:
            values['batch'] = batch | {'tokens': 2048 * 256}
        found = make_plan(from_values(values), hardware, lambda text: None)
        assert any(said in line for line in report(found)) == expected
        if expected:
            in_halves = make_plan(
                from_values(values | {'model': model | {'batch_parts': 2}}), hardware, lambda text: None
            )
            assert found.in_halves == in_halves.now
            assert found.in_halves.prediction.seconds < found.now.prediction.seconds
            assert any(one.parts == 2 for one in found.found)


def test_the_report_says_if_nothing_fits():
    huge = plan(model=nest(VALUES['model'] | {'n_layers': 240, 'd_model': 16384, 'd_head': 1024, 'd_ff': 65536}))
    assert huge.found == []
    assert any('candidates fits' in line for line in report(huge))


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (['plan', 'configs/quickstart.yaml'], 'plan needs --topology'),
        (['plan', 'configs/quickstart.yaml', '--topology', 'h300'], 'did you mean h200'),
        (['compile', 'configs/quickstart.yaml', '--slices', '2'], '--slices 2 needs --topology'),
        (
            ['compile', 'configs/quickstart.yaml', '--topology=h100x8', '--slices=two'],
            'Input should be a valid integer',
        ),
    ],
)
def test_wrong_requests_are_user_errors(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize('name', ['adamw', 'muon', 'soap', 'schedule_free'])
def test_the_memory_of_the_optimizer_is_that_of_its_state(name):
    """Weights, and the state that a run makes on one device;
    SOAP has more for a wide feed-forward than for a square matrix.
    """
    model = {'family': 'llama', 'n_layers': 2, 'd_model': 32, 'attention': {'n_heads': 4}, 'feed_forward': {'d_ff': 96}}
    changes = {
        'model': model, 'data': {'name': 'synthetic', 'vocab_size': 256}, 'batch': {'tokens': 64,
        'sequence_length': 32},
        'optimizer': {'name': name, 'learning_rate': 1e-3}, 'schedule': {'name': 'constant'}, 'mesh': {'d': 1},
    }  # fmt: skip
    config = from_values(VALUES | changes)
    planned = Planner(config, parse_topology('v5e-1'), lambda text: None).as_configured().memory
    run = prepare(config, lambda text: None, jax.devices()[:1])
    with jax.set_mesh(run.mesh):
        state = init_state(run.recipe, 0)
    held = sum(array.nbytes for array in jax.tree.leaves(state.optimizer))
    assert planned.moments == pytest.approx(held, rel=1e-3)
    memory = memory_of_run(run)
    assert memory is not None
    assert memory.moments == pytest.approx(held, rel=1e-3)
