"""`pretrax bench`: rows that end in every way, what is run again, and the tables; then a sweep of real runs."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launched import BASE, PATIENCE, environment
from preloaded import programs
from pretrax.errors import UserError
from pretrax.experiments.bench import Bench, earlier_results
from pretrax.experiments.sweep import read_sweep

# The launcher itself runs without JAX; these tests fork in a process that has it.

# In the place of `pretrax.run.measure`: what it does depends on the seed of the row.
PROGRAM = """
import json, os, pathlib, re, signal, sys, time
config, result, steps, warmup = sys.argv[1:]
print('configured by', config, 'sees', os.environ.get('JAX_NUM_CPU_DEVICES'))
seed = int(re.search('seed: ([0-9]+)', pathlib.Path(config).read_text())[1])
with open('COUNT', 'a') as count:
    count.write(str(seed))
if seed == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if seed == 2:
    time.sleep(1000)
if seed == 3:
    sys.exit(3)
done = {'status': 'done', 'n_params': 10, 'batch_tokens': 64, 'devices': 4, 'tokens_per_second': 640.0, 'step_seconds': 0.1}
told = {0: done, 4: {'status': 'out of memory', 'why': 'RESOURCE_EXHAUSTED'}, 5: {'status': 'refused', 'why': 'no'}}
pathlib.Path(result).write_text(json.dumps(told[seed]))
"""
HARDWARE = {'device': 'cpu', 'platform': 'cpu', 'count': 1, 'pretrax': '0', 'jax': '0'}


class Swept:
    """A sweep over seeds, run with the program above."""

    def __init__(self, place):
        self.place = place
        self.said = []
        (place / 'base.yaml').write_text(json.dumps(BASE))

    def __call__(self, seeds, hardware=HARDWARE, **values):
        """The statuses of all rows after a run, and the seeds whose program was started."""
        count = self.place / 'COUNT'
        count.write_text('')
        self.said.clear()
        with self.bench(seeds, hardware, **values) as bench:
            list(bench.run())
            return [result['status'] for result in bench.results()], count.read_text()

    def bench(self, seeds, hardware=HARDWARE, only=None, **values):
        sweep = {'base': 'base.yaml', 'grid': {'seed': seeds}, **values}
        (self.place / 'sweep.yaml').write_text(json.dumps(sweep))
        program = PROGRAM.replace('COUNT', str(self.place / 'COUNT'))
        return Bench(
            *read_sweep(self.place / 'sweep.yaml', self.place / 'out' / 'run'), self.place / 'out', hardware,
            [sys.executable, '-c', program], self.said.append, only,
        )  # fmt: skip

    @property
    def lines(self):
        return [json.loads(line) for line in (self.place / 'out' / 'results.jsonl').read_text().splitlines()]


@pytest.fixture
def swept(tmp_path):
    return Swept(tmp_path)


@pytest.mark.slow
def test_a_failing_row_does_not_stop_the_others(swept):
    statuses, started = swept([0, 1, 2, 3, 4, 5], minutes=0.1)
    assert statuses == ['done', 'killed', 'time limit', 'failed', 'out of memory', 'refused']
    assert started == '012345'
    assert swept.said[0] == '[1/6] seed=0: 640 tokens/s, 100 ms per step'
    assert 'failed: ended with exit code 3, see ' in swept.said[3]
    output = Path(swept.said[3].rpartition('see ')[2]).read_text()
    assert 'configured by' in output
    assert [line['changes'] for line in swept.lines] == [{'seed': seed} for seed in range(6)]


def test_failed_rows_are_run_again_and_final_results_are_kept(swept):
    swept([0, 1, 3, 4, 5])
    statuses, started = swept([5, 4, 3, 1, 0], rows=[{'batch.tokens': 128, 'seed': 0}])
    assert started == '310', 'two that failed, and the new one'
    assert statuses == ['refused', 'out of memory', 'failed', 'killed', 'done', 'done']
    assert [line for line in swept.said if line.endswith('(earlier)')] == [swept.said[i] for i in (0, 1, 4)]


def test_a_change_of_versions_hardware_steps_or_devices_runs_the_row_again(swept):
    for values in ({}, {'steps': 4}, {'warmup': 1}, {'change': {'devices': 4}}, {'change': {'batch.tokens': 32}}):
        assert swept([0], **values)[1] == '0', values
        assert swept([0], **values)[1] == ''
    assert swept([0], hardware=HARDWARE | {'jax': '1'})[1] == '0'
    assert swept([0], change={'log.every': 3})[1] == '', 'which touches no step'
    output = swept.place / 'out' / 'output'
    assert sum('sees 4' in file.read_text() for file in output.iterdir()) == 1


def test_a_row_with_another_number_of_devices_than_requested_is_refused(swept):
    assert swept([0], change={'devices': 3})[0] == ['refused']


def test_a_torn_or_foreign_line_is_skipped_and_its_row_runs_again(swept):
    swept([0, 4])
    results = swept.place / 'out' / 'results.jsonl'
    results.write_bytes(results.read_bytes()[:-9])
    assert swept([0, 4]) == (['done', 'out of memory'], '4')
    results.write_text('{}\n' + results.read_text())
    swept.said.clear()
    assert swept([0, 4]) == (['done', 'out of memory'], ''), 'whose new line follows the torn one'
    assert [line for line in swept.said if 'line 1 is not a result, and is skipped' in line]


def test_a_second_process_cannot_run_the_same_sweep(swept):
    with swept.bench([0]), pytest.raises(UserError, match='another process runs this sweep'):
        swept.bench([0])
    (swept.place / 'file').write_text('')
    with pytest.raises(UserError, match='cannot be written'):
        Bench(*read_sweep(swept.place / 'sweep.yaml', swept.place), swept.place / 'file' / 'out', HARDWARE, [])


def test_rows_that_run_alone_run_at_once_and_are_not_run_again(swept):
    with swept.bench([0, 4, 3, 5], only=2) as second, swept.bench([0, 4, 3, 5], only=3) as third:
        with pytest.raises(UserError, match='another process runs this sweep'):
            swept.bench([0, 4, 3, 5], only=2)
        assert [result['status'] for result in second.run()] == ['out of memory']
        assert [result['status'] for result in third.run()] == ['failed']
    with swept.bench([0, 4, 3, 5], only=2) as again:
        assert list(again.run()) == [], 'it has a result'
    statuses, started = swept([0, 4, 3, 5])
    assert (statuses, started) == (['done', 'out of memory', 'failed', 'refused'], '035'), 'all but the second'
    for row in (0, 5):
        with pytest.raises(UserError, match=f'row {row} does not exist: the sweep has the rows 1 to 4'):
            swept.bench([0, 4, 3, 5], only=row)


def test_the_newest_results_are_shown_whatever_hardware_they_are_from(swept):
    swept([0, 4], hardware=HARDWARE | {'count': 8})
    with swept.bench([0, 4, 5], hardware=HARDWARE | {'count': 2}, only=3) as alone:
        list(alone.run())
    results, hardware = earlier_results(
        *read_sweep(swept.place / 'sweep.yaml', swept.place / 'out' / 'run'), swept.place / 'out'
    )
    assert [(result['status'], result.get('count')) for result in results] == [
        ('done', 8), ('out of memory', 8), ('refused', 2),
    ]  # fmt: skip
    assert hardware == {name: str(value) for name, value in HARDWARE.items()} | {'count': '2 and 8'}
    other = read_sweep(swept.place / 'sweep.yaml', swept.place / 'out' / 'run')
    changed = other[0].model_copy(update={'steps': 7})
    assert [result['status'] for result in earlier_results(changed, other[1], swept.place / 'out')[0]] == [
        'not run'
    ] * 3


PLUGIN = """
import os, time
from pretrax.config import register
from pretrax.data.batches.synthetic import SyntheticSource
from bigram import Bigram

