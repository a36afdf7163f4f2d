"""The interval of a prediction is that of the published steps of its kind."""

import pytest

from pretrax.cost.devices import known
from pretrax.cost.interval import ALL, Published, published_steps


def test_an_interval_is_the_predicted_time_times_the_quantiles():
    found = Published('H100 SXM', 35, 0.5, 2).interval(0.3)
    assert found == '80% interval 0.15 to 0.6 s, from 35 published runs on H100 SXM'


@pytest.mark.parametrize(('eight', 'experts'), [(False, False), (True, False), (False, True)])
def test_every_device_has_steps_of_each_kind_or_those_of_all_chips(eight, experts):
    for device in known():
        found = published_steps(device.name, 'bf16', eight, experts)
        assert found is not None
        assert found.chip in (device.name, ALL)
        assert found.runs >= 8
        assert 0.3 < found.low < found.high < 5


def test_a_chip_with_many_published_steps_has_its_own_interval_and_f32_none():
    h100, v4 = (published_steps(name, 'bf16', False, False) for name in ('H100 SXM', 'TPU v4'))
    assert (h100.chip, v4.chip) == ('H100 SXM', ALL)
    assert published_steps('H100 SXM', 'f32', False, False) is None
