"""Measures what layer statistics (`log.layers`) cost, in two designs.

    uv run python benchmarks/layer_statistics.py [KEY=VALUE...]

The step of the quickstart, or of a configuration with these changes, is timed three ways:

- alone, as it runs in every step that is not logged
- with the statistics as a program of their own before it, as in a step that is logged (this is what pretrax does)
- with the statistics inside the step, under `jax.lax.cond`: the branch not taken, and taken

The programs take turns, and the fastest turn of each counts, so that other work on the machine matters little. The
result is written to results/layer_statistics.json, with the versions and the machine.
"""

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable

import jax

from pretrax.config import load
from pretrax.run.logged_program import row_sources
from pretrax.run.setup import prepare
from pretrax.system.cores import cpu_name, usable_cores
from pretrax.system.software import versions
from pretrax.train.layer_statistics import make_layer_statistics
from pretrax.train.state import init_state
from pretrax.train.step import make_step, training_step

RESULT = pathlib.Path(__file__).parent / 'results' / 'layer_statistics.json'
TURNS = 6
EVERY = (10, 100, 1000)  # values of log.layers in the table


def main() -> None:
    """Times the designs, prints the table and writes the result."""
    overrides = ['name=layer-statistics', *sys.argv[1:]]
    run = prepare(load('configs/quickstart.yaml', overrides), lambda text: None)
    with jax.set_mesh(run.mesh):
        state, batch, sources = init_state(run.recipe, 0), run.batch(0), row_sources(run, 0)
        n_sources = len(run.source.source_names)
        statistics = make_layer_statistics(run.recipe, n_sources).lower(state, batch, sources).compile()
        step = make_step(run.recipe).lower(state, batch).compile()
        plain, every = training_step(run.recipe), make_layer_statistics(run.recipe, n_sources)

        def step_with_branch(state, batch, sources, is_due):
            zeros = jax.tree.map(lambda like: jax.numpy.zeros(like.shape, like.dtype), shapes)
            found = jax.lax.cond(is_due, lambda: every(state, batch, sources), lambda: zeros)
            after, metrics, _ = plain(state, batch)
            return after, metrics, found

        shapes = jax.eval_shape(every, state, batch, sources)
        inside = jax.jit(step_with_branch, donate_argnums=0).lower(state, batch, sources, True).compile()
        yes, no = jax.numpy.asarray(True), jax.numpy.asarray(False)

        def both(state):
            jax.block_until_ready(statistics(state, batch, sources))
            return step(state, batch)

        ways: dict[str, Callable] = {
            'step': lambda state: step(state, batch),
            'step and statistics': both,
            'branch in the step, not taken': lambda state: inside(state, batch, sources, no),
            'branch in the step, taken': lambda state: inside(state, batch, sources, yes),
        }
        best = dict.fromkeys(ways, float('inf'))
        for _ in range(TURNS):
            for name, way in ways.items():
                for _ in range(2):
                    began = time.perf_counter()
                    state, *rest = way(state)
                    jax.block_until_ready((state, rest))
                    best[name] = min(best[name], time.perf_counter() - began)
    report(best, sys.argv[1:], dict(run.mesh.shape))


def report(best: dict[str, float], overrides: list[str], mesh: dict[str, int]) -> None:
    """Prints the table and writes the result."""
    step = best['step']
    found = {
        'seconds': {name: round(seconds, 4) for name, seconds in best.items()},
        'relative to the step': {name: round(seconds / step, 3) for name, seconds in best.items()},
        'cost of log.layers=N, percent': {
            'program of its own': {n: round(100 * (best['step and statistics'] / step - 1) / n, 2) for n in EVERY},
            'branch in the step': {
                n: round(
                    100 * ((best['branch in the step, not taken'] * (n - 1) + best['branch in the step, '
                    'taken']) / n / step - 1), 2
                )
                for n in EVERY
            },
        },
        'command': ' '.join(['benchmarks/layer_statistics.py', *overrides]),
        'mesh': mesh,
        'device': cpu_name() if jax.default_backend() == 'cpu' else jax.devices()[0].device_kind,
        'cores': usable_cores(),
        'load': round(os.getloadavg()[0], 1),
        'versions': versions(),
    }  # fmt: skip
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else []
    kept = [one for one in kept if one['command'] != found['command']]
    RESULT.write_text(json.dumps([*kept, found], indent=1) + '\n')
    print(json.dumps(found, indent=1))


if __name__ == '__main__':
    main()
