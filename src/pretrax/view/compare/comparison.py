"""Whether one arm of runs is better than another: final losses, the uncertainty of their difference, tokens saved."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from pretrax.errors import UserError
from pretrax.view.compare.arms import Arm, Difference, arms_of, differences, same_batches
from pretrax.view.compare.statistics import Interval, first_below, known_noise, paired, pooled, series_mean, welch
from pretrax.view.record.run_record import RunRecord

type Verdict = Literal['better', 'worse', 'no difference shown', 'not decided', 'equal', 'not comparable']

LEAST = 10  # points of a window
LARGEST = 1e30  # a loss beyond it counts as infinite, since the squares of differences would overflow


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compare, and how."""

    key: str | None = None  # key of the metrics; None: `val_loss` if all runs have it, else `loss`
    window: float = 0.1  # the part of a run over which training losses are averaged
    confidence: float = 0.95  # confidence of all intervals of a comparison together
    seed_noise: float | None = None  # standard deviation of the final loss between seeds, if it is known
    separate: bool = False  # every run is an arm


class Curve(NamedTuple):
    """The numbers of a key of a run; x in tokens, or in steps. NaN and infinity are left out and counted."""

    x: np.ndarray
    y: np.ndarray
    nonfinite: int
    is_finite: bool  # whether the newest number is finite


