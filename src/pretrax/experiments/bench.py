"""Runs the rows of a sweep one after another, each in its own process, which may fail, hang or be killed.

`results.jsonl` has a line for each finished row. Its key is a digest of the configuration, the timing, the versions and
the hardware. A row whose key is in the file is skipped, unless it failed, was killed or reached its time limit. A row
that runs as a job of its own has a directory of its own, `rows/N`, so that several can run at once. This module does
not import JAX, which would occupy the devices that the rows need.
"""

import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pretrax import __version__
from pretrax.config import resolved_yaml, values_in_step
from pretrax.errors import Report, UserError
from pretrax.experiments.sweep import Row, Sweep
from pretrax.experiments.training import locked
from pretrax.launch.local import share_of
from pretrax.system.children import Child, end_with_parent
from pretrax.system.cores import cpu_name, usable_cores
from pretrax.system.line_files import append_record, not_a_record, read_lines

RESULTS = 'results.jsonl'
ROWS = 'rows'
FINAL = (
    'done',
    'too large',
    'out of memory',
    'refused',
)  # the same if repeated; `failed`, `killed` and `time limit` may differ
HARDWARE = ('pretrax', 'cpu', 'device', 'platform', 'count', 'jax', 'jaxlib')  # from `probe`, in each result
_NOT_RUN = {'status': 'not run'}
_STOP = (signal.SIGINT, signal.SIGTERM)
_PROBE = """
import json, jax, jaxlib
devices = jax.devices()
found = {'device': devices[0].device_kind, 'platform': devices[0].platform, 'count': len(devices)}
print(json.dumps(found | {'jax': jax.__version__, 'jaxlib': jaxlib.__version__}))
"""

type Result = dict[str, Any]


