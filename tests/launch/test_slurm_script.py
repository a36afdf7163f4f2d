"""The scripts for `sbatch`: what they ask for, and what their bodies do with exit codes and signals, run by bash."""

import contextlib
import io
import os
import signal
import subprocess
from pathlib import Path

import pytest

from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.launch.options import Resources, minutes_of
from pretrax.launch.slurm_script import clock_text, rows_script, run_script, stop_within

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=base
#SBATCH --exclusive
#SBATCH --partition=gpu
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --time=1-00:00:00
#SBATCH --chdir=/shared/work
#SBATCH --output="/shared/my runs/slurm-%j.txt"
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
#SBATCH --no-kill
#SBATCH --requeue
"""


def options(script):
    return [line.removeprefix('#SBATCH --') for line in script.splitlines() if line.startswith('#SBATCH')]


def script_of(resources=Resources(), command=('true',), elastic=False):
    return run_script(
        'base', resources, command, directory=Path('/shared/work'), output=Path('/shared/my runs/slurm-%j.txt'),
        elastic=elastic,
    )  # fmt: skip


def test_the_script_of_a_run():
    script = script_of(Resources(4, 8, time='24h', partition='gpu'), ['pretrax', 'a b'], elastic=True)
    assert script.startswith(SCRIPT)
    assert "\npretrax 'a b' &\nwait $!\n" in script
    assert 'no-kill' not in options(script_of())


@pytest.mark.parametrize(
    ('resources', 'before', 'seconds'),
    [
        (Resources(), 300, 270),
        (Resources(time='20m'), 300, 270),
        (Resources(time='4m'), 60, 30),
        (Resources(time='1m'), 15, 7),
        (Resources(sbatch=('signal=B:TERM@600',)), 600, 570),
        (Resources(sbatch=('--signal=TERM',)), None, 30),  # sbatch: 60 s
    ],
)
def test_the_processes_are_killed_before_the_time_limit_is(resources, before, seconds):
    assert (f'signal=B:TERM@{before}' in options(script_of(resources))) is (before is not None)
    assert stop_within(resources) == seconds


def test_a_part_of_a_node_is_neither_exclusive_nor_all_its_memory():
    shared = options(script_of(Resources(cpus_per_node=16)))
    assert 'cpus-per-task=16' in shared
    assert not {'exclusive', 'mem=0'} & set(shared)


def test_options_of_the_user_replace_those_of_the_same_name():
    extra = ('mem=64G', '--signal=B:TERM@600', 'comment=my "run"', 'no-requeue', 'hold')
    found = options(script_of(Resources(sbatch=extra)))
    assert found[-5:] == ['mem=64G', 'signal=B:TERM@600', 'comment="my \\"run\\""', 'no-requeue', 'hold']
    names = [option.partition('=')[0] for option in found]
    assert len(names) == len(set(names))
    assert 'requeue' not in names
    for wrong in ('-p gpu', 'mem=1G\n#SBATCH --hold', 'mem 64G', ''):
        with pytest.raises(UserError, match='expected a long option of sbatch'):
            script_of(Resources(sbatch=(wrong,)))


def test_the_script_of_a_sweep():
    script = rows_script(
        'quick', Resources(), ['pretrax', 'bench'], directory=Path('/w'), output=Path('/w/%a.txt'), array='1-8%3'
    )
    assert 'array=1-8%3' in options(script)
    assert script.endswith('\nexec pretrax bench --row $SLURM_ARRAY_TASK_ID\n')


# Expected values: the documentation of sbatch --time.
@pytest.mark.parametrize(
    ('text', 'minutes'),
    [
        ('24h', 1440), ('90m', 90), ('1d12h', 2160), ('1-12:00:00', 2160), ('2-6', 3240), ('2-6:30', 3270), ('12:00:00',
        720),
        ('30:00', 30), ('30:30', 31), ('45', 45),
    ],
)  # fmt: skip
def test_time_limits(text, minutes):
    assert minutes_of(text) == minutes
    assert minutes_of(clock_text(minutes)) == minutes


@pytest.mark.parametrize('text', ['', '0', 'h', '1x', '24 hours', '-5', '1:2:3:4', '0h'])
def test_wrong_time_limits(text):
    with pytest.raises(UserError, match='expected a time limit such as 24h'):
        minutes_of(text)


class Body:
    """The body of a script, with programs in the place of Slurm's."""

    def __init__(self, directory, command, state='RUNNING', silent=0, refusal='', between=''):
        """Starts the body.

        Args:
            command: in the place of the supervisor.
            state: of the job, as Slurm reports it.
            silent: how many times in a row each of Slurm's commands does not answer.
            refusal: what a requeue fails with.
            between: what the script does between the start of the command and the line that waits for it.
        """
        self.requeued = directory / 'requeued'
        fails = f'echo >> $0.tries; [ $(wc -l < $0.tries) -gt {silent} ] || exit 1'
        requeue = f'echo {refusal}; exit 1' if refusal else f'echo "$@" > {self.requeued}'
        for name, text in (('squeue', f'{fails}; echo {state}'), ('scontrol', f'{fails}; {requeue}')):
            (directory / name).write_text(f'#!/bin/sh\n{text}\n')
            (directory / name).chmod(0o755)
        script = script_of(command=['bash', '-c', command])
        script = script.replace('sleep 10', 'sleep 0.01').replace(' &\n', f' &\n{between}\n')
        (directory / 'job').write_text(script)
        self.process = subprocess.Popen(
            ['bash', str(directory / 'job')], stdout=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {'PATH': f'{directory}:{os.environ["PATH"]}', 'SLURM_JOB_ID': '7'},
        )  # fmt: skip

    def ends(self):
        """Its exit code, and whether the job was requeued."""
        self.process.communicate(timeout=60)
        return self.process.returncode, self.requeued.exists() and self.requeued.read_text() == 'requeue 7\n'

    def signal(self, number):
        """Sends a signal to the script once its command runs."""
        assert self.process.stdout.readline() == 'ready\n'
        self.process.send_signal(number)

    def end(self):
        """Ends what still runs."""
        with self.process, contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def start(tmp_path):
    """Starts the body of a script, which ends with the test at the latest."""
    with contextlib.ExitStack() as at_end:

        def started(*words, **more):
            body = Body(tmp_path, *words, **more)
            at_end.callback(body.end)
            return body

        yield started


