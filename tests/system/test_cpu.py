"""The CPU's peak: plausible, measured once, and no damaged or unwritable cache ever stops a run."""

import itertools
import json

import jax
import pytest

from pretrax.system import cpu


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Small matrices: these tests are about the bookkeeping."""
    monkeypatch.setattr(cpu, 'SIZES', (64,))
    monkeypatch.setattr(cpu, 'SECONDS', 0.01)


def test_a_matrix_product_counts_two_operations_per_multiply_add(monkeypatch):
    """By a clock that ticks once between start and end, the rate is 2 n^3."""
    clock = itertools.count()
    monkeypatch.setattr(cpu.time, 'perf_counter', lambda: float(next(clock)))
    assert cpu.measure(jax.devices()[0], 'f32') == cpu.measure(jax.devices()[-1], 'bf16') == 2 * 64**3


def test_the_peak_is_measured_once_and_then_read_from_the_cache(tmp_path, monkeypatch):
    first = cpu.measured_cpu(jax.devices(), tmp_path)
    assert 'measured now, kept in' in first.source
    monkeypatch.setattr(cpu, 'measure', lambda *_: pytest.fail('measured a second time'))
    again = cpu.measured_cpu(jax.devices(), tmp_path)
    assert (again.bf16, again.f32) == (first.bf16, first.f32)
    assert 'measured earlier' in again.source


def test_simulated_devices_share_the_peak_of_the_cores(tmp_path, monkeypatch):
    """Twice as many devices on the same cores: half the peak and half the memory each."""
    monkeypatch.setattr(cpu, 'measure', lambda *_: 8e9)
    one, two = (cpu.measured_cpu([jax.devices()[0]] * n, tmp_path) for n in (1, 2))
    assert (one.f32, two.f32) == (8e9, 4e9)
    assert two.memory == one.memory // 2
    assert len(json.loads((tmp_path / 'cpu.json').read_text())) == 1


def test_a_peak_measured_on_a_busy_machine_says_so_and_is_measured_again_when_it_is_idle(tmp_path, monkeypatch):
    def peak(load, speed):
        monkeypatch.setattr(cpu.os, 'getloadavg', lambda: (load * cpu.os.cpu_count(), 0, 0))
        monkeypatch.setattr(cpu, 'measure', lambda *_: speed)
        device = cpu.measured_cpu(jax.devices()[:1], tmp_path)
        return device.f32, 'may be too low' in device.source

    assert peak(3, 1e9) == (1e9, True)
    assert peak(3, 2e9) == (1e9, True)
    assert peak(0, 9e8) == (1e9, False), 'the larger one is nearer to the peak'
    assert peak(0, 3e9) == (1e9, False)
    cpu.forget_peak(tmp_path)
    assert peak(3, 3e9) == (3e9, True)


@pytest.mark.parametrize(
    'damaged',
    [b'', b'{"cut', b'[1, 2]', b'\xff\xfe\x00', b'null', b'{"KEY": {"bf16": "fast"}}', b'{"KEY": {"bf16": 0}}'],
)
def test_a_damaged_cache_is_measured_again_and_replaced(tmp_path, damaged):
    cpu.measured_cpu(jax.devices(), tmp_path)
    path = tmp_path / 'cpu.json'
    (key,) = json.loads(path.read_text())
    path.write_bytes(damaged.replace(b'KEY', key.encode()))
    assert 'measured now' in cpu.measured_cpu(jax.devices(), tmp_path).source
    assert 'measured earlier' in cpu.measured_cpu(jax.devices(), tmp_path).source


def test_an_unwritable_cache_is_reported_and_the_peak_still_measured(tmp_path):
    in_the_way = tmp_path / 'file'
    in_the_way.write_text('not a directory')
    device = cpu.measured_cpu(jax.devices(), in_the_way / 'cache')
    assert device.f32 > 0
    assert 'not kept' in device.source
    assert 'Not a directory' in device.source


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
    cpu.measured_cpu(jax.devices())
    assert (tmp_path / 'xdg' / 'pretrax' / 'cpu.json').exists()
