"""What `nvidia-smi` says of GPUs: a program that answers as it does, with one GPU that is hurt.

The format and the words are those of `nvidia-smi --help-query-gpu`.
"""

import json
import sys

import pytest

from pretrax.doctor import nvidia
from pretrax.doctor.findings import Context

# Answers `--query-KIND=FIELDS` from answers.json: {field: value}, for each of the GPUs or processes.
PROGRAM = """#!{python} -IS
import json, sys
answers = json.load(open({answers!r}))
kind, _, fields = sys.argv[1].removeprefix('--query-').partition('=')
if answers.get('problem'):
    print(answers['problem']); sys.exit(9)
rows = answers.get(kind, [])
for field in fields.split(','):
    if field in answers.get('unknown', []):
        print('Field "%s" is not a valid field to query.' % field); sys.exit(2)
for row in rows:
    print(', '.join(str(row.get(field, '[N/A]')) for field in fields.split(',')))
"""
GOOD = {
    'index': 0, 'name': 'NVIDIA H100 80GB HBM3', 'driver_version': '570.1', 'memory.used': 4, 'memory.total': 81559,
    'persistence_mode': 'Enabled', 'ecc.errors.uncorrected.volatile.total': 0, 'retired_pages.pending': '[N/A]',
    'clocks.applications.graphics': 1980, 'clocks.max.graphics': 1980, 'temperature.gpu': 40,
    'mig.mode.current': 'Disabled',
    **{f'clocks_event_reasons.{reason}': 'Not Active' for reason in
       ('hw_slowdown', 'hw_thermal_slowdown', 'sw_thermal_slowdown', 'hw_power_brake_slowdown')},
}  # fmt: skip


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Sets what nvidia-smi answers."""
    programs = tmp_path / 'bin'
    programs.mkdir()
    answers = tmp_path / 'answers.json'
    for name, text in (
        ('nvidia-smi', PROGRAM.format(python=sys.executable, answers=str(answers))),
        ('dmesg', '#!/bin/sh\ncat $LOG\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv('PATH', f'{programs}:/usr/bin:/bin')
    (tmp_path / 'log').write_text('')
    monkeypatch.setenv('LOG', str(tmp_path / 'log'))

    def answer(gpus, **more):
        answers.write_text(json.dumps({'gpu': gpus} | {key.replace('_', '-'): value for key, value in more.items()}))
        return tmp_path

    return answer


def bad():
    found = [*nvidia.gpus(Context(None)), *nvidia.xids(Context(None))]
    return [(finding.check, finding.status) for finding in found if finding.status != 'ok']


def test_good_gpus(smi):
    smi([GOOD, GOOD | {'index': 1}])
    assert bad() == []
    assert {finding.check for finding in nvidia.gpus(Context(None))} == {'GPU driver', 'GPU errors', 'GPU clock'}


@pytest.mark.parametrize(
    ('hurt', 'expected'),
    [
        ({'ecc.errors.uncorrected.volatile.total': 3}, ('GPU errors', 'failure')),
        ({'retired_pages.pending': 'Yes'}, ('GPU errors', 'warning')),
        ({'clocks_event_reasons.hw_thermal_slowdown': 'Active'}, ('GPU clock', 'warning')),
        ({'clocks.applications.graphics': 1200}, ('GPU clock', 'warning')),
        ({'persistence_mode': 'Disabled'}, ('GPU settings', 'warning')),
        ({'mig.mode.current': 'Enabled'}, ('GPU settings', 'warning')),
        ({'memory.used': 40000}, ('GPU memory', 'failure')),
    ],
)
def test_a_gpu_that_is_hurt(smi, hurt, expected):
    smi([GOOD, GOOD | {'index': 1} | hurt])
    assert bad() == [expected]


def test_who_uses_the_memory_is_named(smi):
    smi([GOOD | {'memory.used': 40000}], compute_apps=[{'pid': 4711, 'process_name': 'python'}])
    [found] = [finding for finding in nvidia.gpus(Context(None)) if finding.status != 'ok']
    assert '4711' in found.fix


def test_rows_that_cannot_be_remapped(smi):
    smi([GOOD], remapped_rows=[{'gpu_bus_id': '0:1', 'remapped_rows.pending': 0, 'remapped_rows.failure': 1}])
    assert bad() == [('GPU errors', 'failure')]
    smi([GOOD], remapped_rows=[{'gpu_bus_id': '0:1', 'remapped_rows.pending': 1, 'remapped_rows.failure': 0}])
    assert bad() == [('GPU errors', 'warning')]


def test_a_driver_that_fails(smi):
    smi([], problem='Unable to determine the device handle for GPU0000:41:00.0: Unknown Error')
    assert bad() == [('GPU driver', 'failure')]


def test_an_older_nvidia_smi_knows_fewer_fields(smi):
    smi([GOOD | {'ecc.errors.uncorrected.volatile.total': 3}], unknown=['clocks.applications.graphics'])
    assert bad() == [('GPU errors', 'failure')]


def test_hardware_errors_in_the_log_and_those_of_programs(smi):
    directory = smi([GOOD])
    lines = '[1.0] NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.\n'
    program = '[1.0] NVRM: Xid (PCI:0000:41:00): 31, pid=1, MMU fault\n'
    (directory / 'log').write_text(program)
    assert bad() == []
    (directory / 'log').write_text(program + lines)
    assert bad() == [('GPU errors', 'failure')]
    assert 'Xid 79 of 0000:41:00' in next(iter(nvidia.xids(Context(None)))).result


def test_without_gpus_nothing_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    assert bad() == []
