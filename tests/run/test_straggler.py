"""A process whose data are slow makes the others wait: it is named."""

import pytest

from launched import PLUGIN, Launched, write_run
from pretrax.run.step_metrics import slow_one


@pytest.mark.parametrize(
    ('own', 'slow'),
    [
        ([0.1, 0.1, 1.8, 0.2], 2),
        ([1.0, 0.1], 0),
        ([0.1, 0.12, 0.11], None),
        ([0.9, 0.9, 0.95], None),
        ([0.1, 0.5], None),
    ],
)
def test_who_takes_a_fifth_of_a_step_longer_than_the_others_is_slow(own, slow):
    assert slow_one(own, 2.1) == slow


@pytest.mark.slow
def test_the_process_that_sleeps_is_named(tmp_path):
    config = write_run(tmp_path, faults={'heartbeat_seconds': 60})
    sleeping = "time.sleep(0.5 if os.environ.get('JAX_PROCESS_ID') == '1' else 0)"
    (tmp_path / 'plugin.py').write_text(PLUGIN.replace('time.sleep(0.02)', sleeping))
    with Launched(config, tmp_path / 'run', '-n', '2', 'steps=41') as run:
        assert run.wait() == 0, run.said
    lines = [line for line in run.said.splitlines() if ' is slow: ' in line]
    assert lines, run.said
    assert all('process 1 is slow: ' in line for line in lines)
