"""The rounds of a federation: bytes, seconds and memory by hand, and every key is modelled or named."""

import dataclasses
import json

import jax
import pytest

from pretrax import config_from_values, pretrain
from pretrax.cli import main
from pretrax.config.schema import Federation
from pretrax.cost.memory import Memory, shards_on_hosts
from pretrax.plan.federation import LEFT_OUT, Rounds
from pretrax.run.setup import in_island
from runs import BIGRAM, Quiet

VALUES = {
    'name': 'planned',
    'steps': 10,
    'model': {'n_layers': 2, 'd_model': 256, 'attention': {'n_heads': 4}},
    'data': {'name': 'synthetic', 'vocab_size': 512},
    'batch': {'tokens': 2**15, 'sequence_length': 512},
    'optimizer': {'learning_rate': 1e-3},
}
# {key: (other keys, another value)}: changes that change the plan
CHANGES = {
    'islands': ({}, 5),
    'every': ({}, 200),
    'fragments': ({}, 4),
    'delay': ({}, 7),
    'encoding': ({}, 'int8'),
    'keep': ({}, 3),
}


def section(**values):
    return Federation(**{'bucket': 'gs://b', 'islands': 4, 'every': 100, 'fragments': 2, 'delay': 5} | values)


def rounds(numbers=1_000_000, step=0.5, bandwidth=1e6, readers=1.0, **values):
    return Rounds(section(**values), numbers, step, bandwidth, readers)


@pytest.mark.parametrize(
    ('encoding', 'up'),
    [
        ('f32', 4 * 500_000),
        ('bf16', 2 * 500_000),
        ('int8', 7_813 * (64 + 2)),  # 500,000 / 64 blocks, rounded up, each with a scale in bf16
        ('int4', 7_813 * (32 + 2)),
    ],
)
def test_an_island_sends_one_fragment_and_reads_those_of_all_islands(encoding, up):
    assert rounds(encoding=encoding).up == up
    assert rounds(encoding=encoding).down == 4 * up
    assert rounds(encoding=encoding, readers=3.0).down == 12 * up


def test_delay_hides_steps_of_a_round():
    found = rounds()
    assert found.seconds == pytest.approx(1.0 + 4.0)  # 1 MB up, 4 MB down
    assert found.exposed == pytest.approx(5.0 - 5 * 0.5)
    assert found.efficiency == pytest.approx(25.0 / (25.0 + 2.5))
    assert rounds(delay=0).exposed == pytest.approx(5.0)
    assert rounds(delay=20).exposed == 0
    assert rounds(delay=20).efficiency == 1


@pytest.mark.parametrize('encoding', ['f32', 'int8'])
@pytest.mark.parametrize(('fragments', 'delay'), [(1, 0), (2, 0), (2, 5), (4, 20), (4, 24)])
@pytest.mark.parametrize('bandwidth', [2e5, 1e6, 1e9])
def test_the_efficiency_is_that_of_an_island_whose_steps_and_rounds_follow_each_other(
    encoding, fragments, delay, bandwidth
):
    """A clock that runs over 100 rounds, step by step."""
    size = {'f32': 4.0, 'int8': 66 / 64}[encoding] * 1_000_000 / fragments
    exchange, apart, step = (1 + 4) * size / bandwidth, 100 // fragments, 0.5
    clock, pending = 0.0, {}  # {the step that takes a round: when it is there}
    for number in range(1, 100 * apart + 1):
        clock += step
        if number % apart == 0:
            pending[number + delay] = clock + exchange
        clock = max(clock, pending.pop(number, 0.0))
    found = rounds(encoding=encoding, fragments=fragments, delay=delay, bandwidth=bandwidth)
    assert found.efficiency == pytest.approx(100 * apart * step / clock, rel=0.02)


@pytest.mark.parametrize(('encoding', 'fragments'), [('f32', 1), ('bf16', 2), ('int4', 1)])
def test_the_bytes_are_those_that_an_island_sends_and_reads(tmp_path, encoding, fragments):
    """Without the indices, which name and digest the chunks; they do not grow with the weights."""
    section = {'bucket': str(tmp_path / 'bucket'), 'every': 2, 'encoding': encoding, 'fragments': fragments}
    values = VALUES | {'model': BIGRAM, 'run_dir': str(tmp_path / 'run'), 'steps': 6, 'federation': section}
    result = pretrain(config_from_values(values | {'batch': {'tokens': 128, 'sequence_length': 16}}), progress=Quiet())
    numbers = sum(leaf.size for leaf in jax.tree.leaves(result.state.weights))
    contributions = [
        json.loads((tmp_path / f'bucket/rounds/{number}/planned.json').read_bytes()) for number in range(1, 4)
    ]
    indices = [sum(piece['size'] for pieces in one['pieces'].values() for piece in pieces) for one in contributions]
    sent = [one['bytes'] - index for one, index in zip(contributions, indices, strict=True)]
    planned = rounds(numbers=numbers, encoding=encoding, fragments=fragments, islands=1)
    assert sum(sent[:fragments]) == pytest.approx(planned.up * fragments, rel=0.02 if encoding == 'int4' else 1e-3)
    read = [one['took']['bytes'] for one in contributions[1:]]
    assert [n - index for n, index in zip(read, indices, strict=False)] == sent[:-1]


