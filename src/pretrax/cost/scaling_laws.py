"""Scaling laws: the best sizes of a model and of its data for a budget of FLOPs.

The three approaches of Hoffmann et al. 2022 (arXiv:2203.15556, section 3), with intervals from the bootstrap. N
parameters, D tokens, C = 6 N D training FLOPs, L the final validation loss in nats per token. Every fit gives N_opt(C),
and D_opt(C) = C / (6 N_opt(C)).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pretrax.errors import UserError

DELTA = 1e-3  # of the Huber loss, on log L; appendix D.2
_STARTS = {
    'a': (0, 5, 10, 15, 20, 25),
    'b': (0, 5, 10, 15, 20, 25),
    'e': (-1, -0.5, 0, 0.5, 1),
    'alpha': (0, 0.5, 1, 1.5, 2),
    'beta': (0, 0.5, 1, 1.5, 2),
}
_MINIMIZED = 12  # of the 4,500 starts, those with the lowest loss
_COSTS = 200  # points of the envelope
_SAME_BUDGET = 0.15  # part by which the FLOPs of runs with one budget may differ


@dataclasses.dataclass(frozen=True)
class Point:
    """A finished run."""

    params: float  # N
    tokens: float  # D, at the end of the run
    loss: float  # L, at the end of the run
    curve: tuple[tuple[float, float], ...] = ()  # (tokens, loss) pairs during the run; () if it is not known

    @property
    def flops(self) -> float:
        """C = 6 N D."""
        return 6 * self.params * self.tokens


@dataclasses.dataclass(frozen=True)
class Fit:
    """The result of one approach."""

    approach: int  # 1, 2 or 3
    # What was fitted, by name: the exponent `a` of N_opt = k C^a, and for approach 3 also E, A, B, alpha, beta
    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]  # (low, high) of each value, from the bootstrap; {} without one
    optimum: Callable[[float], float]  # N_opt of a budget in FLOPs
    optima: list[tuple[float, float]]  # the (C, N_opt) through which the power law goes; [] for approach 3
    samples: list[Callable[[float], float]]  # N_opt as a function of C for each sample of the bootstrap

    def interval(self, flops: float, confidence: float = 0.95) -> tuple[float, float] | None:
        """The interval of N_opt for a budget; None without a bootstrap."""
        if not self.samples:
            return None
        low, high = np.quantile([of(flops) for of in self.samples], [(1 - confidence) / 2, (1 + confidence) / 2])
        return float(low), float(high)

    def loss(self, params: float, tokens: float) -> float | None:
        """The predicted loss, of approach 3; None for the others."""
        if self.approach != 3:
            return None
        v = self.values
        return v['E'] + v['A'] / params ** v['alpha'] + v['B'] / tokens ** v['beta']


def fit(points: Sequence[Point], approach: int, bootstrap: int = 100, seed: int = 0, confidence: float = 0.95) -> Fit:
    """Fits one approach.

    Args:
        points: finished runs.
        approach: 1: the envelope of the training curves. 2: parabolas through runs of equal FLOPs. 3: L(N, D) = E +
            A/N^alpha + B/D^beta, by the Huber loss of log L, minimized by L-BFGS from the best of a grid of starts.
        bootstrap: number of samples of runs, with replacement; 0: no intervals.
        seed: seed of the bootstrap.
        confidence: confidence of the intervals, which are quantiles of the samples.

    Raises:
        UserError: the points do not determine the fit; the message says what is missing.
    """
    one = {1: _envelope, 2: _parabolas, 3: _parametric}[approach]
    values, optima = one(points, None)
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(bootstrap):
        chosen = _resampled(points, approach, random)
        try:
            samples.append(one(chosen, values)[0])
        except UserError:  # this sample has too few different runs
            continue
    if bootstrap and len(samples) < max(10, bootstrap / 2):
        raise UserError(
            f'approach {approach}: only {len(samples)} of {bootstrap} bootstrap samples determine the fit\n'
            'add runs, or set bootstrap: 0 for a fit without intervals'
        )
    ends = (1 - confidence) / 2, (1 + confidence) / 2
    intervals = {}
    if samples:
        quantiles = {name: np.quantile([sample[name] for sample in samples], ends) for name in values}
        intervals = {name: (float(low), float(high)) for name, (low, high) in quantiles.items()}
    return Fit(approach, values, intervals, _optimum(values), optima, [_optimum(sample) for sample in samples])


def _optimum(values: dict[str, float]) -> Callable[[float], float]:
    """N_opt(C) = k C^a, with k = G 6^-a in approach 3 (eq. 4)."""
    return lambda flops: math.exp(values['log k'] + values['a'] * math.log(flops))


def _resampled(points: Sequence[Point], approach: int, random: np.random.Generator) -> list[Point]:
    """A sample with replacement; of approach 2 within each budget."""
    groups = budgets(points) if approach == 2 else [list(points)]
    return [group[number] for group in groups for number in random.integers(0, len(group), len(group))]


def budgets(points: Sequence[Point]) -> list[list[Point]]:
    """The runs with about equal FLOPs, smallest budget first."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda point: point.flops):
        if groups and point.flops <= (1 + _SAME_BUDGET) * groups[-1][0].flops:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


