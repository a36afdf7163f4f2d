"""NVIDIA GPUs as `nvidia-smi` and the kernel's log describe them: errors, throttling, clocks, memory in use by others.

Fields: `nvidia-smi --help-query-gpu`. Xid errors: docs.nvidia.com/deploy/xid-errors.
"""

import re
import shutil
from collections.abc import Iterator, Sequence

from pretrax.amounts import size
from pretrax.doctor.findings import Context, Finding, failure, warning
from pretrax.system.children import run_tool

_SECONDS = 30  # a GPU that has failed makes nvidia-smi hang
_MIB = 2**20
_FIELDS = (
    'index',
    'name',
    'driver_version',
    'memory.used',
    'memory.total',
    'persistence_mode',
    'ecc.errors.uncorrected.volatile.total',
    'retired_pages.pending',
    'clocks.max.sm',
    'clocks.applications.graphics',
    'clocks.max.graphics',
    'temperature.gpu',
    'mig.mode.current',
)
_SLOWDOWNS = ('hw_slowdown', 'hw_thermal_slowdown', 'sw_thermal_slowdown', 'hw_power_brake_slowdown')
_REMAPPED = ('gpu_bus_id', 'remapped_rows.pending', 'remapped_rows.failure')
# Xid errors after which a GPU has to be reset or replaced; others (13, 31, 43, 45) are those of a program.
_BAD_XIDS = {46, 48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 140}
_XID = re.compile(r'NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)')


def gpus(context: Context) -> Iterator[Finding]:
    """The state of each GPU before anything of ours uses it."""
    if shutil.which('nvidia-smi') is None:
        return
    rows, problem = _query('--query-gpu', _FIELDS)
    if rows is None:
        fix = 'sudo nvidia-smi -r, or restart the node; then its driver: dmesg | grep -i nvrm'
        yield failure('GPU driver', f'nvidia-smi fails: {problem}', fix)
        return
    if rows:
        fix = 'install the same driver on all nodes'
        driver = rows[0]['driver_version']
        yield Finding('GPU driver', driver, fix=fix, same=driver, differs='warning')
    yield from _memory(rows)
    yield from _errors(rows)
    yield from _slowdowns()
    yield from _settings(rows)


def xids(context: Context) -> Iterator[Finding]:
    """Hardware errors of GPUs in the kernel's log, which only root may read on some systems."""
    if shutil.which('nvidia-smi') is None or shutil.which('dmesg') is None:
        return
    log, _ = _run(['dmesg'])
    found = sorted({(bus, int(code)) for bus, code in _XID.findall(log or '') if int(code) in _BAD_XIDS})
    if found:
        text = ', '.join(f'Xid {code} of {bus}' for bus, code in found[:3])
        page = f'docs.nvidia.com/deploy/xid-errors: {found[0][1]}'
        fix = f'drain the node and restart it; if it returns, replace the GPU ({page})'
        yield failure('GPU errors', f'{text} in the kernel log', fix)


def _memory(rows: Sequence[dict[str, str]]) -> Iterator[Finding]:
    busy = [row for row in rows if _number(row['memory.used']) > 0.05 * _number(row['memory.total']) > 0]
    if not busy:
        return
    text = ', '.join(f'GPU {row["index"]}: {size(_number(row["memory.used"]) * _MIB)}' for row in busy[:3])
    apps, _ = _query('--query-compute-apps', ('pid', 'process_name'))
    pids = ' '.join(dict.fromkeys(app['pid'] for app in apps or ()))
    fix = f'end the processes {pids} (ps -fp "{pids}")' if pids else 'end what uses it: fuser -v /dev/nvidia*'
    yield failure('GPU memory', f'in use by others: {text}', fix)


