"""Predicted goodput, against a simulation of its own, sums done by hand and published failures."""

import random
import statistics

import pytest

from pretrax.plan.failures import CONSTANTS, Source, lines_of, sources


def simulated(source, interval, between, steps_to_keep, draw):
    """The share of time that is kept: failures at exponential times, also during a restart."""
    time = kept = 0.0
    left = draw.expovariate(1 / between)
    while kept < steps_to_keep:
        todo = interval + source.blocked
        if left >= todo:
            time, left, kept = time + todo, left - todo, kept + interval
            continue
        time += left
        while (left := draw.expovariate(1 / between)) < source.restart + source.written:
            time += left
        time, left = time + source.restart + source.written, left - source.restart - source.written
    return kept / time


@pytest.mark.parametrize('between', [300.0, 1_000.0, 20_000.0])
def test_the_formula_is_what_a_simulation_of_failures_keeps(between):
    source, draw = Source('storage', blocked=5.0, written=20.0, restart=60.0), random.Random(7)
    interval = source.interval(between)
    measured = [simulated(source, interval, between, 400 * interval, draw) for _ in range(60)]
    error = statistics.stdev(measured) / 60**0.5
    assert source.goodput(interval, between) == pytest.approx(statistics.mean(measured), abs=4 * error)


def test_to_first_order_a_failure_costs_half_an_interval_and_the_restart():
    source = Source('storage', blocked=50.0, written=0.0, restart=300.0)
    assert source.interval(1e6) == 10_000  # sqrt(2 * 50 * 1e6), Young 1974
    assert 1 - source.goodput(10_000, 1e6) == pytest.approx(50 / 1e4 + (1e4 / 2 + 300) / 1e6, rel=0.02)
    others = [source.goodput(interval, 1e6) for interval in (2_000, 5_000, 20_000, 50_000)]
    assert source.best_goodput(1e6) > max(others)


def test_without_time_between_failures_nothing_is_kept():
    assert Source('storage', 1.0, 1.0, 60.0).goodput(1e6, 1.0) == 0.0


def test_a_state_is_not_kept_before_the_one_before_is_written():
    assert Source('memory', blocked=0.02, written=5.0, restart=0).interval(100.0) == 5.0


def test_failures_are_as_frequent_as_published():
    # Kokolis et al. 2024, arXiv:2410.21680: projected for 16,384 and 131,072 GPUs
    for gpus, hours in (16_384, 1.8), (131_072, 0.23):
        assert CONSTANTS['chip_seconds_between_failures'] / gpus / 3600 == pytest.approx(hours, rel=0.03)


def test_memory_keeps_more_than_storage_and_the_lines_name_the_interval():
    found = {source.name: source.best_goodput(3600.0) for source in sources(100e9)}
    assert found['storage'] < found['memory'] < found['memory with spares'] < 1
    lines = lines_of(100e9, step=2.0, every=1000, between=3600.0, write=1e9)
    assert 'a failure every 1 h 0 min' in lines[0]
    assert 'checkpoint.every=1000 ' in lines[1]
    assert 'checkpoint.memory.every=' in lines[3]
    assert len(lines) == 2 + len(found)
    best = [float(line.split()[-1].rstrip('%')) for line in lines[2:]]
    assert best == sorted(best)
    assert lines_of(100e9, step=2.0, every=0, between=3600.0, write=1e9) == [lines[0], *lines[2:]]
