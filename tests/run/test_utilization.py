"""MFU, by hand from its definition; and no value over 100 %, whatever the peak is."""

import json

import pytest

from pretrax import config_from_values, pretrain
from pretrax.cost.flops import Flops
from pretrax.run.setup import prepare
from pretrax.run.utilization import Utilization
from pretrax.system import cpu
from runs import Quiet


def test_the_useful_work_over_the_peak_of_all_devices():
    utilization = Utilization(Flops(6e9, 9e9), 1e12, 4, '')
    assert utilization(200.0) == {'mfu': pytest.approx(0.3), 'mfu_full': pytest.approx(0.45)}
    assert utilization(500.0) == {'mfu': pytest.approx(0.75)}, 'more than was done: attention is causal'
    assert utilization(1000.0) == {}
    assert utilization.is_exceeded(1000.0)
    assert not utilization.is_exceeded(500.0)
    assert not Utilization(Flops(6e9, 9e9), None, 4, '').is_exceeded(1e9)
    assert '1.5 TFLOP/s per device is more than the peak of 1 TFLOP/s' in utilization.explain_excess(1000.0)


def test_a_run_that_is_faster_than_a_peak_from_a_busy_machine_has_no_mfu(values, tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(cpu, 'measure', lambda *_: 1e3)
    progress = Quiet()
    result = pretrain(config_from_values(values | {'steps': 4, 'schedule': {}}), progress=progress)
    lines = [json.loads(line) for line in (result.run.config.run_dir / 'metrics.jsonl').read_text().splitlines()]
    assert [line['mfu'] for line in lines if 'loss' in line] == [None] * 4
    (said,) = (text for text in progress.said if 'WARNING: mfu' in text)
    assert 'the next run measures it again; log.peak_tflops sets the peak' in said
    assert json.loads((tmp_path / 'pretrax' / 'cpu.json').read_text()) == {}


def test_the_user_may_give_the_peak(values):
    run = prepare(config_from_values(values | {'log': {'peak_tflops': 2.5}}), lambda text: None)
    assert run.mfu.peak == 2.5e12
    (line,) = (line.text for line in run.startup if line.topic == 'mfu')
    assert 'of 2.5 TFLOP/s per device, log.peak_tflops' in line