@dataclasses.dataclass(frozen=True)
class Earlier:
    """How much earlier the better arm reaches the final loss of the other."""

    by: str
    end: float  # x at which the other arm ends
    at: float  # x at which the final loss of the other arm is reached
    # low, high: the same at both ends of the interval of the loss; None: not known. `high` is infinite if the arm never
    # gets so low.
    low: float | None = None
    high: float | None = None

    @property
    def saved(self) -> float:
        """Part of the tokens that are not needed."""
        return 1 - self.at / self.end


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An arm B against the baseline A."""

    arm: Arm
    verdict: Verdict
    why: str
    notes: list[str]  # what to keep in mind
    end: float = math.nan  # x at which the losses are compared
    # a, b: the final losses, one per seed; in the same order if `method` is paired
    a: Sequence[float] = ()
    b: Sequence[float] = ()
    difference: float = math.nan  # mean of B - mean of A
    # Of the difference between configurations; None if the noise between seeds is not known
    interval: Interval | None = None
    method: str = ''
    # Interval of the mean difference of the training losses of these two runs; it says nothing of other seeds
    within: Interval | None = None
    earlier: Earlier | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """A comparison of arms with the first of them."""

    arms: list[Arm]
    key: str
    x_name: str  # 'tokens' or 'step'
    confidence: float  # confidence of each interval, so that all hold together with that of `Options` (Bonferroni)
    options: Options
    differences: list[Difference]
    comparisons: list[Comparison]


def compare(runs: Sequence[RunRecord], options: Options | None = None) -> Result:
    """Compares runs. Raises UserError if there is one arm, or a run lacks the key."""
    options = options or Options()
    arms = arms_of(runs, options.separate)
    if len(arms) < 2:
        raise UserError(_one_arm(runs, arms[0]))
    found = differences(arms)
    tokenized = any(one.key.startswith(('data.vocab_size', 'data.tokenizer')) for one in found)
    known = ('val_bits_per_byte', 'bits_per_byte', 'val_loss') if tokenized else ('val_loss',)
    key = options.key or next((key for key in known if all(key in run.metrics for run in runs)), 'loss')
    for run in runs:
        if key not in run.metrics:
            raise UserError(f'{run.path} has no {key!r}\nit has: {", ".join(run.metrics)}')
    x_name = 'tokens' if all(run.axis('tokens', run.metrics[key]) is not None for run in runs) else 'step'
    confidence = 1 - (1 - options.confidence) / (len(arms) - 1)
    compared = [_compared(arms[0], arm, key, x_name, confidence, options) for arm in arms[1:]]
    return Result(arms, key, x_name, confidence=confidence, options=options, differences=found, comparisons=compared)


def curve_of(run: RunRecord, key: str, x_name: str) -> Curve:
    """The finite numbers of a key, by x; those beyond LARGEST count as infinite."""
    column = run.metrics[key]
    x = run.axis(x_name, column)
    assert x is not None
    finite = np.abs(column.values) < LARGEST  # false for NaN
    return Curve(x[finite].astype(np.float64), column.values[finite], int((~finite).sum()), bool(finite[-1]))


def is_sparse(key: str) -> bool:
    """Whether a key is measured by evaluations, and so is exact at each of its points."""
    return key.startswith(('val_', 'task/', 'task_stderr/'))


def averaged(curve: Curve, key: str, width: float) -> np.ndarray:
    """The means over the last `width` of x at each point; of evaluations, the values themselves."""
    if is_sparse(key):
        return curve.y
    starts = np.searchsorted(curve.x, curve.x - width, side='right')
    ends = np.arange(1, len(curve.x) + 1)
    sums = np.concatenate([[0.0], np.cumsum(curve.y)])
    return (sums[ends] - sums[starts]) / (ends - starts)


def _one_arm(runs: Sequence[RunRecord], arm: Arm) -> str:
    """The error for runs that form one arm."""
    if len({str(run.path) for run in runs}) == 1:
        return f'{runs[0].path} cannot be compared with itself: give two or more runs'
    same = 'only in their seed' if len(arm.seeds) > 1 else 'in nothing that may change their losses'
    return (
        f'the {len(runs)} runs differ {same}, so there is nothing to compare\n'
        'use --separate to compare each run with the first'
    )


def _compared(a: Arm, b: Arm, key: str, x_name: str, confidence: float, options: Options) -> Comparison:
    curves = {id(run): curve_of(run, key, x_name) for run in (*a.runs, *b.runs)}
    notes = _notes(a, b, curves, key, x_name)
    broken = [run.name for run in (*a.runs, *b.runs) if not curves[id(run)].is_finite or not len(curves[id(run)].x)]
    if broken:
        return Comparison(b, 'not comparable', f'the last {key} of {", ".join(broken)} is not finite', notes)
    end = min(float(curve.x[-1]) for curve in curves.values())
    width = _width(list(curves.values()), end, options.window)
    finals = [
        {
            seed: float(np.mean([_final(curves[id(run)], key, end, width) for run in runs]))
            for seed, runs in arm.seeds.items()
        }
        for arm in (a, b)
    ]
    is_paired = finals[0].keys() == finals[1].keys() and all(
        same_batches(one, other) for seed in finals[0] for one in a.seeds[seed] for other in b.seeds[seed]
    )
    ours, theirs = list(finals[0].values()), [finals[1][s] for s in (finals[0] if is_paired else finals[1])]
    interval, method = _interval(ours, theirs, is_paired, confidence, options)
    difference = float(np.mean(theirs) - np.mean(ours))
    within = _within(a, b, x_name, options, confidence) if len(ours) == len(theirs) == 1 else None
    if _are_equal(a, b, key):
        verdict, why = 'equal', f'every {key} of the same step is the same'
    else:
        verdict, why = _verdict(difference, interval, method)
    earlier = None if verdict == 'equal' else _earlier(a, b, curves, key, width, interval)
    return Comparison(
        b,
        verdict,
        why,
        notes,
        end=end,
        a=ours,
        b=theirs,
        difference=difference,
        interval=interval,
        method=method,
        within=within,
        earlier=earlier,
    )


def _notes(a: Arm, b: Arm, curves: dict[int, Curve], key: str, x_name: str) -> list[str]:
    notes = []
    runs = (*a.runs, *b.runs)
    ends = [(float(curves[id(run)].x[-1]), run.name) for run in runs if len(curves[id(run)].x)]
    if ends and min(ends)[0] < 0.999 * max(ends)[0]:
        end, short = min(ends)
        notes.append(f'runs have different lengths: they are compared at the end of {short}, {end:,.0f} {x_name}')
        notes.append('a loss in the middle of a learning rate schedule is higher than at the end of a shorter one')
    lost = [f'{curves[id(run)].nonfinite} of {run.name}' for run in runs if curves[id(run)].nonfinite]
    if lost:
        notes.append(f'left out, not finite: {", ".join(lost)}')
    unfinished = [f'{run.name} ({run.state.name})' for run in runs if run.state.name != 'finished']
    if unfinished:
        notes.append(f'not finished: {", ".join(unfinished)}')
    repeats = [arm.label for arm in (a, b) if len(arm.seeds) < len(arm.runs)]
    if repeats:
        notes.append(f'runs of the same seed in {" and ".join(repeats)} count as one, with their mean')
    texts = [[text for topic, text in run.startup if topic in ('text', 'documents')] for run in runs]
    if is_sparse(key) and any(text != texts[0] for text in texts):
        notes.append(f'the data differ, so {key} may be of different text')
    return notes


def _width(curves: Sequence[Curve], end: float, window: float) -> float:
    """The width of the last part of a run, with at least LEAST points of each, but at most half of the run."""
    least = [float(curve.x[max(0, int(np.searchsorted(curve.x, end, 'right')) - LEAST - 1)]) for curve in curves]
    return min(max(window * end, *(end - start for start in least)), end / 2)


def _final(curve: Curve, key: str, end: float, width: float) -> float:
    """The loss at the end: of evaluations the last, interpolated; else the mean over the last part."""
    if is_sparse(key):
        return float(np.interp(end, curve.x, curve.y))
    last = (curve.x > end - width) & (curve.x <= end)
    return float(curve.y[last].mean()) if last.any() else float(np.interp(end, curve.x, curve.y))


def _interval(
    a: list[float], b: list[float], is_paired: bool, confidence: float, options: Options
) -> tuple[Interval | None, str]:
    """The confidence interval of the difference between configurations, and its method."""
    if options.seed_noise is not None:
        return known_noise(a, b, options.seed_noise, confidence), f'noise between seeds given as {options.seed_noise:g}'
    if is_paired and len(a) > 1:
        return paired(a, b, confidence), f'paired t, {len(a)} seeds with the same batches in both'
    if min(len(a), len(b)) > 1:
        return welch(a, b, confidence), f'Welch, {len(a)} and {len(b)} seeds'
    if max(len(a), len(b)) > 1:
        return pooled(a, b, confidence), f'Student, {len(a)} and {len(b)} seeds, the same noise assumed for both'
    return None, ''


def _verdict(difference: float, interval: Interval | None, method: str) -> tuple[Verdict, str]:
    if interval is None:
        return 'not decided', (
            'one seed each: the noise between seeds is not known, so this is not evidence that one is better; '
            'train more seeds, or give --seed-noise'
        )
    if not interval.half and difference:
        return 'not decided', 'all seeds of an arm have the same loss, so they do not show the noise between seeds'
    if interval.high < 0:
        return 'better', f'the whole interval is below zero ({method})'
    if interval.low > 0:
        return 'worse', f'the whole interval is above zero ({method})'
    return 'no difference shown', f'the interval contains zero ({method})'


def _within(a: Arm, b: Arm, x_name: str, options: Options, confidence: float) -> Interval | None:
    """The interval of the mean difference of training losses at the same x, in the last part of two runs."""
    curves = [curve_of(run, 'loss', x_name) for run in (a.runs[0], b.runs[0]) if 'loss' in run.metrics]
    if len(curves) < 2 or not all(len(curve.x) for curve in curves):
        return None
    end = min(float(curve.x[-1]) for curve in curves)
    start = end - _width(curves, end, options.window)
    _, left, right = np.intersect1d(curves[0].x, curves[1].x, return_indices=True)
    last = (curves[0].x[left] > start) & (curves[0].x[left] <= end)
    return series_mean(curves[1].y[right][last] - curves[0].y[left][last], confidence)


def _are_equal(a: Arm, b: Arm, key: str) -> bool:
    """Whether both arms have the same numbers, seed by seed, or run by run if there is one each."""
    if a.seeds.keys() == b.seeds.keys():
        pairs = [(one, other) for seed in a.seeds for one in a.seeds[seed] for other in b.seeds[seed]]
    elif len(a.runs) == len(b.runs) == 1:
        pairs = [(a.runs[0], b.runs[0])]
    else:
        return False
    shared = 0
    for one, other in pairs:
        columns = (one.metrics[key], other.metrics[key])
        _, left, right = np.intersect1d(columns[0].steps, columns[1].steps, return_indices=True)
        if not np.array_equal(columns[0].values[left], columns[1].values[right], equal_nan=True):
            return False
        shared += len(left)
    return shared > 0


def _earlier(
    a: Arm, b: Arm, curves: dict[int, Curve], key: str, width: float, interval: Interval | None
) -> Earlier | None:
    """The arm that reaches the final loss of the other, and where. None: neither does before its end."""
    means = [_mean_curve([curves[id(run)] for run in arm.runs], key, width) for arm in (a, b)]
    half = interval.half if interval is not None else None
    for (arm, (x, y)), (other_x, other_y) in (((b, means[1]), means[0]), ((a, means[0]), means[1])):
        end, level = float(other_x[-1]), float(other_y[-1])
        at = first_below(x, y, level)
        if at is not None and at <= end and y[0] > level:  # a curve that begins lower does not say where it got there
            if half is None:
                return Earlier(arm.letter, end, at)
            low, high = first_below(x, y, level + half), first_below(x, y, level - half)
            return Earlier(arm.letter, end, at, low, math.inf if high is None else high)
    return None


def _mean_curve(curves: Sequence[Curve], key: str, width: float) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the curves of an arm, at the points of the first within the range of all."""
    low, high = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    grid = np.unique(np.append(curves[0].x[(curves[0].x >= low) & (curves[0].x <= high)], high))
    return grid, np.mean([np.interp(grid, curve.x, averaged(curve, key, width)) for curve in curves], axis=0)
