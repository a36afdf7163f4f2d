"""What `/metrics` shows, in a registry of its own."""

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pretrax.infer.request import EngineStatus
from pretrax.serve.limits import Refusals
from pretrax.tables import read_table

_TABLE = read_table(Path(__file__).with_suffix('.yaml'))
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# (name of a model, status of its engine, step of its weights, requests that the server has admitted)
type State = tuple[str, EngineStatus, int | None, int]


class Metrics:
    """Counters and histograms of the server; the state of its engines is read when it is asked for."""

    def __init__(self, refusals: Refusals) -> None:
        self.registry, self.refusals = CollectorRegistry(), refusals
        self.registry.register(_Refused(refusals))
        self.requests = Counter(
            'pretrax_requests',
            'HTTP requests. status "aborted": the client went away; "failed": during a stream.',
            ['endpoint', 'status'],
            registry=self.registry,
        )
        histogram = functools.partial(Histogram, labelnames=['model'], registry=self.registry)
        self.first_token = histogram(
            'pretrax_time_to_first_token_seconds', 'From the request to its first token.', buckets=_SLOW
        )
        self.inter_token = histogram(
            'pretrax_inter_token_seconds', 'Between two tokens, as a mean over each block.', buckets=_FAST
        )
        self.duration = histogram(
            'pretrax_request_seconds', 'From the request to the end of its answer.', buckets=(*_SLOW, 120, 300, 600)
        )

    def watch(self, states: Callable[[], Iterable[State]]) -> None:
        """From now on, the engines are shown too."""
        self.registry.register(_Engines(states))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Refused(Collector):
    def __init__(self, refusals: Refusals):
        self._refusals = refusals

    def collect(self) -> Iterator[Any]:
        family = CounterMetricFamily('pretrax_refused', 'Connections and keys that were refused.', labels=['reason'])
        for reason, count in self._refusals.counts.items():
            family.add_metric([reason], count)
        yield family


class _Engines(Collector):
    def __init__(self, states: Callable[[], Iterable[State]]):
        self._states = states

    def collect(self) -> Iterator[Any]:
        states = list(self._states())
        for kind, names in ((GaugeMetricFamily, _TABLE['gauges']), (CounterMetricFamily, _TABLE['counters'])):
            for name, about in names.items():
                family = kind(f'pretrax_{name}', about, labels=['model'])
                for model, status, _, _ in states:
                    family.add_metric([model], getattr(status, name))
                yield family
        steps = GaugeMetricFamily('pretrax_weights_step', 'Training step of the weights.', labels=['model'])
        admitted = GaugeMetricFamily(
            'pretrax_admitted', 'Requests that run or wait, as the server sees it.', labels=['model']
        )
        for model, _, step, count in states:
            steps.add_metric([model], float('nan') if step is None else step)
            admitted.add_metric([model], count)
        yield steps
        yield admitted