@register('model', 'bigram')
def bigram(request):
    return Bigram(request.vocab_size)

class Slow(SyntheticSource):
    def batch(self, step, rows, batch_rows):
        time.sleep(1000 if os.environ.get('SLOW') else 0)
        return super().batch(step, rows, batch_rows)

@register('data', 'slow')
def slow(request, *, vocab_size: int = 96):
    return Slow(request, vocab_size, 20)
"""


@pytest.mark.slow
def test_a_stopped_sweep_continues_with_the_same_command(tmp_path):
    """Row 1 is done, row 2 is refused by the mesh, row 3 is stopped by Ctrl-C in the middle,
    and done by the next run.
    """
    (tmp_path / 'plugin.py').write_text(PLUGIN)
    (tmp_path / 'base.yaml').write_text(json.dumps(BASE | {'model': {'name': 'bigram'}, 'plugins': ['plugin.py']}))
    rows = [{'batch.tokens': 64}, {'batch.tokens': 48}, {'batch.tokens': 128, 'data.name': 'slow'}]
    change = {'devices': 2, 'mesh.r': 2}
    (tmp_path / 'sweep.yaml').write_text(json.dumps({'base': 'base.yaml', 'change': change, 'rows': rows, 'steps': 3}))
    command = [programs() / 'pretrax', 'bench', 'sweep.yaml', '--out', 'out']

    with (tmp_path / 'said').open('w') as said:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(SLOW='1'), stdout=said, stderr=said,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a shell starts it in the background
        )  # fmt: skip
    try:
        until = time.monotonic() + PATIENCE
        while not (tmp_path / 'out' / 'output').is_dir() or len(list((tmp_path / 'out' / 'output').iterdir())) < 3:
            assert process.poll() is None, (tmp_path / 'said').read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
        process.wait()
    assert 'stopped; 2 of 3 rows are done; the same command resumes' in (tmp_path / 'said').read_text()
    assert 'not run' in (tmp_path / 'out' / 'results.md').read_text()

    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('(earlier)') == 2
    shown = subprocess.run(
        [*command, '--show'], cwd=tmp_path, env=environment(SLOW='1'), capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stdout.strip() == done.stdout[done.stdout.index('\n\n') :].strip(), 'the same table'
    with (tmp_path / 'out' / 'results.csv').open() as file:
        first, refused, last = csv.DictReader(file)
    assert [row['status'] for row in (first, refused, last)] == ['done', 'refused', 'done']
    assert '3 sequences per step cannot be sharded evenly over mesh r=2' in refused['why']
    for row, tokens in ((first, 64), (last, 128)):
        assert float(row['tokens_per_second']) == pytest.approx(tokens / float(row['step_seconds']))
        assert (row['devices'], row['n_params']) == ('2', str(96 * 96 + 96))
    plots = sorted(path.name for path in (tmp_path / 'out').glob('*.svg'))
    assert plots == ['plot-memory-by-batch_tokens.svg', 'plot-tokens_per_second-by-batch_tokens.svg']
    page = (tmp_path / 'out' / 'results.html').read_text()
    assert page.count('<svg') == 3  # the icon, and two plots
    assert os.listdir(tmp_path / 'out' / 'configs')
