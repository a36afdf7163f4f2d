"""Shows which learning rate is best at each width, with muP and without: `uv run python benchmarks/mup.py`.

Each run is the model of configs/mup.yaml at another width, for 200 steps, on text that is new in every step. The loss
is that of the held-out text. Within a table, only the width, the learning rate and muP differ. Changes such as
`model.embedding.multiplier=16 model.head.multiplier=4` or `schedule.warmup=40` apply to every run: what muP transfers
should be tuned at the base first.
"""

import argparse
import contextlib
import platform
import time

import jax
import numpy as np

from pretrax.config import load
from pretrax.run.setup import prepare
from pretrax.run.validation import Evaluation
from pretrax.train.state import init_state
from pretrax.train.step import make_step

HEADS = 2  # of the narrowest model, whose d_model is 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('changes', nargs='*', metavar='key=value', help='of the configuration')
    parser.add_argument('--widths', type=int, nargs='+', default=[64, 128, 256, 512])
    parser.add_argument('--rates', type=int, nargs='+', default=[-11, -10, -9, -8, -7, -6, -5], help='powers of two')
    parser.add_argument('--steps', type=int, default=200)
    parser.add_argument('--optimizer', default='adamw')
    parser.add_argument('--parametrizations', nargs='+', choices=['mup', 'standard'], default=['mup', 'standard'])
    given = parser.parse_args()
    print(f'JAX {jax.__version__}, {platform.machine()}, {given.optimizer}, {given.steps} steps', *given.changes)
    for mup in (name == 'mup' for name in given.parametrizations):
        print(f'\n{"muP" if mup else "standard parametrization"}: held-out loss by width and learning rate')
        print('| width |' + ''.join(f' 2^{power} |' for power in given.rates) + ' best |')
        print('|---|' + '---|' * (len(given.rates) + 1))
        for width in given.widths:
            losses = [
                _loss(width, 2.0**power, given.steps, given.optimizer, mup, given.changes) for power in given.rates
            ]
            best = given.rates[int(np.nanargmin(losses))]
            print(f'| {width} |' + ''.join(f' {loss:.3f} |' for loss in losses) + f' 2^{best} |', flush=True)


def _loss(width: int, rate: float, steps: int, optimizer: str, mup: bool, changes: list[str]) -> float:
    grown = width // 64
    config = load(
        'configs/mup.yaml',
        [
            f'steps={steps}',
            f'model.d_model={width}',
            f'model.attention.n_heads={HEADS * grown}',
            f'model.attention.n_kv_heads={HEADS * grown // 2}',
            f'model.feed_forward.d_ff={192 * grown}',
            f'optimizer.name={optimizer}',
            f'optimizer.learning_rate={rate}',
            *([] if mup else ['model.mup=null']),
            *changes,
        ],
    )
    run = prepare(config, lambda _: None)
    with jax.set_mesh(run.mesh):
        state, step = init_state(run.recipe, 0), make_step(run.recipe)
        with contextlib.closing(run.batches(range(steps), print)) as batches:
            for batch in batches:
                state, _ = step(state, batch)
        return Evaluation(run).losses(state.weights, batches=16)['val_loss']


if __name__ == '__main__':
    start = time.time()
    main()
    print(f'\n{time.time() - start:.0f} s')