def _errors(rows: Sequence[dict[str, str]]) -> Iterator[Finding]:
    uncorrected = [row for row in rows if _number(row['ecc.errors.uncorrected.volatile.total']) > 0]
    if uncorrected:
        text = ', '.join(f'GPU {r["index"]}: {r["ecc.errors.uncorrected.volatile.total"]}' for r in uncorrected[:3])
        fix = 'drain the node and reset the GPU (sudo nvidia-smi -r); if it returns, replace it'
        yield failure('GPU errors', f'uncorrected memory errors since the last reset: {text}', fix)
    remapped, _ = _query('--query-remapped-rows', _REMAPPED)
    for row in remapped or ():
        if _number(row['remapped_rows.failure']) > 0 or row['remapped_rows.failure'] == 'Yes':
            yield failure('GPU errors', f'{row["gpu_bus_id"]} has no spare rows left', 'replace the GPU')
        elif _number(row['remapped_rows.pending']) > 0 or row['remapped_rows.pending'] == 'Yes':
            yield warning('GPU errors', f'{row["gpu_bus_id"]} remaps rows at its next reset', 'sudo nvidia-smi -r')
    pending = [row['index'] for row in rows if row['retired_pages.pending'] == 'Yes']
    if pending:
        yield warning('GPU errors', f'GPU {", ".join(pending)} retires pages at its next reset', 'sudo nvidia-smi -r')
    if rows and not uncorrected:
        yield Finding('GPU errors', 'no uncorrected memory errors')


def _slowdowns() -> Iterator[Finding]:
    active = None
    for name in ('clocks_event_reasons', 'clocks_throttle_reasons'):  # since driver 535, and before
        fields = tuple(f'{name}.{reason}' for reason in _SLOWDOWNS)
        active, _ = _query('--query-gpu', ('index', 'temperature.gpu', *fields))
        if active is not None:
            break
    slowed = [
        f'GPU {row["index"]}: {
            ", ".join(r for r in _SLOWDOWNS if any(k.endswith("." + r) and v == "Active" for k, v in row.items()))
        }'
        f', {row["temperature.gpu"]} C'
        for row in active or ()
        if 'Active' in row.values()
    ]
    if slowed:
        fix = 'check its cooling and its power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER'
        yield warning('GPU clock', f'slowed down: {"; ".join(slowed[:2])}', fix)
    elif active:
        yield Finding('GPU clock', 'not slowed down')


def _settings(rows: Sequence[dict[str, str]]) -> Iterator[Finding]:
    limited = [
        r for r in rows if 0 < _number(r['clocks.applications.graphics']) < 0.9 * _number(r['clocks.max.graphics'])
    ]
    if limited:
        one = limited[0]
        text = f'GPU {one["index"]} is set to {one["clocks.applications.graphics"]} of {one["clocks.max.graphics"]} MHz'
        yield warning('GPU clock', text, 'sudo nvidia-smi -rac; sudo nvidia-smi -rgc')
    if off := [row['index'] for row in rows if row['persistence_mode'] == 'Disabled']:
        text = f'persistence mode is off for GPU {", ".join(off)}: each start initializes it again'
        yield warning('GPU settings', text, 'sudo nvidia-smi -pm 1')
    if mig := [row['index'] for row in rows if row['mig.mode.current'] == 'Enabled']:
        text = f'GPU {", ".join(mig)} is divided (MIG): its parts have no NVLink'
        yield warning('GPU settings', text, 'sudo nvidia-smi -mig 0, if the whole GPU was wanted')


def _query(kind: str, fields: Sequence[str]) -> tuple[list[dict[str, str]] | None, str]:
    """One row per line of nvidia-smi's answer; None, and the reason, if it fails."""
    asked = list(fields)
    while True:
        text, problem = _run(['nvidia-smi', f'{kind}={",".join(asked)}', '--format=csv,noheader,nounits'])
        if text is not None:
            break
        unknown = re.search(r'Field "(\S+)" is not a valid field', problem)  # to this version of nvidia-smi
        if unknown is None or unknown[1] not in asked or len(asked) == 1:
            return None, problem
        asked.remove(unknown[1])
    rows = ([cell.strip() for cell in line.split(',')] for line in text.splitlines() if line.strip())
    absent = dict.fromkeys(fields, '[N/A]')
    return [absent | dict(zip(asked, row, strict=True)) for row in rows if len(row) == len(asked)], ''


def _run(command: Sequence[str]) -> tuple[str | None, str]:
    done = run_tool(command, _SECONDS)
    if done.returncode:
        lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
        return None, lines[-1][:120] if lines else f'exit code {done.returncode}'
    return done.stdout, ''


def _number(text: str) -> float:
    """The number of a cell; 0 for '[N/A]' and '[Not Supported]'."""
    return float(text) if re.fullmatch(r'\d+(\.\d+)?', text) else 0.0
