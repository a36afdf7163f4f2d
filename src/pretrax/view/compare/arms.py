"""Arms of a comparison: runs that differ only in their seed, and their means. And the facts in which arms differ."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pretrax.config.effects import effect_of
from pretrax.config.show import value_text
from pretrax.view.compare.statistics import Interval, paired
from pretrax.view.record.run_record import OF_AN_ISLAND, RunRecord
from pretrax.view.tables import text_table

_DATA = ('text', 'documents', 'tokens', 'validation')  # topics of the start-up report
_HARDWARE = ('host', 'processor', 'cores', 'platform', 'device_kind', 'devices', 'processes', 'compute')
_SAME_BATCHES = ('seed', 'batch.tokens', 'batch.sequence_length')


@dataclasses.dataclass(frozen=True)
class Arm:
    """Runs of one configuration and one version of the code."""

    letter: str  # 'A' for the baseline
    name: str  # what the names of its runs have in common
    runs: Sequence[RunRecord]

    @property
    def label(self) -> str:
        return f'{self.letter} {self.name}'

    @functools.cached_property
    def seeds(self) -> dict[Any, list[RunRecord]]:
        """{seed: runs}; a run that does not say its seed is one of its own."""
        found: dict[Any, list[RunRecord]] = {}
        for run in self.runs:
            seed = run.setting('seed')
            found.setdefault(seed if type(seed) is int else str(run.path), []).append(run)
        return found


class Difference(NamedTuple):
    """A fact in which arms differ. `values`: as text, one per arm; '' if it is not known."""

    section: str
    key: str
    values: list[str]


def arms_of(runs: Sequence[RunRecord], separate: bool = False) -> list[Arm]:
    """Groups runs, in the order of the first of each arm. `separate`: every run is an arm."""
    groups: dict[Any, list[RunRecord]] = {}
    for run in runs:
        identity = str(run.path) if separate or not run.settings else _identity(run)
        groups.setdefault(identity, []).append(run)
    common = [_common_name([run.name for run in group]) for group in groups.values()]
    names = [
        name if common.count(name) == 1 else str(group[0].path)
        for name, group in zip(common, groups.values(), strict=True)
    ]
    letters = [chr(ord('A') + number) if number < 26 else f'A{number}' for number in range(len(groups))]
    return [Arm(*one) for one in zip(letters, names, groups.values(), strict=True)]


def same_batches(a: RunRecord, b: RunRecord) -> bool:
    """Whether two runs trained on the same batches in the same order, as far as their configurations say."""
    if not (a.settings and b.settings):
        return False
    keys = {setting.key for run in (a, b) for setting in run.settings if setting.key.partition('.')[0] == 'data'}
    keys -= {'data.workers', 'data.engine', 'data.cache_gib'}
    return all(value_text(a.setting(key)) == value_text(b.setting(key)) for key in (*_SAME_BATCHES, *sorted(keys)))


def differences(arms: Sequence[Arm]) -> list[Difference]:
    """The facts that are not the same in all arms that have such facts: a federation has none of its machines."""
    sections: dict[str, Callable[[RunRecord], Mapping[str, str]]] = {
        'configuration': lambda run: {one.key: one.text for one in run.settings if one.key not in OF_AN_ISLAND},
        'code': _code,
        'data': lambda run: _topics(run, _DATA),
        'hardware': lambda run: _known(run, _HARDWARE) or _topics(run, ('devices',)),
        'mesh': lambda run: {k: str(n) for k, n in run.section('mesh').items()} or _topics(run, ('mesh',)),
    }
    found = []
    for section, facts_of in sections.items():
        facts = [[facts_of(run) for run in arm.runs] for arm in arms]
        keys = dict.fromkeys(key for runs in facts for run in runs for key in run)
        for key in keys:
            values = [_together(run.get(key, '') for run in runs) for runs in facts]
            if len({value for value, runs in zip(values, facts, strict=True) if any(runs)}) > 1:
                found.append(Difference(section, key, values))
    return found


def _identity(run: RunRecord) -> tuple[Any, ...]:
    """What the runs of an arm have in common: each setting that may change the losses except the seed, and the code."""
    settings = sorted((setting.key, value_text(setting.value)) for setting in run.settings if _counts(setting.key))
    code = _code(run)
    return tuple(settings), code.get('version of pretrax'), code.get('commit')


def _counts(key: str) -> bool:
    if key == 'seed':
        return False
    try:
        return effect_of(key).on != 'nothing' or key == 'eval.batches'
    except KeyError:  # of another version
        return True


def _code(run: RunRecord) -> dict[str, str]:
    found = {f'version of {name}': str(version) for name, version in run.section('versions').items()}
    git = run.section('git')
    return found | ({'commit': f'{git.get("commit")}{", changed" if git.get("changed") else ""}'} if git else {})


def _known(run: RunRecord, keys: Iterable[str]) -> dict[str, str]:
    return {key: str(run.environment[key]) for key in keys if key in run.environment}


def _topics(run: RunRecord, topics: Iterable[str]) -> dict[str, str]:
    lines = {topic: [text for name, text in run.startup if name == topic] for topic in topics}
    return {topic: '; '.join(texts) for topic, texts in lines.items() if texts}


def _together(values: Iterable[str]) -> str:
    """One text for the runs of an arm."""
    different = sorted(set(values))
    return ', '.join(different[:6]) + (', ...' if len(different) > 6 else '')


def _common_name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    pairs = zip(min(names), max(names), strict=False)  # what these begin with, all of them begin with
    shared = ''.join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared.rstrip('-_. ').removesuffix('seed').rstrip('-_. ') or f'{names[0]} ...'


KEYS = ('val_loss', 'val_bits_per_byte', 'loss')


def mean_of(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Student's t interval of a mean. None: fewer than two values."""
    return paired([0.0] * len(values), values, confidence)


def summary_text(arm: Arm, confidence: float = 0.95) -> list[str]:
    """A row for each key that all runs have: the last values by seed, their mean, its interval, their deviation."""
    rows = [['', *(f'seed {seed}' for seed in arm.seeds), 'mean', f'{confidence:.0%} interval', 'sd']]
    for key in KEYS:
        values = [run.metrics.last(key) for run in arm.runs]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if len(finite) == len(values) and (interval := mean_of(finite, confidence)) is not None:
            between = f'{interval.low:.4f} to {interval.high:.4f}'
            cells = [*(f'{value:.4f}' for value in finite), f'{interval.estimate:.4f}', between]
            rows.append([key, *cells, f'{np.std(finite, ddof=1):.4f}'])
    return text_table(rows, left=(0,), drop=rows[0][-4:0:-1])


def mean_metrics(arm: Arm, confidence: float = 0.95) -> str:
    """Lines of metrics of common steps: the mean over seeds, and its interval from KEY_low to KEY_high."""
    lines: dict[int, dict[str, float]] = {}
    for key in KEYS:
        columns = [run.metrics.get(key) for run in arm.runs]
        if any(column is None for column in columns):
            continue
        by_step = [
            dict(zip(column.steps.tolist(), column.values.tolist(), strict=True)) for column in columns if column
        ]
        for step in sorted(set.intersection(*(set(one) for one in by_step))):
            values = [one[step] for one in by_step]
            if all(map(math.isfinite, values)) and (interval := mean_of(values, confidence)) is not None:
                found = {key: interval.estimate, f'{key}_low': interval.low, f'{key}_high': interval.high}
                lines.setdefault(int(step), {'step': int(step)}).update(found)
    return ''.join(json.dumps(lines[step]) + '\n' for step in sorted(lines))
