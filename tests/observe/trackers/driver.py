"""Trains nothing, but logs like a training: lines, samples, checkpoints, a rollback; continues from its last
checkpoint.

    python driver.py DIRECTORY KEY CHOICE STEPS SECONDS_PER_STEP

The values of a step are functions of the step and of how often the run was rolled back.
"""

import base64
import json
import math
import pathlib
import sys
import time

from pretrax.observe.metrics import MetricsLog
from pretrax.observe.trackers import open_trackers
from pretrax.observe.trackers.base import Table

EVERY = 10  # steps between checkpoints
ROLLED_BACK_AT = 63  # a step that is skipped, after which the run returns to the checkpoint before the last one
# One black pixel.
PICTURE = base64.b64decode(
    'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=='
)


def values(step: int, rollbacks: int) -> dict[str, float]:
    loss = math.nan if step % 17 == 0 else 3 / step + rollbacks
    return {'step': step, 'loss': loss, 'grad_norm': math.inf if step == 23 else 0.1 * step, 'tokens': step * 4096}


def save(checkpoint: pathlib.Path, step: int, rollbacks: int) -> None:
    partial = checkpoint.with_suffix('.new')
    partial.write_text(json.dumps({'step': step, 'rollbacks': rollbacks}))
    partial.replace(checkpoint)


def main() -> None:
    directory, key, choice, steps, seconds = sys.argv[1:]
    saved = pathlib.Path(directory) / 'checkpoint.json'
    state = json.loads(saved.read_text()) if saved.exists() else {'step': 0, 'rollbacks': 0}
    step, rollbacks = state['step'], state['rollbacks']
    trackers = open_trackers(
        {key: {'true': True}.get(choice, choice)},
        directory=pathlib.Path(directory),
        name='test',
        config={'name': 'test', 'model': {'d_model': 64}},
        resumed_step=step,
    )
    with MetricsLog(pathlib.Path(directory) / 'metrics.jsonl', trackers, resumed_step=step) as log:
        while step < int(steps):
            step += 1
            log.write(values(step, rollbacks))
            time.sleep(float(seconds))
            if step == ROLLED_BACK_AT and not rollbacks:
                step, rollbacks = step // EVERY * EVERY - EVERY, 1
                save(saved, step, rollbacks)
                log.rewind(step)
            elif step % EVERY == 0:
                log.write({'step': step, 'val_loss': 4 / step})
                log.show(step, 'samples', f'a sample of step {step}')
                log.flush()
                save(saved, step, rollbacks)
        send_media(log, pathlib.Path(directory), step)


def send_media(log: MetricsLog, directory: pathlib.Path, step: int) -> None:
    picture, page = directory / 'curves.png', directory / 'report.html'
    picture.write_bytes(PICTURE)
    page.write_text('<p>a report</p>')
    log.show(step, 'validation', Table(['source', 'loss'], [['code', 1.5]]))
    log.show(step, 'curves', picture)
    log.file(page)


if __name__ == '__main__':
    main()
