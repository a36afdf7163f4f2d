"""Measures the report of a run of 100,000 lines: seconds, megabytes, and how fast a browser shows it.

    uv run python benchmarks/report.py
    uv run python benchmarks/report.py --readers   # CPU time and peak memory of each reader of 1,000,000 lines

The metrics have the types that a training writes: those of a step are f32, those of the clock are f64. The report is
written by the command, in a process of its own, so that its start-up counts. Chromium, if it is installed, opens the
file without a network, and must find every number of metrics.jsonl.
"""

import argparse
import datetime
import json
import math
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import busy

import pretrax
from pretrax.observe.metrics import read_metrics
from pretrax.system.cores import cpu_name, usable_cores

TOKENS = 524_288
# Prints at the end of a process its CPU seconds and the peak of its resident memory in MB, also after SystemExit.
_USED = r"""
import atexit, re, time
@atexit.register
def used():
    status = open('/proc/self/status').read()
    print('\n', time.process_time(), int(re.search(r'VmHWM:\s*(\d+)', status)[1]) * 1024 / 1e6)

"""
_RESULT = (
    'from pathlib import Path; from types import SimpleNamespace; from pretrax.run.result import Result; '
    "result = Result(SimpleNamespace(run_dir=Path('{run}')), None, None); "
)
# What reads the metrics of a run: a command, or Python. {run}: its directory.
READERS = {
    'resume': 'from pathlib import Path; from pretrax.observe.metrics import MetricsLog; '
    "MetricsLog(Path('{run}/metrics.jsonl'), resumed_step=10**6 - 10).close()",
    'report': 'pretrax report {run}',
    'plot': 'pretrax plot {run}',
    'plot, smoothed page': 'pretrax plot {run} --smooth 100 -o {run}/plot.html',
    'plot, table': 'pretrax plot {run} -o {run}/plot.csv',
    'compare, per run': 'pretrax compare {run} {run}-b --separate',
    'runs': 'pretrax runs {run}',
    'watch': 'from pathlib import Path; from pretrax.view.live.run import WatchedRun; '
    "run = WatchedRun(Path('{run}'), ''); [run.poll() for _ in range(200)]",
    'search, scaling laws': 'from pathlib import Path; from pretrax.view.record.columns import read_metrics_columns; '
    "read_metrics_columns(Path('{run}/metrics.jsonl'), print, ['val_loss'])",
    'batch of a step': 'from pathlib import Path; from pretrax.run.seen_batch import batch_of_step; '
    "batch_of_step(Path('{run}'), 1000, print)",
    'imports of a training': _RESULT,
    'result.history': _RESULT + 'result.history',
    'print(result)': _RESULT + 'result.metrics, result.validation, result.verdict',
    'trackers': 'from pathlib import Path; from pretrax.observe.metrics import _past; '
    "[None for _ in _past(Path('{run}/metrics.jsonl'), 10**12)]",
}


def write_run(directory: Path, lines: int) -> None:
    """Writes the metrics of a training of `lines` steps, each logged, with an evaluation every 1,000 steps."""
    rng = np.random.default_rng(0)
    steps = np.arange(1, lines + 1)
    loss = (2.2 + 8 * steps**-0.35 + 0.02 * rng.standard_normal(lines)).astype(np.float32)
    norm = np.exp(0.2 * rng.standard_normal(lines)).astype(np.float32)
    seconds = 0.7 * (1 + 0.01 * rng.standard_exponential(lines))
    times = 1.79e9 + np.cumsum(seconds)
    rate = (3e-4 * np.cos(steps / lines * math.pi / 2)).astype(np.float32)
    weight_norm = (100 + 0.001 * steps + 1e-4 * rng.standard_normal(lines)).astype(np.float32)
    load = rng.random((3, lines)).astype(np.float32)
    with (directory / 'metrics.jsonl').open('w') as file:
        for i in range(lines):
            speed = TOKENS / seconds[i]
            nll = float(loss[i]) * 0.999
            line = {
                'step': int(steps[i]), 'tokens': int(steps[i]) * TOKENS, 'loss': float(loss[i]),
                'nll': float(np.float32(nll)),
                'grad_norm': float(norm[i]), 'clipped_grad_norm': float(min(norm[i], np.float32(1))),
                'learning_rate': float(rate[i]),
                'weight_norm': float(weight_norm[i]), 'skipped_steps': 0, 'skipped_in_a_row': 0,
                'expert_load_max': float(1 + load[0, i]), 'expert_load_min': float(load[1, i]),
                'expert_load_entropy': float(load[2, i]), 'goodput': float(0.97 + 0.001 * rng.random()),
                'bits_per_byte': nll / math.log(2) / 3.8, 'tokens_per_second': speed,
                'mfu': speed * 8.6e9 / (64 * 989.4e12), 'mfu_full': speed * 9.1e9 / (64 * 989.4e12),
                'time': round(float(times[i]), 3),
            }  # fmt: skip
            if i % 20_011 == 7:
                line |= {'loss': None, 'nonfinite': {'loss': 'nan'}}
            file.write(json.dumps(line) + '\n')
            if steps[i] % 1000 == 0:
                evaluation = {'step': int(steps[i]), 'val_loss': float(loss[i]) + 0.01, 'time': line['time']}
                file.write(json.dumps(evaluation) + '\n')
    (directory / 'config.yaml').write_text(f'name: large\nsteps: {lines}\nbatch:\n  tokens: {TOKENS}  # override\n')


