"""The search of a plan proposes layouts that the configuration's own checks accept, and says what it tried."""

import itertools
import math

import pytest

from decoders import decoder_options
from pretrax.config import from_values, resolve_mesh
from pretrax.config.batch import check_batch
from pretrax.config.schema import Batch
from pretrax.cost.topology import parse_topology
from pretrax.errors import UserError
from pretrax.model.architecture import resolve
from pretrax.model.context import choose_context
from pretrax.model.pipeline_schedule import PipelineSchedule, _check_layers
from pretrax.plan.auto import settled
from pretrax.plan.layouts import layouts
from pretrax.plan.plan import Planner, make_plan, report
from small import LLAMA


def values(model, sequences, length, **changes):
    batch = {'tokens': sequences * length, 'sequence_length': length}
    return {
        'name': 'layouts', 'steps': 3, 'model': model, 'data': {'name': 'synthetic', 'vocab_size': 128256},
        'batch': batch, 'optimizer': {'name': 'adamw', 'learning_rate': 1e-4},
    } | changes  # fmt: skip


def planner(hardware, *arguments, **changes):
    return Planner(from_values(values(*arguments, **changes)), hardware, lambda text: None)


@pytest.mark.parametrize(
    ('hardware', 'model', 'sequences'),
    [(('h100x8', 16), 'llama3-70b', 128), (('v6e-256', 2), 'llama3-405b', 512)],
)
def test_models_that_were_trained_on_several_slices_fit_if_their_weights_are_sharded_over_slices(
    hardware, model, sequences
):
    """The model and the hardware of rows of benchmarks/published.yaml."""
    topology = parse_topology(*hardware)
    found = planner(topology, {'preset': model}, sequences, 8192).search().found
    assert found
    assert all(one.mesh['r'] < topology.slices for one in found)


def test_a_planned_mesh_shards_over_nodes_if_nothing_else_fits():
    """torchtitan's Llama 3 70B on 64 A100, with 80 GB each."""
    topology = parse_topology('a100x8', 8)
    config = settled(from_values(values({'preset': 'llama3-70b'}, 64, 8192, mesh='auto')), lambda text: None, topology)
    one = Planner(config, topology, lambda text: None).as_configured()
    assert one.mesh['r'] < 8
    assert one.memory.total < 85.9e9


def test_long_sequences_are_proposed_over_c():
    """Llama 3 70B at 131,072 tokens on 256 chips of Ironwood, which MaxText ran with a context parallelism of 8."""
    of_70b = planner(parse_topology('tpu7x:4x8x8'), {'preset': 'llama3-70b'}, 64, 131072)
    with_c, without = of_70b.search(['none']).found, of_70b.search(['none'], {'c': 1}).found
    assert with_c[0].mesh['c'] > 1
    assert with_c[0].prediction.seconds < without[0].prediction.seconds


def test_if_weights_fit_in_a_slice_each_slice_has_all_of_them():
    found = planner(parse_topology('h100x8', 2), {'preset': 'llama3-8b'}, 64, 8192).search().found
    assert {one.mesh['r'] for one in found} == {2}


def accepts(arch, batch, mesh, micro):
    """Whether the checks of a configuration accept a mesh."""
    try:
        check_batch(Batch.model_validate(batch | {'micro': micro}), mesh)
        arch.check_mesh(mesh, batch['sequence_length'])
        choose_context('auto', arch, mesh, batch['sequence_length'])
        if mesh['p'] > 1:
            _check_layers(PipelineSchedule(mesh['p'], 1, mesh['p']), arch)
    except ValueError:  # a UserError, also within an error of pydantic
        return False
    return True