@pytest.mark.parametrize(
    ('code', 'state', 'requeued'),
    [
        (75, 'RUNNING', True), (75, 'COMPLETING', False), (75, 'CANCELLED', False), (0, 'RUNNING', False),
        (1, 'RUNNING', False), (2, 'RUNNING', False),
    ],
)  # fmt: skip
def test_a_job_is_requeued_only_if_its_run_is_not_finished_and_nobody_ended_it(start, code, state, requeued):
    assert start(f'exit {code}', state).ends() == (code, requeued)


def test_a_supervisor_that_is_killed_is_requeued(start):
    assert start('kill -KILL $$').ends() == (75, True)


def test_a_supervisor_that_is_killed_after_a_request_to_stop_is_not(start):
    body = start('trap "kill -KILL $$" TERM; echo ready; while :; do sleep 0.05; done')
    body.signal(signal.SIGINT)
    assert body.ends() == (137, False)


@pytest.mark.parametrize(('silent', 'requeued'), [(3, True), (60, False)])
def test_a_controller_that_does_not_answer_is_asked_again(start, silent, requeued):
    assert start('exit 75', silent=silent).ends() == (75, requeued)


def test_a_job_that_must_not_be_requeued_ends_at_once(start, tmp_path):
    body = start('exit 75', refusal='Requested operation is presently disabled for job 7')
    assert body.ends() == (75, False)
    assert (tmp_path / 'scontrol.tries').read_text() == '\n'


# Each saves for a while after the signal, as a training does.
SAVES = 'trap "sleep 0.2; exit {code}" TERM; echo ready; while :; do sleep 0.05; done'


@pytest.mark.parametrize(
    ('number', 'code', 'ends'),
    [
        (signal.SIGTERM, 75, (75, True)),
        (signal.SIGTERM, 0, (0, False)),
        (signal.SIGINT, 75, (0, False)),
        (signal.SIGINT, 1, (1, False)),
    ],
)
def test_slurm_asks_to_continue_later_and_a_user_to_stop(start, number, code, ends):
    body = start(SAVES.format(code=code))
    body.signal(number)
    assert body.ends() == ends


