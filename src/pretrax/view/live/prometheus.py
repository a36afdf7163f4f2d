"""The newest numbers of watched runs, for Prometheus."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pretrax.view.live.run import WatchedRun
from pretrax.view.record.causes import FAMILY


class Gauges(Collector):
    """Gauges of runs. `runs`: returns those that are watched."""

    def __init__(self, runs: Callable[[], Iterable[WatchedRun]]):
        self._runs, self._registry = runs, CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The families: seconds by cause, and all other keys."""
        seconds = GaugeMetricFamily('pretrax_run_seconds', 'Seconds since the run began.', labels=['run', 'cause'])
        newest = GaugeMetricFamily('pretrax_run', 'Newest number of a key of metrics.jsonl.', labels=['run', 'key'])
        for run in self._runs():
            for key, value in run.info()['last'].items():  # NaN and infinity are texts
                family = seconds if key.startswith(FAMILY) else newest
                family.add_metric([run.name, key.removeprefix(FAMILY)], float(value))
        yield from (seconds, newest)

    def text(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self._registry)
