"""The real steps, compiled for hardware that is not there: what makes them fast is in the program, or it is not.

The plugins for NVIDIA GPUs and TPUs live in an environment of their own, `.cache/deviceless`, made on first use.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope='module')
def python() -> str:
    environment = ROOT / '.cache' / 'deviceless'
    command = ['uv', 'sync', '--quiet', '--locked', '--no-default-groups', '--extra', 'cuda-local', '--extra', 'tpu']
    variables = {**os.environ, 'UV_PROJECT_ENVIRONMENT': str(environment)}
    variables.pop('VIRTUAL_ENV', None)
    subprocess.run(
        [*command, '--python', sys.executable], cwd=ROOT, env=variables, check=True, stdin=subprocess.DEVNULL
    )
    return str(environment / 'bin' / 'python')


def run(python: str, *arguments: str | pathlib.Path, code: int = 0) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ('XLA_FLAGS', 'PYTHONPATH')}
    done = subprocess.run(
        [python, *arguments], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=ROOT
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout


def compiled(python: str, case: str) -> dict:
    return json.loads(run(python, HERE / 'targets.py', case).splitlines()[-1])


def elements(buffer: str) -> tuple[str, int]:
    dtype, dims = re.fullmatch(r'(\w+)\[([\d,]*)\]', buffer).groups()
    count = 1
    for dim in dims.split(','):
        count *= int(dim or 1)
    return dtype, count


@pytest.mark.slow
def test_gpt2_on_an_h200_has_fused_attention_bf16_products_and_no_f32_logits(python):
    facts = compiled(python, 'gpt2-124m on an H200')
    assert {name: n for name, n in facts['calls'].items() if 'fmha' in name} == {
        '__cudnn$fmhaSoftmax': 12, '__cudnn$fmhaSoftmaxBackward': 12,
    }  # fmt: skip
    # Every product, forward and backward, multiplies bf16; weight gradients come out in f32.
    assert set(facts['products']) == {'bf16 x bf16 -> bf16', 'bf16 x bf16 -> f32'}
    weights = 12 * 4 + 1  # q, k, v (one product), o, up, down in each layer, and the tied head
    assert facts['products']['bf16 x bf16 -> f32'] == weights
    logits = 16 * 1024 * 50304
    large = [b for b in facts['buffers'] if elements(b)[1] >= logits and elements(b)[0] != 'bf16']
    assert large == []
    assert ('bf16', logits) in map(elements, facts['buffers'])  # the reading of buffers does see the logits
    state = 12 * (124_439_808 + (50304 - 50257) * 768)  # weights and two moments, in f32
    assert state <= facts['alias_bytes'] <= state + 4096
    assert facts['donated'] == facts['state_arrays'] > 3 * 14  # every array of the state, the counts too
    assert facts['host_transfers'] == []
    assert facts['temporary_bytes'] < 9.5e9
    # By phase: 6 FLOPs a token and parameter, and of attention 3.5 times the forward products of its causal half
    tokens, M, L = 16 * 1024, 768, 1024
    costs = {phase: flops for phase, (_, flops) in facts['costs'].items()}
    assert costs['products of attention'] == 6 * tokens * 12 * 4 * M**2
    assert costs['products of the feed-forward'] == 6 * tokens * 12 * 8 * M**2
    assert costs['head'] == 6 * tokens * 50304 * M
    assert costs['attention'] == pytest.approx(3.5 * 2 * tokens * 12 * L * M, rel=0.01)
    assert facts['costs'].get('other', [0, 0])[1] == 0


@pytest.mark.nightly
def test_a_1_3b_step_fits_v5e_with_fused_attention_and_gathers_its_weights(python):
    facts = compiled(python, '1.3B on v5e:4x4')
    # The forward kernel, once, and two backward kernels, in a loop over the layers.
    assert facts['calls']['tpu_custom_call'] == 3
    assert facts['collectives']['all-gather d'] > 0
    assert facts['collectives']['reduce-scatter d'] > 0
    assert facts['argument_bytes'] + facts['temporary_bytes'] < 15.75 * 2**30
    assert not [
        b for b in facts['buffers'] if re.search(r'\[(\d+,)*2048,2048\]', b) and elements(b)[1] > 4 * 8 * 2048**2
    ]


@pytest.mark.nightly
def test_fp8_products_are_calls_on_fp8_on_an_h200(python):
    """Two blocks whose all products are fp8, and a head in bf16."""
    facts = compiled(python, 'fp8 on an H200')
    eight = {kinds: n for kinds, n in facts['products'].items() if 'f8' in kinds}
    values, gradients = 'f8e4m3fn', 'f8e5m2'
    assert {frozenset(kinds.split(' -> ')[0].split(' x ')) | {kinds.split(' -> ')[1]} for kinds in eight} == {
        frozenset({values, 'bf16'}), frozenset({values, gradients, 'bf16'}), frozenset({values, gradients, 'f32'}),
    }  # fmt: skip
    assert sum(n for kinds, n in eight.items() if gradients in kinds and kinds.endswith('bf16')) == 2 * 7
    assert sum(n for kinds, n in facts['products'].items() if 'f8' not in kinds) == 3  # those of the head


@pytest.mark.nightly
@pytest.mark.parametrize('gpu', ['h100x4', 'b200x4'])
def test_the_experts_of_a_layer_are_one_kernel_a_product_on_gpus(python, gpu):
    """On a mesh. The gate and up products run twice: the backward pass computes them again."""
    facts = json.loads(run(python, HERE / 'experts.py', 'small', gpu, 'd=2', 't=2').splitlines()[-1])
    layers, forward, again, backward = 2, 3, 2, 6
    assert facts['calls']['__gpu$xla.gpu.triton'] == layers * (forward + again + backward)
    tokens, of_each, width, d_ff = 4 * 2048 // 2, 2, 512, 1024 // 2
    least = 2 * tokens * of_each * width * d_ff * layers * (forward + again + backward)
    assert least <= facts['flops'] <= 1.25 * least  # blocks that are not full, and the router


@pytest.mark.nightly
def test_int8_products_sum_in_i32_on_v5e_and_what_is_offloaded_lies_in_host_memory(python):
    facts = compiled(python, 'int8 on v5e:2x2')
    assert facts['host_transfers'] != []  # what is not there on a GPU whose state is on the device
    assert facts['sums']['s8 x s8 -> s32'] >= 3 * 7  # of a block, which is a loop; more, where it is computed again
    assert facts['sums']['bf16 x bf16 -> f32'] <= 1  # only the head's weight has a gradient from a product in bf16
    n_params = 2 * 1024 * 512 + 2 * (4 * 512**2 + 3 * 512 * 1024)
    share = n_params // 4
    # The weights stay on the device, 4 bytes each; the moments, 8 bytes each, do not.
    assert facts['argument_bytes'] < 5 * share
    assert 8 * share <= facts['host_argument_bytes'] < 8.2 * share
    tokens = 8 * 512 // 2
    offloaded = 2 * 2 * tokens * (512 // 2 + 2 * 1024 // 2)  # layers, bytes: the input, up and gate, over t
    assert (
        offloaded <= facts['host_temporary_bytes'] < offloaded + 8.2 * share
    )  # the new moments, before they replace the old


@pytest.mark.nightly
@pytest.mark.parametrize(
    ('case', 'kernel', 'call'),
    [
        ('an H200', 'pallas-gpu (the kernel for gpu)', '__gpu$xla.gpu.triton'),
        ('v5e:2x2', 'pallas-tpu (the kernel for tpu)', 'tpu_custom_call'),
    ],
)
def test_tokens_are_written_by_a_kernel_and_into_the_cache_in_place(python, case, kernel, call):
    facts = json.loads(run(python, HERE / 'serving.py', case).splitlines()[-1])
    assert facts['kernel'] == kernel
    assert facts['calls'][call] == 3  # layers
    assert facts['temporary_bytes'] < facts['layer_bytes'] / 10


@pytest.mark.nightly
def test_a_step_too_large_for_a_tpu_is_told_with_its_largest_arrays_and_what_to_change(python, tmp_path):
    (tmp_path / 'large.yaml').write_text(
        'name: large\nsteps: 3\n'
        'model: {n_layers: 2, d_model: 512, attention: {n_heads: 4}, feed_forward: {d_ff: 2048}, layers: unroll}\n'
        'data: {name: synthetic, vocab_size: 32000}\nbatch: {tokens: 4194304, sequence_length: 2048}\n'
        'optimizer: {learning_rate: 1e-3}\nmesh: {d: 4}\n'
    )
    command = pathlib.Path(python).parent / 'pretrax', 'compile', tmp_path / 'large.yaml', '--topology=v5e:2x2'
    printed = run(python, *command, code=1)
    tokens = 4194304 // 4
    logits, kept = 2 * tokens * 32000, 2 * 2 * tokens * (5 * 512 + 2 * 2048)  # q k v attention attention_out; up gate
    needed = float(re.search(r'DOES NOT FIT: ([\d.]+) GB per device', printed)[1])
    assert logits + kept <= 1e9 * needed <= 1.2 * (logits + kept)
    largest = printed.partition('parts of the temporaries')[2].splitlines()[1]
    assert largest.split()[0] == 'logits'
    assert re.search(r'batch.micro=256 .* saves [\d.]+ GB', printed)


@pytest.mark.nightly
def test_a_row_of_the_recorded_memory_compiles_to_what_was_recorded(python, tmp_path):
    name, results = '0.5B, 4 passes', tmp_path / 'memory.json'
    run(python, ROOT / 'benchmarks' / 'memory.py', name, '--out', results)
    recorded = json.loads((ROOT / 'benchmarks' / 'results' / 'memory.json').read_text())
    found = json.loads(results.read_text())
    assert found['rows'][name]['total'] == pytest.approx(recorded['rows'][name]['total'], rel=0.02)


@pytest.mark.nightly
def test_a_plan_is_verified_by_the_compiler(python, tmp_path):
    (tmp_path / 'small.yaml').write_text(
        'name: small\nsteps: 3\n'
        'model: {n_layers: 2, d_model: 1024, attention: {n_heads: 8}, feed_forward: {d_ff: 4096}}\n'
        'data: {name: synthetic, vocab_size: 4096}\nbatch: {tokens: 32768, sequence_length: 1024}\n'
        'optimizer: {learning_rate: 1e-3}\n'
    )
    pretrax, cache = pathlib.Path(python).parent / 'pretrax', f'XDG_CACHE_HOME={tmp_path}'
    command = cache, pretrax, 'plan', tmp_path / 'small.yaml', '--topology=h200', '--verify'
    lines = run('env', *command).splitlines()
    rows = [line for line in lines if ', fits' in line]
    assert len(rows) == 3
    errors = [float(re.search(r'([+-]\d+)%', row)[1]) for row in rows]
    assert max(map(abs, errors)) <= 15
    entry = json.loads((tmp_path / 'pretrax' / 'plan.json').read_text())
    assert [len(choices) for choices in entry.values()] == [3]
    again = run('env', *command).splitlines()
    assert [line for line in again if ', fits' in line] == rows
    assert sum(' compiled ' in line and 'model.save' in line for line in again) == 3


@pytest.mark.nightly
def test_a_row_of_the_scaling_tables_compiles_to_what_was_recorded(python):
    name = '1024b 1x v5p-12288'
    found = json.loads(run(python, ROOT / 'benchmarks' / 'scale.py', '--one', name).splitlines()[-1])
    assert found['fits']
    recorded = json.loads((ROOT / 'benchmarks' / 'results' / 'scale.json').read_text())[name]
    assert found['bytes'] == pytest.approx(recorded['bytes'], rel=0.02)
    for seconds in ('compute', 'communication', 'exposed'):
        assert found['schedule'][seconds] == pytest.approx(recorded['schedule'][seconds], rel=0.02), seconds


@pytest.mark.nightly
@pytest.mark.parametrize(
    ('topology', 'default', 'chosen'),
    [
        ('v4:8x8x4', {'all-reduce': 2}, {'all-gather': 1, 'all-reduce': 1}),
        ('v6e:16x16', {'all-gather': 1, 'all-reduce': 1}, {'all-gather': 1, 'reduce-scatter': 1}),
    ],
)
def test_options_turn_all_reduces_over_a_slice_into_gathers_and_scatters(python, topology, default, chosen):
    found = json.loads(run(python, HERE / 'options.py', topology).splitlines()[-1])
    assert found == {'topology': topology, 'default': default, 'chosen': chosen}


@pytest.mark.nightly
def test_gradients_in_bf16_over_r_are_still_summed_in_f32_over_d(python):
    """Between two v5e-256. XLA for TPUs may otherwise move the rounding ahead of the sum over d."""
    assert json.loads(run(python, HERE / 'reduction.py').splitlines()[-1]) == {'over d': ['f32'], 'over r': ['bf16']}
    assert json.loads(run(python, HERE / 'reduction.py', 'd').splitlines()[-1]) == {
        'over d': ['bf16'],
        'over r': ['bf16'],
    }


def schedule_of(python: str, name: str) -> tuple[dict, list[dict]]:
    result = json.loads(run(python, HERE / 'schedules.py', name).splitlines()[-1])
    return result['milliseconds'], result['rows']


@pytest.mark.nightly
def test_gradients_are_scattered_and_weights_gathered_behind_work_on_v5p(python):
    """Llama 3 8B over 256 chips: by XLA's defaults all of it is all-reduces that wait."""
    _, rows = schedule_of(python, '8B on v5p')
    over_d = [row for row in rows if row['axes'] == 'd']
    total = sum(row['bytes'] for row in over_d)
    assert sum(row['bytes'] for row in over_d if row['kind'] == 'all-reduce') < 0.001 * total
    assert {row['kind'] for row in over_d} == {'all-gather', 'reduce-scatter', 'all-reduce'}
    assert sum(row['behind'] for row in over_d) > 0.8 * total


