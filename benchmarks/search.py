"""What successive halving saves: the same trials of a search, all to their end, and with ASHA.

    uv run python benchmarks/search.py

The trials are a grid, so that both searches have the same ones. Writes benchmarks/results/search.json: the seconds and
the steps of both, and the best validation loss of both.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import yaml

from pretrax.system.cores import cpu_name, usable_cores

CONFIG = pathlib.Path(__file__).parents[1] / 'configs' / 'search.yaml'
RATES = [3e-4, 6e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3e-2, 6e-2]


def search(place: pathlib.Path, values: dict, name: str) -> dict:
    """Runs a search to its end, and returns its seconds, its steps and its best loss."""
    file = place / f'{name}.yaml'
    file.write_text(yaml.safe_dump(values))
    command = [sys.executable, '-m', 'pretrax', 'search', str(file), '--out', str(place / name)]
    began = time.monotonic()
    subprocess.run(command, check=True, cwd=place, env=os.environ | {'JAX_PLATFORMS': 'cpu'})
    seconds = time.monotonic() - began
    lines = [line.split(',') for line in (place / name / 'trials.csv').read_text().splitlines()[1:]]
    done = {float(line[5]): float(line[3]) for line in lines if line[1] == 'done'}
    best = min(done, key=lambda rate: done[rate])
    return {
        'seconds': round(seconds, 1),
        'steps': sum(int(line[2]) for line in lines),
        'trials': len(lines),
        'trained_to_the_end': len(done),
        'best_val_loss': round(done[best], 4),
        'best_learning_rate': best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--steps', type=int, default=300)
    parser.add_argument('--first', type=int, default=40, help='step of the first decision of ASHA')
    parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path(__file__).parent / 'results' / 'search.json')
    options = parser.parse_args()
    values = yaml.safe_load(CONFIG.read_text())
    values |= {
        'base': str(CONFIG.with_name(values['base'])),
        'change': values['change'] | {'steps': options.steps, 'schedule.warmup': 20},
        'asha': values['asha'] | {'first': options.first},
        'sampler': 'grid',
        'trials': None,
        'parameters': {'optimizer.learning_rate': RATES},
    }
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        with_asha = search(place, values, 'asha')
        without = search(place, values | {'asha': None}, 'all')
    found = {
        'command': f'uv run python benchmarks/search.py --steps {options.steps} --first {options.first}',
        'machine': f'{cpu_name()}, {usable_cores()} cores',
        'search': {key: values[key] for key in ('change', 'asha', 'at_once')},
        'asha': with_asha,
        'all_to_the_end': without,
        'steps_of_asha': round(with_asha['steps'] / without['steps'], 3),
        'seconds_of_asha': round(with_asha['seconds'] / without['seconds'], 3),
    }
    options.out.write_text(json.dumps(found, indent=1) + '\n')
    print(json.dumps(found, indent=1))


if __name__ == '__main__':
    main()
