"""Learning-rate schedules that end at another step than the run, as points of `schedule: {name: piecewise}`."""

import math

POINTS = 32  # with straight lines between them, no rate differs from the cosine by more than 0.1% of the peak


def cosine_points(warmup: int, end: int, steps: int, final: float, after: float) -> list[list[float]]:
    """[[step, multiplier], ...]: half a cosine from 1 at `warmup` to `final` at `end`, then `after` until `steps`.

    Points after the last step are left out, except the first of them.
    """
    share = [number / POINTS for number in range(POINTS + 1)]
    at = [round(warmup + part * (end - warmup)) for part in share]
    height = [final + (1 - final) * 0.5 * (1 + math.cos(math.pi * part)) for part in share]
    points = dict(zip(at, height, strict=True)) | ({end + 1: after} if end < steps else {})
    last = next((step for step in points if step >= steps), steps)
    return [[step, round(value, 6)] for step, value in points.items() if step <= last]