def in_browser(report: Path, metrics: Path) -> dict[str, float | bool] | None:
    """Seconds until the page is ready and until all charts are drawn,
    and whether all numbers are right; None: no browser.
    """
    chromium = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
    if chromium is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=['--no-sandbox'])
        page = browser.new_context(offline=True).new_page()
        began = time.perf_counter()
        page.goto(report.absolute().as_uri())
        page.wait_for_function('window.pretraxReport?.ready', timeout=60_000)
        ready = time.perf_counter() - began
        page.evaluate('pretraxReport.drawAll()')
        drawn = time.perf_counter() - began
        lines = read_metrics(str(metrics))
        is_exact = True
        for key in page.evaluate('Object.keys(pretraxReport.series)'):
            shown = page.evaluate('key => Array.from(pretraxReport.series[key].values, String)', key)
            expected = [line[key] for line in lines if key in line]
            is_exact &= np.array_equal(np.array(shown, np.float64), np.array(expected, np.float64), equal_nan=True)
        browser.close()
    return {'ready_seconds': ready, 'drawn_seconds': drawn, 'is_exact': bool(is_exact)}


def measure_readers(lines: int) -> dict[str, dict[str, float]]:
    """The CPU seconds and the peak resident MB of a process for each reader."""
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / 'run'
        run.mkdir()
        write_run(run, lines)
        shutil.copytree(run, f'{run}-b')
        for name, what in READERS.items():
            code = what.format(run=run)
            words = code.removeprefix('pretrax ').split()
            command = f'import sys; from pretrax.cli import main; main({words!r})'
            program = _USED + (command if what.startswith('pretrax') else code)
            process = subprocess.run([sys.executable, '-c', program], check=True, stdout=subprocess.PIPE, text=True)
            cpu_seconds, peak = process.stdout.split()[-2:]
            n_runs = 2 if name.startswith('compare') else 1
            found[name] = {'cpu_seconds': round(float(cpu_seconds) / n_runs, 2), 'peak_megabytes': round(float(peak))}
            print(f'{name:24} {found[name]["cpu_seconds"]:6.2f} s  {found[name]["peak_megabytes"]:5} MB', flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lines', type=int, default=100_000)
    parser.add_argument('--repeat', type=int, default=5)
    parser.add_argument('--out', type=Path, default=Path(__file__).parent / 'results' / 'report.json')
    parser.add_argument('--readers', action='store_true', help='measure the readers of a long file instead')
    options = parser.parse_args()
    if options.readers:
        result = {
            'date': datetime.date.today().isoformat(),
            'command': ' '.join(['python', *sys.argv]),
            'processor': f'{cpu_name()}, {usable_cores()} cores',
            'busy': busy(),
            'lines': 1_000_000,
            'readers': measure_readers(1_000_000),
        }
        options.out.with_name('metrics_readers.json').write_text(json.dumps(result, indent=1) + '\n')
        return
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary)
        write_run(run, options.lines)
        seconds, cpu_seconds, load = [], [], busy()
        for _ in range(options.repeat):
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            program = [sys.executable, '-c', 'from pretrax.cli import main; main()', 'report', str(run)]
            subprocess.run(program, check=True, capture_output=True)
            seconds.append(time.perf_counter() - began)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        keys = {key for line in (run / 'metrics.jsonl').open() for key in json.loads(line)} - {
            'step',
            'time',
            'nonfinite',
        }
        result = {
            'date': datetime.date.today().isoformat(),
            'command': ' '.join(['python', *sys.argv]),
            'pretrax': pretrax.__version__,
            'python': platform.python_version(),
            'processor': f'{cpu_name()}, {usable_cores()} cores',
            'lines': options.lines,
            'keys': len(keys),
            'metrics_megabytes': (run / 'metrics.jsonl').stat().st_size / 1e6,
            'report_megabytes': (run / 'report.html').stat().st_size / 1e6,
            'busy': load,  # share of the cores that other programs used
            'seconds': {'best': min(seconds), 'median': statistics.median(seconds)},
            'cpu_seconds': {'best': min(cpu_seconds), 'median': statistics.median(cpu_seconds)},
            'browser': in_browser(run / 'report.html', run / 'metrics.jsonl'),
        }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
