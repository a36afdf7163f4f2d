"""benchmarks/products.py with a stand-in for PyTorch."""

import sys

import pytest

from benchmark_scripts import benchmark_script

STAND_IN = 'import sys\nfor line in sys.stdin: print(0.001, flush=True)'  # every product takes a millisecond


@pytest.mark.filterwarnings('ignore:Error writing persistent compilation cache')  # oneDNN's programs cannot be
def test_every_library_multiplies_and_rates_are_flops_per_second(monkeypatch, capsys):
    products = benchmark_script('products')
    monkeypatch.setattr(products, 'torch_python', lambda given: sys.executable)
    monkeypatch.setattr(products, 'TORCH', STAND_IN)
    monkeypatch.setattr(products, 'SHAPES', ((500, 100, 200),))
    monkeypatch.setattr(sys, 'argv', ['products.py', '--rounds', '1', '--seconds', '0.01'])
    products.main()
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith('| product'))
    row = next(line for line in lines if line.startswith('| 500 x 100 x 200'))
    rates = dict(zip(header.strip('| ').split(' | ')[1:], row.strip('| ').split(' | ')[1:], strict=True))
    assert list(rates) == ['XLA, YNNPACK', 'XLA, Eigen', 'XLA, oneDNN', 'PyTorch', 'NumPy']
    assert rates['PyTorch'] == '20'  # 2 x 500 x 100 x 200 in a millisecond
    assert all(float(rate) > 0 for rate in rates.values())
