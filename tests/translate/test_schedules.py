"""Points with straight lines between them follow the cosine."""

import numpy as np
import pytest

from pretrax.translate.translation import cosine_points


@pytest.mark.parametrize(('end', 'after'), [(8000, 0.1), (8000, 0.0), (20000, 0.1)])
def test_points_are_near_the_cosine(end, after):
    points = np.asarray(cosine_points(500, end, 10000, 0.1, after))
    assert (np.diff(points[:, 0]) > 0).all()
    steps = np.arange(500, 10000)
    part = (steps - 500) / (end - 500)
    cosine = np.where(part <= 1, 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * part)), after)
    drawn = np.interp(steps, points[:, 0], points[:, 1])
    assert np.abs(drawn - cosine).max() < 1.1e-3 * 0.9 + (0 if after else 1e-3)