@pytest.mark.parametrize(('number', 'ends'), [(signal.SIGTERM, (75, True)), (signal.SIGINT, (0, False))])
def test_signals_that_come_before_the_supervisor_handles_them(start, number, ends):
    body = start('echo ready; exec sleep 60')
    body.signal(number)
    assert body.ends() == ends


@pytest.mark.parametrize(('number', 'ends'), [(signal.SIGTERM, (75, True)), (signal.SIGINT, (0, False))])
def test_signals_that_come_before_the_script_waits(start, number, ends):
    body = start('trap "exit 75" TERM; echo ready; while :; do sleep 0.05; done', between='sleep 0.5')
    body.signal(number)
    assert body.ends() == ends


def test_a_second_signal_does_not_end_the_wait(start):
    command = (
        'trap "echo ready; seen+=x" TERM; echo ready; until [ "$seen" = xx ]; do sleep 0.05; done; sleep 0.2; exit 3'
    )
    body = start(command)
    body.signal(signal.SIGTERM)
    body.signal(signal.SIGTERM)
    assert body.ends() == (3, False)


def test_a_dry_run_prints_the_script_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('JAX_NUM_CPU_DEVICES', raising=False)
    command = ['launch', 'slurm', 'quickstart', '--nodes', '2', '--gpus-per-node', '8', '--time', '24h', '--elastic']
    with pytest.raises(SystemExit) as ended:
        main([*command, '--check', '--container', 'ghcr.io/me/pretrax:1', '--dry-run', 'name=base'])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    assert f'#SBATCH --output={tmp_path}/runs/base/slurm-%j.txt\n' in script
    assert (
        '-m pretrax launch slurm-job quickstart name=base --elastic --check --gpus-per-node 8 '
        '--container ghcr.io/me/pretrax:1 --stop-within 270 &\n'
    ) in script
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['--nodes', '3', '--gpus-per-node', '8'],
        '3 nodes with 8 devices each, 24 in all: batch: 16 sequences per step'),
        (['--time', 'tomorrow'], '--time tomorrow: expected a time limit'),
        (['--out', 'sweeps/a'], '--out and --at-once belong to a sweep'),
        (['processes.index=0'], 'the launcher sets processes.index'),
        (['precision.compute=fp16'], 'asks for no GPUs, and precision.compute=fp16 is for GPUs\ngive --gpus-per-node N; '),
        (['model.attention.kernel=cudnn'], 'give --gpus-per-node N; to train on CPUs: --gpus-per-node 0'),
        (['model.attention.kernel=cudnn', '--gpus-per-node', '0'], 'it needs an NVIDIA GPU, not cpu'),
        (['log.peak_tflops=989'], 'log.peak_tflops=989'),
        (['compiler.options.xla_gpu_enable_triton_gemm=false'], 'compiler.options.xla_gpu_enable_triton_gemm'),
    ],
)  # fmt: skip
def test_mistakes_are_seen_without_slurm(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(['launch', 'slurm', 'quickstart', '--dry-run', *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ('answer', 'code', 'shown'),
    [('2\n', 0, '--gpus-per-node=2\n'), ('0\n', 0, '#SBATCH --exclusive'), ('many\n', 2, 'many is not a number')],
)
def test_a_person_is_asked_for_gpus(tmp_path, monkeypatch, capsys, answer, code, shown):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('sys.stdin', Terminal(answer))
    monkeypatch.setattr('sys.stderr', error := Terminal())
    with pytest.raises(SystemExit) as ended:
        main(['launch', 'slurm', 'quickstart', 'precision.compute=fp16', '--dry-run'])
    assert ended.value.code == code
    assert 'GPUs of each node (0: train on CPUs): ' in error.getvalue()
    script = capsys.readouterr().out
    assert shown in script + error.getvalue()
    assert ('gpus-per-node' in script) == (answer == '2\n')


def test_a_machine_without_slurm_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(['launch', 'slurm', 'quickstart'])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        'there is no sinfo on this machine\nuse a machine of the cluster, such as its login node\n'
    )
    assert not list(tmp_path.iterdir())