class Bench(contextlib.AbstractContextManager['Bench']):
    """A sweep and its directory, which is locked inside the `with` block.

    Args:
        sweep, rows: from `read_sweep`.
        hardware: hardware and versions that the rows run with, from `probe`.
        command: program and arguments that time a row. The configuration, the file for the result, and the numbers of
            steps and of warm-up steps are appended.
        only: the number of a row, from 1. No other row runs, and only `rows/N` is written and locked.
    """

    def __init__(
        self,
        sweep: Sweep,
        rows: list[Row],
        directory: pathlib.Path,
        hardware: dict[str, Any],
        command: Sequence[str],
        say: Report = print,
        only: int | None = None,
    ):
        if only is not None and not 1 <= only <= len(rows):
            raise UserError(f'row {only} does not exist: the sweep has the rows 1 to {len(rows)}')
        self._sweep, self._rows, self._say, self._only = sweep, rows, say, only
        self._directory = directory if only is None else directory / ROWS / str(only)
        self._hardware, self._command = hardware, command
        self._lock = locked(self._directory, 'runs this sweep')
        try:
            self._found = read_results(directory, say)
        except BaseException:
            self._lock.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def results(self) -> list[Result]:
        """The results so far, in the order of the rows; the status of the others is 'not run'."""
        return [{**self._found.get(self._key(row), _NOT_RUN), 'changes': row.changes} for row in self._rows]

    def run(self) -> Iterator[Result]:
        """Runs the rows without a final result, and yields each result once it is on disk."""
        for number, row in enumerate(self._rows, 1):
            if self._only not in (None, number):
                continue
            key = self._key(row)
            head = f'[{number}/{len(self._rows)}] {row.label}: '
            if self._found.get(key, {}).get('status') in FINAL:
                self._say(f'{head}{describe(self._found[key])}   (earlier)')
                continue
            found = {'key': key, 'changes': row.changes, **self._run(key, row)}
            found |= {'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'), **self._hardware}
            append_record(self._directory / RESULTS, found, sync=True)
            self._found[key] = found
            self._say(head + describe(found))
            yield found

    def _key(self, row: Row) -> str:
        return _key(self._sweep, row, self._hardware)

    def _run(self, key: str, row: Row) -> Result:
        """Runs one row. A failure of its process is a result, too."""
        places = {part: self._directory / part for part in ('configs', 'output', 'running')}
        for place in places.values():
            place.mkdir(exist_ok=True)
        config, output, result = (
            places['configs'] / f'{key}.yaml',
            places['output'] / f'{key}.txt',
            places['running'] / f'{key}.json',
        )
        config.write_text(resolved_yaml(row.config))
        result.unlink(missing_ok=True)
        arguments = [str(config), str(result), str(self._sweep.steps), str(self._sweep.warmup)]
        process, before = self._start([*self._command, *arguments], output, row.devices)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            code = process.wait(60 * self._sweep.minutes)
        except subprocess.TimeoutExpired:
            return {'status': 'time limit', 'why': f'not finished after {self._sweep.minutes:g} minutes, see {output}'}
        finally:
            process.kill_all()
            process.wait()
        if result.is_file():
            found = json.loads(result.read_text())
            if row.devices is not None and found.get('devices', row.devices) != row.devices:
                why = f'it has {found["devices"]} devices: only CPUs and NVIDIA GPUs support devices: {row.devices}'
                return {'status': 'refused', 'why': why}
            return found
        if code == -signal.SIGKILL:
            return {'status': 'killed', 'why': f'SIGKILL, which Linux sends when memory runs out; see {output}'}
        by = f'by {signal.Signals(-code).name}' if code < 0 else f'with exit code {code}'
        return {'status': 'failed', 'why': f'ended {by}, see {output}'}

    def _start(self, command: list[str], output: pathlib.Path, devices: int | None) -> tuple[Child, Collection[int]]:
        """Starts a process with requests to stop blocked. Returns it, and the signal mask to restore.

        Python's logging runs code after a fork, which would swallow the KeyboardInterrupt of such a request.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
        try:
            with output.open('wb') as written:
                environment = os.environ | share_of(0, devices)
                process = Child(command, environment, _in_the_child, stdout=written, stderr=subprocess.STDOUT)
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        return process, before


def measure_command() -> list[str]:
    """Command that times a row with this Python."""
    return [sys.executable, '-c', 'from pretrax.run.measure import main; main()']


def read_results(directory: pathlib.Path, report: Report = print) -> dict[str, Result]:
    """{key: newest result} of `results.jsonl`, also of rows that were jobs. Reports and skips other lines."""
    found: list[Result] = []
    for path in (directory / RESULTS, *sorted(directory.glob(f'{ROWS}/*/{RESULTS}'))):
        if not path.is_file():
            continue
        with path.open('rb') as lines:
            for line in read_lines(lines, _is_result):
                if line.record is None:
                    report(not_a_record(path, line, 'a result'))
                else:
                    found.append(line.record)
    return {result['key']: result for result in sorted(found, key=lambda result: str(result.get('time', '')))}


def earlier_results(
    sweep: Sweep, rows: list[Row], directory: pathlib.Path, report: Report = print
) -> tuple[list[Result], dict[str, Any]]:
    """The newest result of each row on whatever hardware and with whatever versions, and what these were."""
    found = list(read_results(directory, report).values())
    hardware = [{name: result[name] for name in HARDWARE if name in result} for result in found]
    different = list({json.dumps(one, sort_keys=True): one for one in hardware}.values())
    newest = {result['key']: number for number, result in enumerate(found)}
    results = []
    for row in rows:
        keys = (_key(sweep, row, one) for one in different)
        last = max((newest[key] for key in keys if key in newest), default=None)
        results.append({**(_NOT_RUN if last is None else found[last]), 'changes': row.changes})
    facts = {name: sorted({str(one[name]) for one in different if name in one}) for name in HARDWARE}
    return results, {name: ' and '.join(values) for name, values in facts.items() if values}


def _key(sweep: Sweep, row: Row, hardware: dict[str, Any]) -> str:
    values = values_in_step(row.config, inputs=True)
    text = json.dumps([values, [row.devices, sweep.steps, sweep.warmup], hardware], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_result(record: dict[str, Any]) -> bool:
    keys = ['key', 'status', *(['tokens_per_second', 'step_seconds'] if record.get('status') == 'done' else ['why'])]
    return isinstance(record.get('key'), str) and all(key in record for key in keys)


def describe(result: Result) -> str:
    """A result as part of a line."""
    if result['status'] != 'done':
        return f'{result["status"]}: {result["why"]}'
    mfu = f', MFU {result["mfu"]:.1%}' if result.get('mfu') is not None else ''
    return f'{result["tokens_per_second"]:,.0f} tokens/s{mfu}, {1000 * result["step_seconds"]:,.4g} ms per step'


def probe() -> dict[str, Any]:
    """Versions and hardware, from a process that releases the devices when it ends."""
    done = subprocess.run([sys.executable, '-c', _PROBE], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ['no output'])[-1]
        raise UserError(f'JAX does not start on this machine: {last[:300]}')
    return {
        'pretrax': __version__,
        'cpu': f'{cpu_name()}, {usable_cores()} cores',
        **json.loads(done.stdout.splitlines()[-1]),
    }


def _in_the_child() -> None:
    """Makes the process end with its parent, and be the first that Linux kills when memory runs out."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)
    end_with_parent(signal.SIGKILL)
    if sys.platform == 'linux':
        with open('/proc/self/oom_score_adj', 'w') as adjust:
            adjust.write('1000')
