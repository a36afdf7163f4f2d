"""The search of a plan proposes layouts that the configuration's own checks accept, and says what it tried."""

import itertools
import math
import shlex

import pytest
import yaml

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
from pretrax.plan.plan import OFFLOADED, Planner, having, make_plan, report
from small import LLAMA


def values(model, sequences, length, **changes):
    batch = {'tokens': sequences * length, 'sequence_length': length}
    return {
        'name': 'layouts', 'steps': 3, 'model': model, 'data': {'name': 'synthetic', 'vocab_size': 128256},
        'batch': batch, 'optimizer': {'name': 'adamw', 'learning_rate': 1e-4},
    } | changes  # fmt: skip


def planner(hardware, *arguments, **changes):
    return Planner(from_values(values(*arguments, **changes)), hardware, lambda text: None)


# hardware, model, sequences, tokens of each, sizes of the mesh
PUBLISHED = {
    'Llama 3 70B, MaxText on 16 nodes of 8 H100': (('dgx-h100', 16), 'llama3-70b', 256, 8192, {'r': 1, 'd': 128}),
    'the same, 4 copies on 64 nodes': (('dgx-h100', 64), 'llama3-70b', 1024, 8192, {'r': 4, 'd': 128}),
    'Llama 3 70B, torchtitan on 64 A100': (('a100x8', 8), 'llama3-70b', 64, 8192, {'r': 1, 'd': 64}),
    'Llama 2 70B, fms-fsdp on 128 A100': (('a100x8', 16), 'llama2-70b', 768, 4096, {'r': 1, 'd': 128}),
    'Llama 3 70B, MaxText on 128 chips': (('v6e-128', 1), 'llama3-70b', 512, 8192, {'r': 1, 'd': 128}),
    'Llama 3 405B, MaxText on 256 chips': (('tpu7x:4x8x8', 1), 'llama3-405b', 1536, 8192, {'r': 1, 'd': 512}),
    'Llama 3 405B, two slices': (('v6e-256', 2), 'llama3-405b', 512, 8192, {}),
}


@pytest.mark.parametrize('row', PUBLISHED)
def test_layouts_that_were_trained_fit(row):
    """Rows of benchmarks/published.yaml that are not held out."""
    hardware, model, sequences, length, published = PUBLISHED[row]
    topology, data = parse_topology(*hardware), {'name': 'synthetic', 'vocab_size': 32000}
    found = planner(topology, {'preset': model}, sequences, length, data=data).search(only=published).found
    assert found
    assert found[0].mesh | published == found[0].mesh


def test_activations_go_to_host_memory_as_in_the_recipe_of_maxtext():
    """Llama 3.1 70B on v6e-128, whose recipe offloads decoder_layer_input, query_proj, key_proj and value_proj."""
    of_70b = planner(parse_topology('v6e-128'), {'preset': 'llama3-70b'}, 512, 8192)
    best = of_70b.search(only={'d': 128}).found[0]
    assert best.save == dict.fromkeys(('input', 'q', 'k', 'v'), 'offload')
    arguments = dict(argument.split('=', 1) for argument in shlex.split(best.written()))
    assert yaml.safe_load(arguments['model.save']) == best.save


def test_each_mesh_has_the_fastest_way_to_save_memory_that_fits():
    """State is in host memory only where nothing else fits, and host memory must gain 5 % of the step.

    The order is that of one mesh, so another way may be faster by less than 1 %.
    """
    of_8b = planner(parse_topology('h100x8', 2), {'preset': 'llama3-8b'}, 64, 8192)
    found = of_8b.search().found
    assert {one.offload for one in found} == {(), ('optimizer',)}
    assert len({str(one.save) for one in found}) > 2
    for one in found:
        assert one.memory.total <= of_8b.room
        for save in ('all', 'full', 'dots', 'attention', 'none', *OFFLOADED):
            other = of_8b.choice(one.mesh, one.micro, save)
            assert not of_8b.fits(other) or (not one.offload and of_8b.candidate(other).rank >= 0.99 * one.rank)


