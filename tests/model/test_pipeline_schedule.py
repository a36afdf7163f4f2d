"""What the report says about a schedule of pipeline stages."""

import pytest

from pretrax.model.pipeline_schedule import PipelineSchedule, choose_schedule


@pytest.mark.parametrize(
    ('wanted', 'rounds', 'said'),
    [
        ('auto', 1, 'none (mesh.p = 1)'),
        ('1f1b', 1, 'none (mesh.p = 1), so pipeline_schedule has no effect'),
        ('auto', 2, 'none (mesh.p = 1), so pipeline_rounds has no effect'),
        ('interleaved', 2, 'none (mesh.p = 1), so pipeline_rounds and pipeline_schedule have no effect'),
    ],
)
def test_settings_without_effect_are_named_if_there_are_no_stages(wanted, rounds, said):
    assert choose_schedule(wanted, PipelineSchedule(1, rounds, 4), None, None, 16) == (None, said)
