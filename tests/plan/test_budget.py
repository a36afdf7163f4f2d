"""What a budget pays for, against sums done by hand and published runs."""

import json
import re

import pytest

from decoders import gpt
from pretrax.cli.plan import Asked, plan
from pretrax.config import from_values
from pretrax.cost.scaling_laws import PUBLISHED
from pretrax.cost.teacher import n_params
from pretrax.cost.topology import parse_topology
from pretrax.errors import UserError
from pretrax.plan.budget import buy, parse_budget, read_law, sizes_for

NODES = parse_topology('h100x8', 8)
SPEED = 1.26e9
LLAMA = {
    'name': 'budget',
    'steps': 1,
    'model': {'preset': 'llama2-7b'},
    'data': {'name': 'synthetic', 'vocab_size': 32000},
    'batch': {'tokens': 2**22, 'sequence_length': 4096},
    'optimizer': {'learning_rate': 3e-4},
}


@pytest.mark.parametrize(
    ('text', 'flops', 'seconds'),
    [
        ('5000 h100-hours', 0, 5000 / 64 * 3600),
        ('5,000 H100-hours', 0, 5000 / 64 * 3600),
        ('1e21 flops', 1e21, 0),
        ('2.5 days', 0, 216_000),
        ('12hours', 0, 43_200),
    ],
)
def test_budgets_in_flops_chip_hours_and_time(text, flops, seconds):
    assert parse_budget(text, NODES) == pytest.approx((flops, seconds))


def test_an_ironwood_chip_is_two_devices_and_one_chip_of_a_budget():
    hardware = parse_topology('tpu7x:4x4x4')
    assert hardware.n_devices == 128
    assert parse_budget('64 tpu7x-hours', hardware) == (0, 3600)


@pytest.mark.parametrize(
    'text', ['5000', '5000 a100-hours', 'many days', '-3 days', '0 days', '1e21', '3 weeks', '1e999 days', '_1 days']
)
def test_a_budget_that_is_no_amount_names_the_units(text):
    with pytest.raises(UserError, match=r'expected h100-hours, flops, days or hours, such as "5000 h100-hours"'):
        parse_budget(text, NODES)


def test_the_published_law_is_near_hoffmann_for_the_compute_of_gopher():
    # Hoffmann et al. 2022, table 3: 67B parameters and 1.5T tokens for 5.76e23 FLOPs; 10B and 205.1B for 1.23e22
    for flops, params in (5.76e23, 67e9), (1.23e22, 10e9):
        low, high = PUBLISHED.interval(flops, 1.0) or (0, 0)
        assert low < params < 1.02 * high
        assert PUBLISHED.optimum(flops) == pytest.approx(params, rel=0.1)
    assert PUBLISHED.values['a'] == pytest.approx(0.5126, abs=1e-4)  # Besiroglu et al. 2024, section 3


def test_sizes_are_those_of_the_configuration_at_its_own_number_of_parameters():
    arch = gpt(n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_head=128, d_ff=14336, vocab_size=32000)
    own = ['n_layers=32', 'd_model=4096', 'attention.n_heads=32', 'attention.n_kv_heads=8', 'attention.d_head=128']
    assert sizes_for(arch, n_params(arch)) == [f'model.{one}' for one in (*own, 'feed_forward.d_ff=14336')]
    half = dict(one.removeprefix('model.').split('=') for one in sizes_for(arch, n_params(arch) / 8))
    assert (half['d_model'], half['feed_forward.d_ff']) == ('2048', '7168')
    assert half['attention.n_kv_heads'] == '4'
    for params in 3e8, 1e9, 3e9, 2e10, 1e11, 4e11:
        found = {
            key: int(value) for key, value in (one.removeprefix('model.').split('=') for one in sizes_for(arch, params))
        }
        assert n_params(arch.replace(found)) == pytest.approx(params, rel=0.05)
        assert found['attention.n_heads'] == 4 * found['attention.n_kv_heads'] == found['d_model'] // 128
        assert 0.7 < found['n_layers'] / found['attention.n_heads'] <= 1.05


def test_experts_and_models_that_are_mostly_vocabulary_are_refused():
    with pytest.raises(UserError, match='dense decoders'):
        sizes_for(gpt(n_experts=4), 1e9)
    with pytest.raises(UserError, match='smaller vocabulary'):
        sizes_for(gpt(vocab_size=1_000_000), 1e6)


