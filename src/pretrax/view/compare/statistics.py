"""How sure a difference between two arms of runs is.

Welch 1947 (Biometrika 34) for arms with different noise, Student's paired t for runs that see the same batches, Geyer
1992 (Statistical Science 7, section 3.3) for the mean of numbers that follow each other. docs/see.md says when each is
used.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A confidence interval of the difference B - A."""

    estimate: float
    low: float
    high: float
    degrees: float  # degrees of freedom of Student's t; infinite for a normal distribution

    @property
    def half(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2


def welch(a: Sequence[float], b: Sequence[float], confidence: float) -> Interval | None:
    """The interval of the difference of two means whose noise may differ. None: fewer than two numbers of either."""
    if min(len(a), len(b)) < 2:
        return None
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (a, b)]
    variance = sum(parts)
    # Welch 1947, the approximation by Satterthwaite 1946
    weights = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
    degrees = variance**2 / weights if weights else math.inf
    return _interval(float(np.mean(b) - np.mean(a)), math.sqrt(variance), degrees, confidence)


def paired(a: Sequence[float], b: Sequence[float], confidence: float) -> Interval | None:
    """The confidence interval of the mean difference of pairs, `b[i] - a[i]`. None: fewer than two."""
    if len(a) < 2:
        return None
    differences = np.subtract(b, a)
    error = float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return _interval(float(np.mean(differences)), error, len(differences) - 1, confidence)


def pooled(a: Sequence[float], b: Sequence[float], confidence: float) -> Interval | None:
    """The interval of the difference of two means with the same noise (Student's t). One may have one number."""
    degrees = len(a) + len(b) - 2
    if degrees < 1:
        return None
    squares = sum(float(np.sum((np.asarray(values) - np.mean(values)) ** 2)) for values in (a, b))
    error = math.sqrt(squares / degrees * (1 / len(a) + 1 / len(b)))
    return _interval(float(np.mean(b) - np.mean(a)), error, degrees, confidence)


def known_noise(a: Sequence[float], b: Sequence[float], noise: float, confidence: float) -> Interval:
    """The confidence interval of the difference of two means of numbers whose standard deviation is known."""
    error = noise * math.sqrt(1 / len(a) + 1 / len(b))
    return _interval(float(np.mean(b) - np.mean(a)), error, math.inf, confidence)


def series_mean(values: np.ndarray, confidence: float) -> Interval | None:
    """The confidence interval of the mean of numbers that follow and depend on each other. None: fewer than 8.

    Geyer's initial positive sequence: sums of neighboring autocovariances, up to the first that is not positive. The
    degrees of freedom are those of as many independent numbers as give the same error.
    """
    count = len(values)
    if count < 8:
        return None
    centered = values - values.mean()
    spectrum = np.fft.rfft(centered, 2 * count)
    covariances = np.fft.irfft(spectrum * spectrum.conj(), 2 * count)[:count] / count
    pairs = covariances[0 : count // 2 * 2 : 2] + covariances[1::2][: count // 2]
    first_negative = int(np.argmax(pairs <= 0)) if (pairs <= 0).any() else len(pairs)
    variance = max(2 * float(pairs[:first_negative].sum()) - float(covariances[0]), float(covariances[0]) / count)
    independent = count * float(covariances[0]) / variance if variance else math.inf
    degrees = max(1.0, min(independent, count) - 1)
    return _interval(float(values.mean()), math.sqrt(variance / count), degrees, confidence)


def first_below(x: np.ndarray, y: np.ndarray, level: float) -> float | None:
    """The x at which a curve first is at or below a level, interpolated between its points; None: nowhere."""
    below = np.flatnonzero(y <= level)
    if not len(below):
        return None
    i = int(below[0])
    if i == 0 or y[i] == level:
        return float(x[i])
    return float(x[i - 1] + (x[i] - x[i - 1]) * (y[i - 1] - level) / (y[i - 1] - y[i]))


def _interval(estimate: float, error: float, degrees: float, confidence: float) -> Interval:
    from scipy import special

    probability = (1 + confidence) / 2
    quantile = float(special.ndtri(probability) if math.isinf(degrees) else special.stdtrit(degrees, probability))
    return Interval(estimate, estimate - quantile * error, estimate + quantile * error, degrees)
