"""The file of a scaling study."""

import pytest

from pretrax.errors import UserError
from pretrax.experiments.scaling_file import read_scaling, steps_of


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('approaches: [2]\n', 'has none of them; expected one of points, runs, or base'),
        ('points: a.csv\nruns: [b]\n', 'has points and runs'),
        ('base: a.yaml\n', 'needs sizes and budgets'),
        ('points: a.csv\nbudgets: [1e9]\n', 'applies to a grid'),
        ('points: a.csv\napproaches: [4]\n', 'expected 1, 2 or 3'),
    ],
)
def test_a_mistake_in_the_file_is_refused(tmp_path, text, words):
    (tmp_path / 'fit.yaml').write_text(text)
    with pytest.raises(UserError, match=words):
        read_scaling(tmp_path / 'fit.yaml')


def test_a_budget_is_six_times_parameters_times_tokens():
    assert steps_of(6 * 1000 * 64 * 50, params=1000, batch_tokens=64) == 50
