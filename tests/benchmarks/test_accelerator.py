"""benchmarks/accelerator.py resumes where it stopped, compares the same models, and its JAX side runs from end to end.

The PyTorch side needs PyTorch. The benchmark itself checks its losses.
"""

import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / 'benchmarks'
# Packages that a CUDA machine with JAX, Optax and PyTorch has, as far as the JAX side imports them
THERE = {
    'jax', 'jaxlib', 'numpy', 'optax', 'ml_dtypes', 'opt_einsum', 'scipy', 'absl', 'chex', 'toolz', 'typing_extensions',
    'etils', 'cloudpickle', 'filelock', 'fsspec', 'pygments', 'packaging', 'flatbuffers',
    'zstandard',  # optional for JAX
}  # fmt: skip
CARRIED = {'pydantic', 'pydantic_core', 'annotated_types', 'typing_inspection', 'yaml'}


@pytest.fixture(scope='module')
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))  # as if the script were run
    yield importlib.import_module('accelerator')
    sys.path.remove(str(BENCHMARKS))


class Fake:
    """A stand-in for the processes: answers at once, and records the requests."""

    def __init__(self, loss=1.0, rows_that_fit=99):
        self.asked, self.loss, self.rows_that_fit = [], {'pretrax': 1.0, 'torch': loss}, rows_that_fit
        self.versions = {'jax': '0.11.2'}

    def __call__(self, side, spec, seconds):
        self.asked.append((side, spec))
        if spec['kind'] == 'device':
            return {'platform': 'cuda', 'kind': 'NVIDIA H200', 'memory': 140e9, 'versions': dict(self.versions)}
        if spec['kind'] == 'ceilings':
            return {'matmul': 800e12, 'copy': 4e12}
        if spec['kind'] == 'check':
            return {'losses': [self.loss[side]] * spec['steps']}
        if spec['rows'] / spec.get('passes', 1) > self.rows_that_fit:
            raise sys.modules['accelerator'].NoMemory
        return {
            'tokens_per_second': 100e3 if side == 'pretrax' else 80e3, 'step_seconds': 0.1, 'spread': 0.01,
            'temporary_bytes': 1e9, 'chose': {'attention': 'cudnn'},
        }  # fmt: skip


@pytest.fixture
def with_torch(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, 'find_torch', lambda given: sys.executable)
    monkeypatch.setattr(benchmark, 'busy', lambda: 0.0)


def results(directory):
    (path,) = directory.glob('*.json')
    return json.loads(path.read_text()), path.with_suffix('.md').read_text()


@pytest.mark.usefixtures('with_torch')
def test_a_second_call_measures_only_missing_parts(benchmark, tmp_path):
    out = ['--out', str(tmp_path)]
    assert benchmark.main([*out, 'ceilings', '1.3B, pretrax'], Fake()) == 0
    fake = Fake()
    assert benchmark.main([*out, 'ceilings', '1.3B, ', 'lever: fp8'], fake) == 0
    assert [(side, spec['kind']) for side, spec in fake.asked].count(('pretrax', 'ceilings')) == 0
    ours = [spec for side, spec in fake.asked if (side, spec['kind']) == ('pretrax', 'train')]
    assert [spec.get('matmul') for spec in ours] == [
        'fp8',
        'fp8',
    ]  # at 1.3B and 124M; the default is not measured again
    result, table = results(tmp_path)
    # Ceiling 800 TFLOP/s; 6 (24 (4 M^2 + 3 M F) + V M) + 6 * 24 M L FLOPs per token
    M, F, V, L = 2048, 5504, 50304, 2048
    a_token = 6 * (24 * (4 * M * M + 3 * M * F) + V * M) + 6 * 24 * M * L
    assert f'| 1.3B | pretrax | 16 x 2048 | 100,000 | 100 (± 0.5%) |  | {100e3 * a_token / 800e12:.0%} |' in table
    assert '| 1.3B | PyTorch, compile | 16 x 2048 | 80,000 | 100 (± 0.5%) | 1.25x |' in table
    assert '| fp8 | 1.3B | 100,000 | 1.000x | 1.2x | 1 GB |' in table
    assert '1.3B, pretrax' in result['parts']
    fake = Fake()
    fake.versions = {'jax': '0.12.0'}
    with pytest.raises(benchmark.BenchmarkError, match='has versions'):
        benchmark.main([*out, 'ceilings'], fake)


