"""benchmarks/failures.py beside closed formulas, and beside sequences of failures that are worked out by hand."""

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path

import pytest

from benchmark_scripts import benchmark_script
from pretrax.plan.failures import CONSTANTS, Source

MANUAL = Path(__file__).parents[2] / 'docs' / 'reliability.md'
benchmark = benchmark_script('failures')
# A node has 100 bytes: it writes them in 10 seconds, reads them in 5, and sends them in 10.
SPEEDS = benchmark.Constants(process=3.0, node=7.0, blocked=0.0, write=10.0, read=20.0, keep=1e9, take=1e9, wire=10.0)


class Drawn:
    """Draws what the test says: for each failure the node that is lost, or None for a process."""

    def __init__(self, *nodes):
        self.nodes = list(nodes)

    def random(self):
        return 1.0 if self.nodes[0] is None else 0.0

    def randrange(self, n):
        return self.nodes[0] % n


def run_of(nodes, policy, replacement=0.0, n_nodes=6):
    job = benchmark.Job(n_nodes, 100.0, 4.0, between=lambda draw: 0.0, replacement=replacement)
    run = benchmark.Run(job, policy, SPEEDS, Drawn(*nodes))

    def fail(at):
        run.fail(at)
        run.draw.nodes.pop(0)
        return run.base, run.ready

    return fail, run


@pytest.mark.parametrize('restart', [30.0, 400.0])
@pytest.mark.parametrize('between', [900.0, 10000.0])
def test_goodput_is_that_of_the_closed_formula(between, restart):
    """Failures without memory (exponential), also while the run restarts.

    A start trains for an exponential time U with the mean M. It keeps tau for each k with p U > k tau + d, where a
    checkpoint is whole after d seconds of training and p is the pace: E = tau exp(-d/pM) / (exp(tau/pM) - 1). Starts
    that are interrupted make a cycle take M exp(R/M).
    """
    tau, blocked, delay = 120.0, 6.0, 20.0
    speeds = benchmark.Constants(
        process=restart, node=restart, blocked=blocked / 100 * benchmark.NODE, write=100 / delay, read=1e9, keep=1.0,
        take=1.0, wire=1.0,
    )  # fmt: skip
    job = benchmark.Job(64, 100.0, 1.0, lambda draw: draw.expovariate(1 / between), replacement=0.0)
    pace = 1 / (1 + blocked / tau)
    kept = tau * math.exp(-delay / pace / between) / math.expm1(tau / pace / between)
    expected = kept / (between * math.exp(restart / between))
    assert benchmark.goodput(job, benchmark.Policy(tau), speeds)[0] == pytest.approx(expected, rel=0.02)


def test_the_best_interval_is_that_of_young_and_loses_what_the_plan_says():
    between = 50000.0
    source = Source('storage', blocked=20.0, written=0.0, restart=320.0)
    speeds = benchmark.Constants(
        process=source.restart, node=source.restart, blocked=source.blocked / 100 * benchmark.NODE, write=1e9, read=1e9,
        keep=1.0, take=1.0, wire=1.0,
    )  # fmt: skip
    job = benchmark.Job(64, 100.0, 1.0, lambda draw: draw.expovariate(1 / between), replacement=0.0)
    best = source.interval(between)
    reached = {factor: benchmark.goodput(job, benchmark.Policy(best * factor), speeds)[0] for factor in (0.4, 1.0, 2.5)}
    assert reached[1.0] == max(reached.values())
    assert 1 - reached[1.0] == pytest.approx(1 - source.goodput(best, between), rel=0.05)


def test_a_run_from_storage_goes_back_to_the_last_checkpoint_that_was_whole():
    fail, _ = run_of([None, 2, None], benchmark.Policy(every=30.0))
    assert fail(69.0) == (30.0, 69 + 3 + 5)  # the checkpoint of 60 s lacked a second
    assert fail(75.0) == (30.0, 75 + 7 + 5)  # it was not training yet
    assert fail(127.0) == (60.0, 127 + 3 + 5)  # 30 + 127 - 87 = 70 s of training: that of 60 s is just whole


def test_a_run_from_memory_goes_back_to_the_last_copy_that_was_whole():
    """A copy takes 10 s, so one begins every 12 s, which are three steps."""
    fail, run = run_of([None, 2, None], benchmark.Policy(every=1000.0, memory=True))
    assert fail(69.0) == (48.0, pytest.approx(69 + 3))  # 60 + 10 s is too late
    assert fail(100.0) == (60.0, pytest.approx(100 + 7 + 10))  # 48 + 28 = 76: 72 s is not yet whole
    assert run.missing == {2}
    assert fail(150.0) == (72.0, pytest.approx(150 + 3))  # 60 + 33 = 93: 72 s is whole, and so all memories are
    assert run.sources == [3, 0]


