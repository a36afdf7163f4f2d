"""Measures what a process does before its first step, in CPU seconds, which are comparable even on a busy machine.

    uv run python benchmarks/startup.py [CONFIG]

Two processes prepare a run, initialize its weights, compile its step and run it once: one with an empty cache of
compiled programs, one with a filled cache. Prints user + system seconds of each part, and then the modules with the
slowest imports.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

PARTS = """
import json, os, sys
seconds, parts = 0.0, {}
def part(name):
    global seconds
    now = sum(os.times()[:4])
    parts[name], seconds = now - seconds, now
part('python')
import pretrax.plan.saved, pretrax.cli._summary, pretrax.run.loop
part('imports')
from pretrax.config import load
config = load(sys.argv[1], ['run_dir=' + sys.argv[2]])
part('configuration')
import jax
from pretrax.run import setup
from pretrax.run.program_cache import compile_or_load, keep_programs
from pretrax.train.state import init_state
from pretrax.train.step import make_step
config.run_dir.mkdir(exist_ok=True)
inner = setup.open_source
def open_source(*arguments):
    part('devices')
    source = inner(*arguments)
    part('data')
    return source
setup.open_source = open_source
run = setup.prepare(config, lambda text: None)
part('model, shapes, report')
with jax.set_mesh(run.mesh):
    state = jax.block_until_ready(init_state(run.recipe, config.seed))
    part('initializing weights')
    lowered = make_step(run.recipe).lower(state, run.batch(0))
    part('tracing the step')
    step, cache = compile_or_load(lowered)
    part('compiling the step')
    jax.block_until_ready(step(state, run.batch(0)))
    part('first step')
print(json.dumps([f'loaded the step from {cache}' if cache else 'compiled the step', parts]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description='Measure CPU seconds before the first step')
    parser.add_argument('config', nargs='?', default='configs/quickstart.yaml')
    config = parser.parse_args().config
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {'XDG_CACHE_HOME': f'{scratch}/cache', 'JAX_ENABLE_COMPILATION_CACHE': 'true'}
        command = [sys.executable, '-c', PARTS, config, f'{scratch}/run']
        run(command, environment)  # prepares the data, and fills the cache
        first = run(command, environment | {'XDG_CACHE_HOME': f'{scratch}/empty'})
        second = run(command, environment)
        print(f'{"CPU seconds":<24}{"compiled":>10}{"from the cache":>16}')
        for name, seconds in first.items():
            print(f'{name:<24}{seconds:>10.2f}{second[name]:>16.2f}')
        print(f'{"total":<24}{sum(first.values()):>10.2f}{sum(second.values()):>16.2f}')
    imported = 'import pretrax.plan.saved, pretrax.cli._summary, pretrax.run.loop'
    timing = subprocess.run(
        [sys.executable, '-X', 'importtime', '-c', imported],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    rows = [(int(total), name) for total, name in re.findall(r'import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)', timing)]
    print('\nimports, in ms, with everything that they import')
    for total, name in sorted(rows, reverse=True)[:40]:
        print(f'{total / 1000:>8.0f}  {name}')


def run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """{part: CPU seconds}"""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    how, parts = json.loads(done.stdout.splitlines()[-1])
    print(how)
    return parts


if __name__ == '__main__':
    main()
