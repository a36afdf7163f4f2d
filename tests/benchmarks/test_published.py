"""benchmarks/published.yaml is consistent with itself, a third is held out, and a row is planned as by `pretrax plan`.

The checks of the table use sizes, batches and peaks only: their formulas are written here again.
"""

import dataclasses
import hashlib
import json
import re

import pytest
import yaml

from benchmark_scripts import benchmark_script
from pretrax.config import from_values
from pretrax.cost.devices import Reach, known
from pretrax.cost.links import link_of
from pretrax.cost.topology import parse_topology
from pretrax.errors import UserError
from pretrax.model.families import PRESETS
from pretrax.plan.plan import make_plan
from published import ABOUT, PUBLISHED

benchmark = benchmark_script('published')
ROWS = benchmark.read_rows()
COMPLETE = [row for row in ROWS if row.incomplete is None]
# Latent attention, windows or multi-token prediction: the formula of `flops` is too simple.
SPECIAL = {'deepseek-v3', 'gpt-oss-120b', 'gemma3-12b', 'gemma4-31b'}


def name_of(row):
    return f'{row.source}: {row.id}'


def layer_params(sizes, active=None):
    """Matrices of all layers. `active`: of the experts that a token uses."""
    d_head = sizes.get('d_head', sizes['width'] // sizes['heads'])
    attention = 2 * sizes['width'] * d_head * (sizes['heads'] + sizes['kv_heads'])
    matrices = 2 if sizes.get('family') == 'gpt2' else 3
    experts = sizes.get('experts', 0)
    feed_forward = matrices * sizes['width'] * sizes['hidden'] * ((active or experts) if experts else 1)
    return sizes['layers'] * (attention + feed_forward + experts * sizes['width'])


def flops(row):
    """FLOPs per token, as the source counts them."""
    sizes, (params, attention) = row.sizes, row.counts.split()
    table = sizes['vocabulary'] * sizes['width']
    weights = layer_params(sizes, sizes.get('active'))
    if params == 'matmul':
        weights += table
    elif params == 'all':
        positions = row.length * sizes['width'] if sizes.get('family') == 'gpt2' else 0
        weights += table * (1 if sizes.get('tied') else 2) + positions
    d_head = sizes.get('d_head', sizes['width'] // sizes['heads'])
    times = {'full': 12, 'causal': 6, 'none': 0}[attention]
    return 6 * weights + times * sizes['layers'] * sizes['heads'] * d_head * row.length


def tokens_of(row):
    """Published tokens per second and chip, of whichever number there is; None: only utilization is published."""
    if row.tokens:
        return row.tokens
    if row.samples:
        return row.samples * row.length / row.chips
    return row.batch * row.length / row.step / row.chips if row.step else None


def peak_tflops(row):
    device = next(device for device in known() if device.name == row.chip)
    return device.bf16 / 1e12 * row.devices / row.chips


def test_every_row_names_its_source_and_is_complete_or_says_why_not():
    table = yaml.safe_load(benchmark.TABLE.read_text())
    assert all(source['where'] and source['date'] for source in table['sources'].values())
    assert len({(row.source, row.id) for row in ROWS}) == len(ROWS) > 150
    names = {device.name for device in known()}
    for row in ROWS:
        assert row.chip in names, name_of(row)
        assert row.step or row.tokens or row.samples or row.mfu or row.tflops, name_of(row)
        known_sizes = row.batch and row.length and row.sizes.get('vocabulary')
        assert known_sizes or row.incomplete, name_of(row)
        assert row.precision in (*benchmark.MATMULS, 'nvfp4'), name_of(row)


@pytest.mark.parametrize('row', [row for row in COMPLETE if row.topology], ids=name_of)
def test_the_hardware_of_a_row_has_its_chips(row):
    assert parse_topology(row.topology, row.nodes).n_devices == row.devices
    try:
        mesh = row.mesh
    except UserError:
        assert row.ep > 1  # experts over the devices of tensor parallelism
        return
    shards = mesh['r'] * mesh['d'] * mesh['e']
    assert row.batch % shards == 0
    assert row.micro is None or row.batch // shards >= row.micro


def test_the_sizes_of_a_model_make_the_parameters_of_its_name():
    models = yaml.safe_load(benchmark.TABLE.read_text())['models']
    counted = 0
    for name, sizes in models.items():
        if 'preset' in sizes or 'vocabulary' not in sizes:
            continue
        positions = 2048 * sizes['width'] if sizes['family'] == 'gpt2' else 0
        tables = sizes['vocabulary'] * sizes['width'] * (1 if sizes.get('tied') else 2)
        assert layer_params(sizes) + tables + positions == pytest.approx(sizes['parameters'], rel=0.03), name
        counted += 1
    assert counted > 15


def test_a_preset_has_the_sizes_and_the_parameters_of_the_table():
    presets = yaml.safe_load(PRESETS.read_text())
    for name, sizes in yaml.safe_load(benchmark.TABLE.read_text())['models'].items():
        if 'preset' not in sizes:
            continue
        preset = presets[sizes['preset']]
        found = {
            'layers': preset['n_layers'], 'width': preset['d_model'], 'heads': preset['attention']['n_heads'],
            'kv_heads': preset['attention'].get('n_kv_heads', preset['attention']['n_heads']),
            'hidden': preset['feed_forward']['d_ff'], 'vocabulary': preset['vocab_size'],
        }  # fmt: skip
        assert found == {key: sizes[key] for key in found}, name
        if 'parameters' in sizes:
            preset_count = PUBLISHED.get(sizes['preset']) or ABOUT[sizes['preset']][0]
            assert preset_count == pytest.approx(sizes['parameters'], rel=0.03), name


@pytest.mark.parametrize('row', [row for row in COMPLETE if row.step and row.tokens], ids=name_of)
def test_two_published_speeds_agree(row):
    assert row.step * row.tokens * row.chips == pytest.approx(row.batch * row.length, rel=0.01)


@pytest.mark.parametrize('row', [row for row in ROWS if row.mfu and row.tflops], ids=name_of)
def test_utilization_is_that_of_the_peak(row):
    assert row.tflops / peak_tflops(row) == pytest.approx(row.mfu / 100, rel=0.015)


@pytest.mark.parametrize(
    'row',
    [row for row in COMPLETE if row.counts and row.model not in SPECIAL and tokens_of(row) and (row.mfu or row.tflops)],
    ids=name_of,
)
def test_published_flops_are_those_of_the_published_speed(row):
    published = row.tflops or row.mfu / 100 * peak_tflops(row)
    assert tokens_of(row) * flops(row) / 1e12 == pytest.approx(published, rel=0.03)


def test_a_third_is_held_out_by_the_hash_of_source_and_id():
    assert 0.25 < sum(row.is_held_out for row in ROWS) / len(ROWS) < 0.42
    for row in ROWS:
        digest = hashlib.sha256(f'{row.source}|{row.id}'.encode()).digest()
        assert row.is_held_out == (int.from_bytes(digest, 'big') % 3 == 0)


def test_held_out_rows_are_left_out_unless_they_are_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(
        benchmark, 'compare', lambda row: {'source': row.source, 'id': row.id, 'chip': '', 'why_not': ''}
    )
    ids = []
    for flags in ([], ['--held-out']):
        assert benchmark.main([*flags, '--out', str(tmp_path / 'out.json')]) == 0
        ids.append({(row['source'], row['id']) for row in json.loads((tmp_path / 'out.json').read_text())['rows']})
    assert ids == [
        {(row.source, row.id) for row in ROWS if row.is_held_out == is_held_out} for is_held_out in (False, True)
    ]


def test_a_row_is_planned_as_pretrax_plan_does_it(tmp_path, capsys):
    out = tmp_path / 'out.json'
    assert benchmark.main(['llm-foundry-a100: 7b 8192 8', '--out', str(out)]) == 0
    (row,) = json.loads(out.read_text())['rows']
    config = from_values({
        'name': 'mpt-7b', 'steps': 1, 'data': {'name': 'synthetic', 'vocab_size': 50368},
        'model': {
            'family': 'gpt2', 'n_layers': 32, 'd_model': 4096, 'attention': {'n_heads': 32},
            'feed_forward': {'d_ff': 16384}, 'save': 'none',
        },
        'batch': {'tokens': 128 * 8192, 'sequence_length': 8192, 'micro': 8}, 'mesh': {'d': 8},
        'optimizer': {'name': 'adamw', 'learning_rate': 1e-4},
    })  # fmt: skip
    now = make_plan(config, parse_topology('a100x8'), lambda text: None).now
    assert now is not None
    assert row['predicted'] == pytest.approx(now.prediction.seconds)
    assert row['published'] == pytest.approx(128 * 8192 / 3206 / 8)
    assert row['error'] == pytest.approx(now.prediction.seconds * 3206 * 8 / (128 * 8192) - 1)
    assert f'| A100 SXM 80GB | 1 | {row["error"]:+.0%} |' in capsys.readouterr().out


def test_a_row_is_planned_with_the_sums_and_the_capacity_of_its_program():
    row = next(row for row in ROWS if row.capacity and not row.is_held_out)
    values = benchmark.values(row, 'none')
    assert values['model']['experts'] == {'capacity': 1.25}
    assert values['precision']['reduction'] == 'bf16_r_d'  # MaxText
    others = next(row for row in ROWS if row.source == 'torchtitan-a100')
    assert benchmark.values(others, 'none')['precision']['reduction'] == 'f32'


def test_a_row_has_the_network_of_its_source():
    row = next(row for row in ROWS if row.source == 'modalities-a100')
    assert link_of(benchmark.hardware(row)).between == pytest.approx(400e9 / 8 / 4)  # 400 Gb/s for four GPUs


@pytest.mark.parametrize('source', ['torchtitan-a100', 'modalities-a100', 'dgxc-maxtext'])
def test_a_utilization_gives_the_step_of_the_speed_beside_it(source):
    row = next(row for row in ROWS if row.source == source and row.mfu and not row.is_held_out)
    alone = dataclasses.replace(row, step=None, tokens=None, samples=None)
    planner, _ = benchmark.planned(row)
    seconds = row.batch * row.length / tokens_of(row) / row.chips
    assert benchmark.published_seconds(alone, planner) == pytest.approx(seconds, rel=0.03)


def test_the_manual_has_the_errors_of_the_results():
    rows = json.loads(benchmark.RESULTS.read_text())['rows']
    assert not any(benchmark.is_held_out(row['source'], row['id']) for row in rows)
    manual = (benchmark.HERE.parent / 'docs' / 'scaling.md').read_text()
    assert '\n'.join(benchmark.summary(rows)) in manual


def test_the_picture_is_that_of_the_results():
    rows = json.loads(benchmark.RESULTS.read_text())['rows']
    committed = (benchmark.HERE.parent / 'docs' / 'images' / 'published.svg').read_text()
    now, then = (
        [float(at) for point in re.findall(r'<use [^>]*\b[xy]="([^"]+)"[^>]*\b[xy]="([^"]+)"', picture) for at in point]
        for picture in (benchmark.picture(rows).decode(), committed)
    )
    assert len(now) > 2 * sum('error' in row for row in rows)
    # Versions of Matplotlib may differ by parts of a point.
    assert then == pytest.approx(now, abs=2), 'python benchmarks/published.py --picture docs/images/published.svg'


def test_copies_between_nodes_are_faster_than_shards_over_256_gpus():
    """Modalities' 2.7B on A100: 1.03 s a step with copies, and 1.69 s without."""
    rows = {row.id: row for row in ROWS if row.source == 'modalities-a100'}
    hybrid, full = (benchmark.compare(rows[f'2.7b 256 {name} 2']) for name in ('hybrid', 'full'))
    assert hybrid['published'] < full['published']
    assert hybrid['predicted'] < full['predicted']


def test_intervals_are_those_of_the_results_and_hold_eight_of_ten_rows():
    rows = json.loads(benchmark.RESULTS.read_text())['rows']
    table = yaml.safe_load((benchmark.SOURCE / 'interval.yaml').read_text())
    assert table == benchmark.intervals(rows)
    ratios = [one['published'] / one['predicted'] for one in rows if one['chip'] == 'A100 SXM 80GB' and 'error' in one]
    a100 = table['dense, bf16']['A100 SXM 80GB']
    assert 0.75 < sum(a100['low'] <= ratio <= a100['high'] for ratio in ratios) / len(ratios) < 0.85


def test_a_fit_finds_the_constants_of_steps_that_were_made_with_them(monkeypatch):
    """Two steps of A100s that reach 60 % of their peak in products; the start is 75 %."""
    fixed = {'memory': (0.7, 0.001), 'attention': (0.5, 0.001)}
    monkeypatch.setattr(benchmark, 'START', {'gpu': fixed, 'ampere': {'products': (0.75, 1.0)}})
    steps = []
    for row in [row for row in ROWS if row.source == 'llm-foundry-a100' and row.id in ('3b 2048 8', '1b 2048 8')]:
        step = benchmark.Step(*benchmark.candidates(row), 1.0, 1.0)
        steps.append(dataclasses.replace(step, published=benchmark.seconds_with(step, Reach(0.6, 0.5, 0.7))))
    assert benchmark.fit(steps)['ampere']['products'] == pytest.approx(0.6, rel=0.01)