# Approach 1: for each C, the curve with the lowest loss says which N is best.
def _envelope(points: Sequence[Point], start: Any) -> tuple[dict[str, float], list[tuple[float, float]]]:
    del start
    curves = [(point.params, np.array(point.curve, np.float64)) for point in points if len(point.curve) >= 2]
    if len({params for params, _ in curves}) < 3:
        raise UserError('approach 1 needs the curves of runs with three or more different sizes')
    spans = [(6 * params * curve[0, 0], 6 * params * curve[-1, 0]) for params, curve in curves]
    starts, ends = map(sorted, zip(*spans, strict=True))
    low, high = starts[1], ends[-2]  # where there are two curves
    if not low < high:
        raise UserError('approach 1 needs curves that overlap in FLOPs; train some runs longer')
    optima = []
    for flops in np.geomspace(low, high, _COSTS):
        found = [
            (float(np.interp(math.log(flops), np.log(6 * params * curve[:, 0]), curve[:, 1])), params)
            for (params, curve), (first, last) in zip(curves, spans, strict=True)
            if first <= flops <= last
        ]
        if found:
            optima.append((float(flops), min(found)[1]))
    if len({params for _, params in optima}) < 2:
        raise UserError('approach 1: one size is best at all FLOPs\nadd smaller or larger sizes, or longer runs')
    return _power_law(optima), optima


# Approach 2: for each budget, the minimum of a parabola of L over log N.
def _parabolas(points: Sequence[Point], start: Any) -> tuple[dict[str, float], list[tuple[float, float]]]:
    del start
    optima = []
    for group in budgets(points):
        x, losses = np.log([point.params for point in group]), [point.loss for point in group]
        if len(set(x)) < 3:
            continue
        curvature, slope, _ = np.polyfit(x - x.mean(), losses, 2)
        if curvature > 0:
            best = x.mean() - slope / (2 * curvature)
            if x.min() - 1 <= best <= x.max() + 1:  # not far outside of the sizes, where the parabola says nothing
                optima.append((float(np.mean([point.flops for point in group])), math.exp(best)))
    if len(optima) < 2:
        raise UserError(
            'approach 2 needs two or more budgets, each with a minimum of the loss among three or more sizes\n'
            f'found {len(optima)} of {len(budgets(points))} budgets with one; add smaller or larger sizes'
        )
    return _power_law(optima), optima


def _power_law(optima: Sequence[tuple[float, float]]) -> dict[str, float]:
    """N_opt = k C^a by least squares of the logarithms."""
    flops, params = np.log(np.array(optima).T)
    slope = float(np.polyfit(flops - flops.mean(), params, 1)[0])
    return {'a': slope, 'log k': float(params.mean() - slope * flops.mean())}