@pytest.mark.usefixtures('with_torch')
def test_no_part_starts_that_may_exceed_the_time_limit(benchmark, tmp_path, capsys):
    fake = Fake()
    assert benchmark.main(['--out', str(tmp_path), '--limit-seconds', '60', 'ceilings', '124M, pretrax'], fake) == 75
    assert [spec['kind'] for _, spec in fake.asked] == ['device', 'device', 'ceilings']  # 45 s; a model needs 150
    assert 'resumes with 124M, pretrax' in capsys.readouterr().out


@pytest.mark.usefixtures('with_torch')
def test_a_batch_that_does_not_fit_is_split_into_passes(benchmark, tmp_path):
    benchmark.main(['--out', str(tmp_path), '124M, pretrax'], Fake(rows_that_fit=20))
    result, table = results(tmp_path)
    assert result['parts']['124M, pretrax']['result']['passes'] == 4
    assert '| 64 x 1024 in 4 passes |' in table


@pytest.mark.usefixtures('with_torch')
def test_speeds_of_different_models_are_not_compared(benchmark, tmp_path):
    with pytest.raises(benchmark.BenchmarkError, match='do not train the same model: losses differ by 5'):
        benchmark.main(['--out', str(tmp_path)], Fake(loss=1.5))
    assert list(results(tmp_path)[0]['parts']) == ['ceilings']


def test_the_jax_side_imports_only_what_a_cuda_machine_has():
    program = (
        'import sys; before = set(sys.modules); import accelerator_pretrax\n'
        'print(*{name.split(".")[0] for name, m in sys.modules.items() if name not in before and "site-packages" in '
        '(getattr(m, "__file__", None) or "")})'
    )
    done = subprocess.run([sys.executable, '-c', program], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if not name.startswith(('_', 'jax'))}
    assert found - THERE - CARRIED == set()
    assert {'pydantic', 'optax'} <= found


def test_wheels_are_unpacked_next_to_pretrax(benchmark, tmp_path):
    (tmp_path / 'wheels').mkdir()
    with zipfile.ZipFile(tmp_path / 'wheels' / 'carried-1-py3-none-any.whl', 'w') as wheel:
        wheel.writestr('carried/__init__.py', 'x = 1')
    path = benchmark.unpacked(tmp_path / 'wheels', tmp_path / 'site')
    assert (tmp_path / 'site' / 'carried' / '__init__.py').exists()
    assert path.split(':')[:2] == [str(BENCHMARKS.parent / 'src'), str(tmp_path / 'site')]
    with pytest.raises(benchmark.BenchmarkError, match=r'there are no \.whl files'):
        benchmark.unpacked(tmp_path / 'site', tmp_path)


@pytest.mark.slow
def test_the_jax_side_runs_every_kind_of_part_with_toy_shapes(benchmark, tmp_path, monkeypatch):
    ours = importlib.import_module('accelerator_pretrax')
    monkeypatch.setattr(benchmark, 'find_torch', lambda given: None)
    launch = lambda side, spec, seconds: ours.run(spec)  # noqa: E731
    wanted = ['ceilings', '124M, pretrax', 'lever: fp8, 124M', 'kernels 124M', 'decode 124M, batch 1']
    for name in wanted:
        assert benchmark.main(['--tiny', '--seconds', '0.01', '--out', str(tmp_path), name], launch) == 0
    result, table = results(tmp_path)
    failed = {name: part['result']['failed'] for name, part in result['parts'].items() if 'failed' in part['result']}
    assert failed == {}
    assert set(wanted) <= set(result['parts'])
    assert 'Toy shapes' in table
    trained = result['parts']['124M, pretrax']['result']
    assert trained['first_loss'] == pytest.approx(5.95, abs=0.05)  # log(384), the vocabulary
    assert trained['last_loss'] < trained['first_loss']


@pytest.mark.slow
def test_switches_change_the_program_but_not_the_loss(benchmark, monkeypatch):
    ours = importlib.import_module('accelerator_pretrax')
    for module, name in ((ours, 'make_step'), (ours.matmul_module, '_dot'), (ours.loss_module, 'cross_entropy')):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored at the end
    device = {'memory': 0, 'platform': 'cpu'}
    specs = {part.name: part.spec for part in benchmark.parts(device, tiny=True, with_torch=False, seconds=0.01)}
    usual = ours.run(specs['124M, pretrax'])
    for lever in ('state not donated', 'loss differentiated by JAX', 'products differentiated by JAX, 124M'):
        found = ours.run(specs[f'lever: {lever}'])
        assert found['first_loss'] == pytest.approx(usual['first_loss'], abs=2e-3), lever
        assert found['temporary_bytes'] != usual['temporary_bytes'], lever