@pytest.mark.nightly
def test_sums_between_nodes_are_behind_the_backward_pass(python):
    times, rows = schedule_of(python, '8B on four nodes')
    over_r = [row for row in rows if 'r' in row['axes'].split()]
    assert sum(row['exposed'] for row in over_r) < 0.5 * sum(row['seconds'] for row in over_r)
    assert times['exposed'] < 0.1 * times['compute']


@pytest.mark.nightly
@pytest.mark.parametrize(('hardware', 'sharded', 'repeated'), [('64 x H100', 8, 8), ('v5p-256', 128, 1)])
def test_an_update_of_muon_is_a_small_share_of_a_step_of_8b(python, hardware, sharded, repeated):
    """A step of 1,048,576 tokens. It takes 20 seconds of CPU for GPUs and 90 for TPUs."""
    facts = json.loads(run(python, HERE / 'updates.py', f'Muon, bf16, {hardware}').splitlines()[-1])
    matrices = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    to_owners = 2 * matrices / (sharded * repeated) * (1 - 1 / sharded)
    between_replicas = 2 * matrices / sharded * (1 - 1 / repeated)
    assert 2 * to_owners + between_replicas <= facts['sent'] <= 1.5 * (2 * to_owners + between_replicas)
    assert facts['update'] + facts['exposed'] <= 0.05 * facts['step']
    assert facts['exposed'] <= 0.01 * facts['step']
    assert facts['largest'] <= 2 * matrices / 32