# Approach 3: eq. 2 and 3. a = log A, b = log B, e = log E.
def _parametric(points: Sequence[Point], start: dict[str, float] | None) -> tuple[dict[str, float], list]:
    from scipy import optimize

    n, d, y = (np.log([getattr(point, name) for point in points]) for name in ('params', 'tokens', 'loss'))
    if len(set(n)) < 3 or len(set(d)) < 3 or len(set(zip(n, d, strict=True))) < 6:
        raise UserError('approach 3 needs six or more different runs, with three or more sizes and numbers of tokens')
    mean_n, mean_d = n.mean(), d.mean()
    centered = np.stack([n - mean_n, d - mean_d])  # so that log A and alpha hardly depend on each other

    def terms(theta: np.ndarray) -> np.ndarray:
        """log of A/N^alpha, B/D^beta and E, [..., 3, points]; theta is [..., 5]."""
        a, b, e, alpha, beta = np.moveaxis(theta, -1, 0)[..., None]
        return np.stack([a - alpha * centered[0], b - beta * centered[1], e + 0 * n], -2)

    def objective(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The Huber loss of log L [...], and its gradient [..., 5]."""
        logs = terms(theta)
        top = logs.max(-2, keepdims=True)
        weights = np.exp(logs - top)
        total = weights.sum(-2, keepdims=True)
        residual = (top + np.log(total))[..., 0, :] - y
        weights = weights / total
        inside = np.abs(residual) <= DELTA
        value = np.where(inside, 0.5 * residual**2, DELTA * (np.abs(residual) - 0.5 * DELTA)).sum(-1)
        slope = np.clip(residual, -DELTA, DELTA)[..., None, :] * weights
        gradient = np.concatenate([slope.sum(-1), -(slope[..., :2, :] * centered).sum(-1)], -1)
        return value, gradient

    if start is None:
        grid = np.stack(np.meshgrid(*_STARTS.values(), indexing='ij'), -1).reshape(-1, 5).astype(np.float64)
        grid[:, 0] -= grid[:, 3] * mean_n
        grid[:, 1] -= grid[:, 4] * mean_d
        losses = np.concatenate([objective(part)[0] for part in np.array_split(grid, 20)])
        starts = grid[np.argsort(losses, kind='stable')[:_MINIMIZED]]
    else:
        factors = [math.log(start['A']) - start['alpha'] * mean_n, math.log(start['B']) - start['beta'] * mean_d]
        starts = np.array([[*factors, math.log(start['E']), start['alpha'], start['beta']]])
    scale = 1 / DELTA**2  # the objective is of the order of delta^2, below the tolerances of L-BFGS

    def scaled(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(theta)
        return float(value * scale), gradient * scale

    options = {'maxiter': 2000, 'ftol': 1e-13, 'gtol': 1e-7}
    found = [optimize.minimize(scaled, one, jac=True, method='L-BFGS-B', options=options) for one in starts]
    best = min((one for one in found if np.isfinite(one.fun)), key=lambda one: one.fun).x
    log_a, log_b = best[0] + best[3] * mean_n, best[1] + best[4] * mean_d
    log_e, alpha, beta = (float(value) for value in best[2:])
    if not (alpha > 1e-3 and beta > 1e-3 and max(log_a, log_b) < 200):
        raise UserError(
            'approach 3: the runs do not show how the loss falls with both parameters and tokens\n'
            'vary both over a wider range'
        )
    values = _parametric_values(math.exp(log_e), math.exp(log_a), math.exp(log_b), alpha, beta)
    return values, []


def _parametric_values(e: float, a: float, b: float, alpha: float, beta: float) -> dict[str, float]:
    """The values of approach 3, with the exponent and the factor of N_opt (eq. 4)."""
    exponent, log_g = beta / (alpha + beta), math.log(alpha * a / beta / b) / (alpha + beta)
    log_k = log_g - exponent * math.log(6)
    return {'E': e, 'A': a, 'B': b, 'alpha': alpha, 'beta': beta, 'a': exponent, 'log k': log_k}


# The experiments of Hoffmann et al. as Besiroglu et al. 2024 fit them (arXiv:2404.10102). The interval is that of
# published fits to these experiments: also approach 1 (two rows of table 3), and eq. 10 as printed.
_REFIT = _parametric_values(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
_FITS = _REFIT, _power_law([(1.21e20, 1e9), (1.27e26, 1e12)]), _parametric_values(1.69, 406.4, 410.7, 0.34, 0.28)
PUBLISHED = Fit(3, _REFIT, {}, _optimum(_REFIT), [], [_optimum(values) for values in _FITS])
