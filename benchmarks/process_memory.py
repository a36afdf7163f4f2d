"""Measures the memory of a process that trains GPT-2 124M on a CPU: the largest resident set in each phase.

    uv run python benchmarks/process_memory.py [KEY=VALUE]...

The data are random tokens. Prints bytes per parameter before the first step (initialization and compilation), while the
process steps, and while a checkpoint is written: from the line of the step before it to that of the step after it.
"""

import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from array import array

N_PARAMS = 124_439_808
EVERY = 5  # steps between checkpoints
CONFIG = """
name: process-memory
steps: 14
model: {preset: gpt2-124m}
data: {tokens: TOKENS, end_of_text: 50256}
batch: {tokens: 128, sequence_length: 128}
optimizer: {name: adamw, learning_rate: 6.0e-4, weight_decay: 0.1, clip_norm: 1.0}
eval: {every: 0}
checkpoint: {every: 5}
log: {every: 1}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = pathlib.Path(scratch)
        for name, count in (('train', 1_000_000), ('val', 100_000)):
            (place / 'tokens').mkdir(exist_ok=True)
            content = array('H', [random.randrange(50_256) for _ in range(count)]).tobytes()
            (place / 'tokens' / f'{name}.bin').write_bytes(content)
        (place / 'run.yaml').write_text(CONFIG.replace('TOKENS', str(place / 'tokens')))
        command = ['pretrax', 'train', str(place / 'run.yaml'), f'run_dir={place / "run"}', *sys.argv[1:]]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        steps = [0]  # the newest
        threading.Thread(target=read_steps, args=(process, steps), daemon=True).start()
        peaks: dict[str, float] = {}
        while process.poll() is None:
            phase = 'before the first step' if not steps[0] else 'saving' if steps[0] % EVERY == 0 else 'stepping'
            peaks[phase] = max(peaks.get(phase, 0.0), resident(process.pid))
            time.sleep(0.02)
    for phase, size in peaks.items():
        print(f'{phase:<24}{size / 1e9:>6.2f} GB {size / N_PARAMS:>6.1f} bytes per parameter')


def read_steps(process: subprocess.Popen[str], steps: list[int]) -> None:
    """Shows the output of the process, and notes the newest step."""
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(line)
        if line.startswith('step '):
            steps[0] = int(line.split()[1].split('/')[0])


def resident(pid: int) -> float:
    """Bytes of memory of a process on Linux."""
    try:
        text = pathlib.Path(f'/proc/{pid}/status').read_text()
    except OSError:
        return 0.0
    return next((1024.0 * int(line.split()[1]) for line in text.splitlines() if line.startswith('VmRSS')), 0.0)


if __name__ == '__main__':
    main()