@pytest.mark.parametrize(
    ('hardware', 'in_machine', 'in_host'), [(NODES, 8, ['optimizer']), (parse_topology('v5e-64'), 4, [])]
)
def test_flops_pay_for_six_times_parameters_and_tokens(hardware, in_machine, in_host):
    bought = buy(from_values(LLAMA | {'memory': {'offload': in_host}}), hardware, (2e21, 0), PUBLISHED, 1e6, SPEED)
    assert 6 * bought.params * bought.steps * 2**22 == pytest.approx(2e21, rel=1 / bought.steps)
    assert bought.params == pytest.approx(PUBLISHED.optimum(2e21), rel=0.1)
    shards = bought.best.mesh['d'] * bought.best.mesh['t'] * bought.best.mesh['p']
    state = 4 * 3 * bought.params * min(in_machine / shards, 1)  # of a machine: weights and two moments, f32
    assert bought.source.written == pytest.approx(state / SPEED, rel=0.05)
    trains = bought.steps * bought.best.prediction.seconds
    assert bought.seconds == pytest.approx(trains / bought.source.best_goodput(1e6))


def test_days_are_spent_with_what_failures_take():
    for between in 1e9, 1e4:
        bought = buy(from_values(LLAMA), NODES, (0, 86400 * 10), PUBLISHED, between, SPEED)
        assert bought.seconds == pytest.approx(86400 * 10, rel=0.01)
        assert bought.params == pytest.approx(PUBLISHED.optimum(6 * bought.params * bought.steps * 2**22), rel=0.1)
    with pytest.raises(UserError, match='makes no progress'):
        buy(from_values(LLAMA), NODES, (0, 86400 * 10), PUBLISHED, 2, SPEED)  # a restart takes longer


def test_the_hours_of_llama_2_buy_the_flops_of_llama_2_or_half_as_many_more():
    # Touvron et al. 2023, arXiv:2307.09288, table 2: 184,320 hours of A100 80GB; 6.74B parameters, 2T tokens
    hardware = parse_topology('a100x8', 128)
    bought = buy(from_values(LLAMA), hardware, parse_budget('184320 a100-hours', hardware), PUBLISHED, None, SPEED)
    assert 1 <= 6 * bought.params * bought.steps * 2**22 / (6 * 6.74e9 * 2e12) < 1.5


def test_a_law_of_ones_own_runs(tmp_path):
    sizes = [
        (n, flops / 6 / n)
        for flops in (1e19, 1e20, 1e21)
        for n in (2e7 * (flops / 1e19) ** 0.5 * 3**i for i in range(5))
    ]
    points = [{'params': n, 'tokens': d, 'loss': 1.69 + 406.4 / n**0.34 + 410.7 / d**0.28} for n, d in sizes]
    (tmp_path / 'fit.json').write_text(json.dumps({'points': points, 'fits': [{'approach': 2}]}))
    law = read_law(str(tmp_path / 'fit.json'))
    assert law.optimum(6e21) == pytest.approx(4.1e9, rel=0.1)  # docs/research.md
    assert law.interval(6e21) is not None
    with pytest.raises(UserError, match='--law'):
        read_law(str(tmp_path / 'other.json'))


def test_the_plan_prints_cost_tokens_layout_and_interval(capsys, tmp_path):
    (tmp_path / 'run.yaml').write_text(json.dumps(LLAMA))
    plan(
        Asked(
            config=str(tmp_path / 'run.yaml'),
            topology='h100x8',
            slices=8,
            budget='5000 h100-hours',
            price=2.5,
            mttf=100.0,
        )
    )
    lines = capsys.readouterr().out.splitlines()
    hours, cost = re.findall(r'([\d,]+) h100-hours, ([\d,]+) at 2.5 per chip-hour', lines[0])[0]
    assert int(hours.replace(',', '')) == pytest.approx(5000, rel=0.01)
    assert int(cost.replace(',', '')) == pytest.approx(12_500, rel=0.01)
    assert [line.split(':')[0] for line in lines] == ['time', 'model', 'tokens', 'step', 'lost', 'change']
    assert 'published runs on H100 SXM' in lines[3]
    assert 'a failure every 4 d 4 h' in lines[4]
    assert re.search(r'model.n_layers=\d+ .* mesh.* batch.micro=\d+ .* steps=\d+ .*checkpoint.minutes=', lines[5])
    with pytest.raises(UserError, match='need --budget'):
        plan(Asked(config=str(tmp_path / 'run.yaml'), topology='h100x8', price=2.5))
    plan(Asked(config=str(tmp_path / 'run.yaml'), topology='h100x8', mttf=2.0))
    goodput = capsys.readouterr().out.rpartition('\n\n')[2].splitlines()
    assert 'a failure every 2 h 0 min' in goodput[0]
    assert [line.split()[0] for line in goodput[1:]] == ['storage,', 'storage,', 'memory,', 'memory']
    with pytest.raises(UserError, match='without --budget'):
        plan(Asked(config=str(tmp_path / 'run.yaml'), topology='h100x8', budget='5000 h100-hours', verify=True))