@pytest.mark.parametrize('save', ['full', {'input': 'offload'}, {'up': 'keep'}])
def test_a_planned_mesh_keeps_the_configured_recomputation(save):
    model = {'preset': 'llama3-8b', 'save': save}
    config = settled(
        from_values(values(model, 16, 2048, mesh='auto')), lambda text: None, topology := parse_topology('h100x8')
    )
    assert config.model.options.save == save
    assert Planner(config, topology, lambda text: None).as_configured().memory.total < topology.memory


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
    for mesh, micro in tried.tried:
        assert math.prod(mesh.values()) == topology.n_devices
        assert accepts(arch, batch, mesh, micro), mesh
    meshes = {tuple(mesh.values()) for mesh, _ in tried.tried}
    divisors = [n for n in range(1, topology.n_devices + 1) if topology.n_devices % n == 0]
    assert meshes == {
        sizes for sizes in itertools.product(divisors, repeat=6)
        if math.prod(sizes) == topology.n_devices and math.gcd(sizes[0], topology.slices) in (sizes[0], topology.slices)
        and sizes[4] <= topology.n_devices // topology.slices and (sizes[3] == 1 or length / sizes[3] >= 4096)
        and accepts(arch, batch, dict(zip('rdectp', sizes, strict=True)), None)
    }  # fmt: skip


def test_given_sizes_are_kept():
    """Also those that the search would not choose by itself."""
    topology = parse_topology('h100x8', 2)
    arch = resolve(decoder_options(**LLAMA | {'n_layers': 64}), 100, 2048)
    only = {'r': 1, 'c': 2, 'p': 4}
    found = list(layouts(topology, arch, 2048, 64, only))
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
    assert 'tried: r=1,2,4,8,16 d=' in text
    assert all(save in text for save in ('all', 'dots', 'attention', 'none', '{input: offload}'))
    assert 'memory.offload=[],[optimizer]' in text
    least = plan.search.least
    assert least is not None
    assert least.written() in text
    again = Planner(
        having(from_values(values({'preset': 'llama3-405b'}, 16, 8192)), least), topology, lambda text: None
    ).as_configured()
    assert again.memory == least.memory
    assert again.memory.total > topology.memory


def test_if_a_planned_mesh_does_not_fit_the_error_names_what_fits():
    """Llama 3 8B on 16 chips of v5e, with every result of a product kept in device memory."""
    hardware, model = parse_topology('v5e-16'), {'preset': 'llama3-8b', 'save': 'dots'}
    config = from_values(values(model, 16, 8192, mesh={'d': 16, 't': 'auto'}))
    with pytest.raises(UserError, match='candidates fits v5e:4x4') as error:
        settled(config, lambda text: None, hardware)
    suggested = shlex.split(str(error.value).splitlines()[-1].removeprefix('use ').partition(', which')[0])
    again = from_values(values(model, 16, 8192), suggested)
    assert Planner(again, hardware, lambda text: None).as_configured().memory.total < hardware.memory


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


@pytest.mark.parametrize(('nodes', 'd', 'width', 'r'), [(256, 1024, 2560, 2), (512, 2048, 7168, 2)])
def test_a_width_that_d_does_not_divide_is_sharded_over_fewer_devices_and_copied(nodes, d, width, r):
    """Modalities trained a model with width 2560 on 1,024 devices. JAX shards only what divides evenly."""
    model = {'n_layers': 32, 'd_model': width, 'attention': {'n_heads': 32}, 'feed_forward': {'d_ff': 4 * width}}
    of_model = values({'family': 'llama'} | model, 2 * d, 4096, mesh={'d': d})
    hardware = parse_topology('a100x4', nodes)
    refused = make_plan(from_values(of_model), hardware, lambda text: None)
    assert refused.now is None
    assert f'use mesh.d={d // r} mesh.r={r}' in refused.why
    mesh = {'r': r, 'd': d // r}
    one = Planner(from_values(of_model | {'mesh': mesh}), hardware, lambda text: None).as_configured()
    assert one.memory.total < hardware.memory
    meshes = [found.mesh for found in refused.found]
    assert all(width % mesh['d'] == 0 for mesh in meshes)
    assert any(found | mesh == found for found in meshes)