def test_an_all_reduce_in_every_step_sends_gradients_in_f32_around_a_ring():
    assert rounds().all_reduce == pytest.approx(2 * 3 / 4 * 4e6 / 1e6)
    assert rounds(islands=1).all_reduce == 0


def test_the_lines_say_what_is_sent_and_hidden():
    text = '\n'.join(rounds().lines(1000))
    assert '1 MB up, 4 MB down\n' in text
    assert 'a round takes 5 s; federation.delay=5 hides 2.5 s of them; efficiency 90.9%' in text
    assert 'takes 6 s; efficiency 7.7% if no step hides it' in text
    assert '4,000 tokens of all islands' in text
    assert 'every 10 rounds, one island also writes 8 MB' in text
    assert 'the bucket has up to 108 MB: the differences of 20 rounds' in text  # 4 * 20 * 1 MB and 4 + 3 * 8 MB


def test_every_key_changes_the_prediction_or_only_what_it_leaves_out():
    assert set(Federation.model_fields) == {*CHANGES, *(key for keys in LEFT_OUT.values() for key in keys)}
    before = list(rounds().lines(1))
    for key, (others, value) in CHANGES.items():
        assert list(rounds(**others, **{key: value}).lines(1)) != before
    for key, value in {'mixing': 0.25, 'outer_rate': 0.1, 'outer_momentum': 0.1, 'patience': 1.0, 'name': 'b'}.items():
        assert list(rounds(**{key: value}).lines(1)) == before


@pytest.mark.parametrize(
    ('mesh', 'per_host', 'expected'),
    [
        ({'r': 1, 'd': 8, 'c': 1, 't': 1}, 8, (1, 8, 8)),
        ({'r': 1, 'd': 16, 'c': 1, 't': 2}, 8, (4, 8, 32)),
        ({'r': 4, 'd': 4, 'c': 1, 't': 1}, 8, (2, 4, 4)),  # both hosts hold all
        ({'r': 2, 'd': 1, 'c': 2, 't': 1}, 8, (1, 1, 1)),
    ],
)
def test_replicas_on_a_host_hold_weights_once(mesh, per_host, expected):
    assert shards_on_hosts(mesh, per_host) == expected


def test_an_island_holds_anchor_momentum_and_what_it_sent_in_host_memory():
    memory = Memory(weights=4_000, moments=0, copies=0, activations=0, gradients=0, head=0, layer=0)
    mesh = {'r': 4, 'd': 4, 'c': 1}  # 16 devices on 2 hosts, each of which holds four shards of 1,000 numbers

    def island(**values):
        return in_island(memory, section(**values), mesh, 8).island * 8  # of a host

    assert island(fragments=1) == 4_000 * 4 * (3 + 4)
    assert island(fragments=2) == 4_000 * 4 * (3 + 2)
    assert island(fragments=2, encoding='int4') == 4_000 * 4 * (4 + 3)
    assert in_island(memory, Federation(islands=3), mesh, 8) == memory
    with_it = in_island(memory, section(), mesh, 8)
    assert with_it.total == memory.total
    assert 'host memory: weights, momentum and differences of the federation' in str(with_it)
    assert dataclasses.replace(with_it, island=0) == memory


def test_the_plan_prints_the_rounds(tmp_path, capsys):
    file = tmp_path / 'a.yaml'
    file.write_text(json.dumps(VALUES | {'federation': {'bucket': 'gs://b', 'islands': 2}, 'mesh': {'d': 8}}))
    with pytest.raises(SystemExit) as ended:
        main(['plan', str(file), '--topology', 'h100x8', '--island-bandwidth', '0.001'])
    out = capsys.readouterr().out
    assert not ended.value.code
    assert 'federation of 2 islands with 1 MB/s each' in out
    assert 'differences of the federation' in out