@pytest.mark.parametrize(('second', 'is_kept'), [(3, False), (1, False), (4, True), (2, True)])
def test_memory_does_not_survive_the_loss_of_two_neighbors_before_the_next_copy(second, is_kept):
    fail, run = run_of([2, second], benchmark.Policy(every=30.0, memory=True))
    assert fail(85.0)[0] == 72.0
    assert fail(85.0 + 7 + 10 + 5)[0] == (72.0 if is_kept else 60.0)
    assert run.sources == ([2, 0] if is_kept else [1, 1])


def test_the_last_node_keeps_the_copy_of_the_first():
    fail, run = run_of([5, 0], benchmark.Policy(every=30.0, memory=True))
    fail(85.0)
    fail(90.0)
    assert run.sources == [1, 1]


def test_a_spare_takes_the_place_of_a_node_and_the_next_loss_waits_for_a_new_one():
    fail, _ = run_of([0, 3], benchmark.Policy(every=1000.0, memory=True, spares=1), replacement=600.0)
    assert fail(100.0)[1] == pytest.approx(100 + 7 + 10)
    assert fail(300.0)[1] == pytest.approx(700 + 7 + 10)
    fail, _ = run_of([0, None], benchmark.Policy(every=1000.0, memory=True), replacement=600.0)
    assert fail(100.0)[1] == pytest.approx(700 + 7 + 10)
    assert fail(300.0)[1] == pytest.approx(700 + 7 + 10)  # a process that dies meanwhile costs nothing


def test_a_run_without_failures_takes_its_training_and_its_waits():
    job = benchmark.Job(4, 100.0, 1.0, lambda draw: 1e9)
    speeds = dataclasses.replace(SPEEDS, blocked=1 / 100 * benchmark.NODE)
    assert benchmark.minutes(job, benchmark.Policy(every=50.0), speeds, 3000.0, 0) == pytest.approx(51.0)


def test_spares_count_as_accelerators():
    job = benchmark.Job(4, 100.0, 1.0, lambda draw: 1e6, replacement=0.0)
    alone, spared = (benchmark.goodput(job, benchmark.Policy(50.0, spares=n), SPEEDS, 100)[0] for n in (0, 1))
    assert spared == pytest.approx(alone * 4 / 5)


def test_failures_are_as_published():
    assert [benchmark.mttf(n) / 3600 for n in (1024, 16384, 131072)] == pytest.approx([7.9, 1.8, 14 / 60])
    assert benchmark.mttf(4096) / 3600 == pytest.approx(math.sqrt(7.9 * 1.8))
    for accelerators in (16384, 131072):  # their rate of failures of a node says the same of large jobs
        published = CONSTANTS['chip_seconds_between_failures'] / accelerators
        assert benchmark.mttf(accelerators) == pytest.approx(published, rel=0.04)


def test_the_results_are_those_of_the_measured_constants():
    result = json.loads(benchmark.RESULTS.read_text())
    constants = benchmark.measured(result['source'])
    assert result['constants'] == pytest.approx(dataclasses.asdict(constants))
    first, now = result['clusters'][0], next(benchmark.clusters(constants))
    assert now['goodput'] == pytest.approx(first['goodput'])


def test_the_manual_and_the_picture_show_the_results():
    result, manual = json.loads(benchmark.RESULTS.read_text()), MANUAL.read_text()
    assert '\n'.join(benchmark.table(result)) in manual
    assert '\n'.join(benchmark.bar_table(result)) in manual
    now, then = (
        [
            float(n)
            for path in re.findall(r'id="line-0-\d+">\s*<path d="([^"]+)"', text)
            for n in re.findall(r'[\d.]+', path)
        ]
        for text in (benchmark.picture(result).decode(), benchmark.PICTURE.read_text())
    )
    assert len(now) == 2 * len(benchmark.NAMES) * len(result['clusters'])
    assert then == pytest.approx(now, abs=2), result['command']  # versions of Matplotlib may differ by parts of a point


def test_the_restart_of_the_plan_is_the_newest_one_that_was_measured():
    newest = max(benchmark.RESULTS.parent.glob('recovery-local-*.json'))
    seconds = [
        loss['trains again']
        for loss in json.loads(newest.read_text())['losses']
        if (loss['engine'], loss['kept'], loss['lost']) == ('local', 'standbys, memory', 'process killed')
    ]
    assert CONSTANTS['restart'] == round(statistics.median(seconds), 1)
