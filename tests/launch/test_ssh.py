"""`pretrax launch ssh` on hosts with a real sshd:
what is lost, cut off and switched off, and mistakes before the start.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

import boxes
from launched import PATIENCE, Launched, environment, undisturbed, write_run
from pretrax.errors import UserError
from pretrax.launch.ssh import Host, Ssh, parse_hosts, read_hosts

needs_root = pytest.mark.skipif(os.getuid() != 0, reason='a host that is switched off needs its own process ids')
needs_sshd = pytest.mark.skipif(boxes.MISSING is not None, reason=str(boxes.MISSING))


@pytest.fixture(scope='module')
def three(tmp_path_factory):
    """Three hosts that run."""
    names = ('JAX_ENABLE_COMPILATION_CACHE', 'JAX_COMPILATION_CACHE_DIR', 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS')
    kept = {name: environment()[name] for name in (*names, 'PYTHONPATH', 'JAX_PLATFORMS', 'XLA_FLAGS')}
    with boxes.boxes(tmp_path_factory.mktemp('boxes'), 3, kept) as started:
        # The user's settings hold: a host that is gone is noticed sooner than by default.
        started.configure('ConnectTimeout 2', 'ServerAliveInterval 1', 'ServerAliveCountMax 2')
        yield started


class OnHosts(Launched):
    """A run under `pretrax launch ssh`."""

    def __init__(self, hosts, names, config, run_dir, *options):
        ssh = ['--hosts', ','.join(names), '--ssh', f'ssh -F {hosts.config}']
        super().__init__(config, run_dir, *ssh, *options, engine='ssh', forked=False)


def launch(hosts, *arguments, **changes):
    """A command that ends at once."""
    return subprocess.run(
        [sys.executable, '-m', 'pretrax', 'launch', 'ssh', *map(str, arguments), '--ssh', f'ssh -F {hosts.config}'],
        env=environment(**changes), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def test_hosts_are_read_as_ssh_writes_them(tmp_path):
    assert parse_hosts(['box1', 'ann@box2:2222', '[fe80::1]:22']) == [
        Host('box1', 'box1'), Host('ann@box2:2222', 'ann@box2', '2222'), Host('[fe80::1]:22', 'fe80::1', '22'),
    ]  # fmt: skip
    file = tmp_path / 'hosts'
    file.write_text('# of the lab\nbox1\n\n  ann@box2:2222  # the old one\n')
    assert read_hosts(file) == ['box1', 'ann@box2:2222']


@pytest.mark.parametrize(
    ('hosts', 'told'),
    [
        (['-oProxyCommand=x'], 'is not a host'),  # it would be an option of ssh
        (['ann@-oProxyCommand=x'], 'is not a host'),
        (['box1 slots=4'], 'is not a host'),
        (['box1', ''], 'is not a host'),
        (['box1', 'box2', 'box1'], 'box1 is listed twice'),
        ([], '--hosts-file'),
    ],
)
def test_what_is_not_a_list_of_hosts(hosts, told):
    with pytest.raises(UserError, match=told):
        parse_hosts(hosts)


def test_a_line_for_a_host_survives_its_shell(tmp_path):
    directory = tmp_path / "it's a $HOME"
    directory.mkdir()
    ssh = Ssh('ssh', str(directory), sys.executable)
    program = 'import os, sys; print(os.getcwd(), os.environ["A"], sys.argv[1:])'
    line = ssh.python_line(['-c', program, 'data.text=[a, "b c"]', '*'], {'A': "x 'y' $z"})
    done = subprocess.run(['sh', '-c', line], capture_output=True, text=True, check=True, cwd='/')
    assert done.stdout == f"{directory} x 'y' $z ['data.text=[a, \"b c\"]', '*']\n"


@needs_sshd
@pytest.mark.slow
def test_the_printed_commands_train(three, tmp_path):
    config = write_run(tmp_path, steps=3)
    arguments = [config, '--hosts', 'box1,box3', f'run_dir={tmp_path / "run"}', '--dry-run']
    assert 'secret' not in launch(three, *arguments, '--env', 'TOKEN=secret').stdout
    done = launch(three, *arguments)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / 'run').exists()
    lines = [line.split(': ', 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in lines] == ['box1', 'box3']
    started = [
        subprocess.Popen(shlex.split(line), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _, line in lines
    ]
    for process in started:
        output = process.stdout.read().decode()
        assert process.wait(PATIENCE) == 0, output
        process.stdin.close()
        process.stdout.close()
    assert (tmp_path / 'run' / 'checkpoints' / '3').is_dir()


@needs_sshd
@needs_root
@pytest.mark.nightly
def test_lost_connections_and_hosts_do_not_change_the_losses(three, tmp_path, capsys):
    config = write_run(tmp_path, steps=200)
    hurt_at, run_dir = [], tmp_path / 'hurt'
    with OnHosts(three, ['box1', 'box2'], config, run_dir, '--retries', '0') as hurt:
        hurt.until_checkpoint(1)
        hurt_at.append(time.time())
        os.kill(boxes.training(run_dir, 1), signal.SIGKILL)
        hurt.until_checkpoint(2)
        hurt_at.append(time.time())
        os.kill(boxes.parent(boxes.training(run_dir, 0, 'node')), signal.SIGKILL)  # the sshd of the connection
        hurt.until_checkpoint(3)
        hurt_at.append(time.time())
        three.freeze('box2')
        hurt.until(lambda: 'waiting up to 600 s for box2' in hurt.said, 'that it waits')
        three.freeze('box2', signal.SIGCONT)
        hurt.until_checkpoint(4)
        assert launch_stop(run_dir) == 0
        assert hurt.wait() == 0, hurt.said
    *why, last = [event['why'] for event in hurt.events('ended')]
    assert why == ['killed: process 1 (SIGKILL)', 'killed: process 0 (SIGHUP)', 'lost: process 1 on box2']
    assert last in ('stopped on request', 'done')
    assert all(event['processes'] == ['box1', 'box2'] for event in hurt.events('started'))
    assert hurt.losses() == undisturbed(config, tmp_path / 'alone', 2, f'steps={max(hurt.checkpoints())}')
    with capsys.disabled():
        print('', *hurt.recoveries(hurt_at), sep='\nssh: ')


def launch_stop(run_dir):
    """`pretrax launch stop`: its exit code."""
    return subprocess.run([sys.executable, '-m', 'pretrax', 'launch', 'stop', run_dir], env=environment()).returncode


@needs_sshd
@needs_root
@pytest.mark.nightly
def test_an_elastic_run_continues_without_a_host_until_it_is_back(three, tmp_path, capsys):
    config = write_run(tmp_path, steps=100_000)
    with OnHosts(three, three.names, config, tmp_path / 'run', '--elastic') as run:
        run.until_checkpoint(1)
        lost_at = time.time()
        three.cut_power('box3')
        run.until_checkpoint(2)
        three.start('box3')
        back_at = time.time()
        run.until_checkpoint(3)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.said
    assert [event['processes'] for event in run.events('started')] == [three.names, three.names[:2], three.names]
    reference = undisturbed(config, tmp_path / 'alone', 3, f'steps={max(run.checkpoints())}')
    assert run.losses() == pytest.approx(reference, rel=1e-5)
    with capsys.disabled():
        print('', *run.recoveries([lost_at, back_at]), sep='\nssh, elastic: ')


@needs_sshd
@needs_root
@pytest.mark.slow
@pytest.mark.parametrize('lost', ['box1', 'box2'])
def test_a_host_without_power_takes_its_state_from_the_memory_of_another(three, tmp_path, lost):
    memory = {'every': 0, 'memory': {'every': 1}}
    config = write_run(tmp_path, steps=100_000, checkpoint=memory, mesh={'r': 1, 'd': 'auto'})
    with OnHosts(three, ['box1', 'box2'], config, tmp_path / 'run') as run:
        run.until_step(1, 20)
        memory = [boxes.memory_of(boxes.training(tmp_path / 'run', number)) for number in (0, 1)]
        three.cut_power(lost)
        newest = run.step()
        shutil.rmtree(memory[int(lost[3:]) - 1])  # it is without power too
        run.until(lambda: 'waiting up to 600 s' in run.said, 'that it waits')
        three.start(lost)
        run.until_step(2, 5)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.said
    (began,) = [event['step'] for event in run.events('began')][1:]
    assert newest - 2 <= began <= newest + 1
    other = 'box1' if lost == 'box2' else 'box2'
    assert f'memory of {other} (process {int(lost[3:]) - 1})' in run.said
    (last,) = run.checkpoints()
    assert run.losses() == undisturbed(config, tmp_path / 'alone', 2, f'steps={last}')
    assert not any(directory.exists() for directory in memory)


@needs_sshd
@needs_root
@pytest.mark.nightly
def test_a_spare_host_takes_the_place_of_a_lost_one(three, tmp_path):
    config, run_dir = write_run(tmp_path, steps=100_000), tmp_path / 'run'
    with OnHosts(three, three.names, config, run_dir, '--spares', '1') as run:
        run.until_checkpoint(1)
        run.until(lambda: len(boxes.running('pretrax', 'train', f'run_dir={run_dir}')) == 5, 'three standbys')
        agent = boxes.training(run_dir, 0, 'node')
        three.cut_power('box2')
        run.until_checkpoint(2)
        assert boxes.training(run_dir, 0, 'node') == agent, 'it has outlived the attempt'
        three.start('box2')
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.said
    assert [event['processes'] for event in run.events('started')] == [['box1', 'box2'], ['box1', 'box3']]
    assert run.losses() == undisturbed(config, tmp_path / 'alone', 2, f'steps={max(run.checkpoints())}')


@needs_sshd
@pytest.mark.nightly
def test_nothing_survives_a_launcher_that_is_killed(three, tmp_path):
    run_dir = tmp_path / 'run'
    with OnHosts(three, ['box1', 'box2'], write_run(tmp_path, steps=100_000), run_dir) as run:
        run.until_checkpoint(1)
        run.until(lambda: len(boxes.running('pretrax', 'train', f'run_dir={run_dir}')) == 4, 'two standbys')
        run.process.kill()
        run.process.wait()
        until = time.monotonic() + 60
        while left := boxes.running('pretrax', f'run_dir={run_dir}'):
            assert time.monotonic() < until, left
            time.sleep(0.05)


@needs_sshd
@needs_root
@pytest.mark.nightly
def test_hosts_that_cannot_run_it_are_named_before_anything_starts(three, tmp_path):
    config, run_dir = write_run(tmp_path), tmp_path / 'run'
    some = [config, f'run_dir={run_dir}', '--hosts']

    def problems(*arguments):
        done = launch(three, *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        lines = done.stderr.splitlines()
        assert len(lines) <= 10
        assert lines.pop().startswith('nothing was started')
        assert not (run_dir / 'attempts.jsonl').exists()
        assert not list(run_dir.glob('.shared-*'))
        return lines

    told = problems(*some, 'box1,nowhere.invalid,box2:1')
    assert told[0].startswith('nowhere.invalid: ssh: Could not resolve hostname')
    assert told[1] == 'check the spelling, or describe it in ~/.ssh/config'
    assert told[2].startswith('box2:1: ssh: connect to host 127.0.0.3 port 1: Connection refused')
    told = problems(*some, 'box1,box2', '--directory', '/nowhere')
    assert told[0] == 'box1, box2: it has no directory /nowhere'
    assert problems(*some, 'box1,root@box1')[0].startswith('box1 and root@box1 are the same host')
    assert problems(*some, 'box1', '--python', '/nowhere/python')[0] == 'box1: it has no Python at /nowhere/python'

    three.cut_power('box2')
    private = tmp_path / 'run'
    three.start('box2', private)
    told = problems(*some, 'box1,box2')
    assert told[0] == f'box2: run_dir: {run_dir} is not the directory of that name on the machine of the launcher'
    three.cut_power('box2')
    three.start('box2')

    keys = three.directory / 'authorized_keys'
    known = keys.read_text()
    keys.write_text('')
    told = problems(*some, 'box1')
    keys.write_text(known)
    assert 'Permission denied' in told[0]
    assert told[1] == 'let this machine in without a password: ssh-copy-id box1'


@needs_sshd
@pytest.mark.nightly
def test_the_first_host_must_be_reached_by_the_others(three, tmp_path):
    arguments = [write_run(tmp_path), '--hosts', 'box1,box2', f'run_dir={tmp_path / "run"}']
    done = launch(three, *arguments, '--coordinator-address', 'nowhere.invalid')
    assert done.returncode == 2
    assert done.stderr.startswith('box2: it does not reach box1 at nowhere.invalid: ')
    assert '--coordinator-address ADDRESS' in done.stderr
    assert not (tmp_path / 'run' / 'attempts.jsonl').exists()