@pytest.mark.parametrize(
    ('hardware', 'changes', 'sequences', 'length'),
    [
        (('h100x8', 2), {'n_heads': 4, 'n_kv_heads': 2, 'n_layers': 4}, 16, 16384),
        (('h100x4', 3), {'n_heads': 6, 'n_kv_heads': 6, 'n_layers': 6}, 24, 8192),
        (('v5e-16', 1), {'n_heads': 4, 'n_kv_heads': 4, 'n_layers': 2, 'n_experts': 4, 'experts_per_token': 2}, 8,
         12288),
    ],
)  # fmt: skip
def test_every_candidate_passes_the_checks_of_its_configuration(hardware, changes, sequences, length):
    topology, options = parse_topology(*hardware), LLAMA | {'d_model': 48, 'd_ff': 96} | changes
    tried = planner(topology, decoder_options(**options).model_dump(exclude_unset=True), sequences, length).search()
    arch, batch = resolve(decoder_options(**options), 128256, length), {'tokens': sequences * length}
    batch['sequence_length'] = length
    for mesh, micro, _ in tried.tried:
        assert math.prod(mesh.values()) == topology.n_devices
        assert accepts(arch, batch, mesh, micro), mesh
    meshes = {tuple(mesh.values()) for mesh, _, _ in tried.tried}
    divisors = [n for n in range(1, topology.n_devices + 1) if topology.n_devices % n == 0]
    assert meshes == {
        sizes for sizes in itertools.product(divisors, repeat=6)
        if math.prod(sizes) == topology.n_devices and sizes[0] == topology.slices
        and sizes[4] <= topology.n_devices // topology.slices and (sizes[3] == 1 or length / sizes[3] >= 4096)
        and accepts(arch, batch, dict(zip('rdectp', sizes, strict=True)), None)
    }  # fmt: skip


def test_given_sizes_are_kept():
    """Also those that the search would not choose by itself."""
    topology = parse_topology('h100x8', 2)
    arch = resolve(decoder_options(**LLAMA | {'n_layers': 64}), 100, 2048)
    only = {'r': 1, 'c': 2, 'p': 4}
    found = list(layouts(topology, arch, 2048, 64, [1], only))
    assert found
    assert all({axis: mesh[axis] for axis in only} == only for mesh in found)
    assert {(mesh['d'], mesh['t']) for mesh in found} == {(2, 1), (1, 2)}
    config = from_values(values({'preset': 'llama3-8b'}, 16, 16384, mesh={'d': 4, 'c': 'auto'}))
    assert settled(config, lambda text: None, parse_topology('h200x8')).mesh.c == 2


def test_if_nothing_fits_the_plan_says_what_it_tried_and_the_least_memory():
    topology = parse_topology('h100x8', 2)
    plan = make_plan(from_values(values({'preset': 'llama3-405b'}, 16, 8192)), topology, lambda text: None)
    text = '\n'.join(report(plan))
    assert not plan.found
    assert 'tried: r=1,2 d=' in text
    assert 'model.save=all,none' in text
    least = plan.search.least
    assert least is not None
    assert least.written() in text
    again = Planner(
        from_values(values({'preset': 'llama3-405b', 'save': least.save}, 16, 8192, mesh=least.values()['mesh'])
        | {'batch': {'tokens': 16 * 8192, 'sequence_length': 8192, 'micro': least.micro}}),
        topology, lambda text: None,
    ).as_configured()  # fmt: skip
    assert again.memory == least.memory
    assert again.memory.total > topology.memory


def test_an_impossible_batch_is_not_a_lack_of_memory():
    """One sequence for a pair of devices, and a vocabulary that cannot be sharded further."""
    config = from_values(values({'preset': 'llama3-8b'}, 3, 2048, mesh={'d': 'auto', 'r': 4, 't': 'auto'}))
    with pytest.raises(UserError, match='nothing was tried: no mesh shards the batch evenly'):
        settled(config, lambda text: None, parse_topology('h100x8'))


def test_c_is_planned_too():
    mesh = from_values(values({'preset': 'llama3-8b'}, 16, 8192, mesh='auto')).mesh
    assert mesh.c == 'auto'
    with pytest.raises(UserError, match='plan mesh: auto'):
        resolve_mesh(mesh, 8, 'cuda')
