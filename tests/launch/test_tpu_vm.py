"""`pretrax launch tpu-vm`: against a gcloud that runs its VMs as processes, and the parser of the real gcloud."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from boxes import running
from kubernetes_cluster import wait_until
from launched import BASE, environment, undisturbed, write_run
from metadata_server import TPU_VM, serve_metadata
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.launch import tpu_vm
from pretrax.launch.record import LaunchRecord
from pretrax.launch.registry import engine_of
from pretrax.launch.restarts import newest_checkpoint
from pretrax.launch.tpu_vm import CONFIG, Slices, startup_script
from pretrax.observe.metrics import read_metrics
from pretrax.storage import locate
from side_by_side import free_port

CALL = ['--accelerator', 'v5p-16', '--zone', 'us-east5-a', '--image', 'registry/pretrax:tpu']
BUCKET = 'run_dir=gs://bucket/runs/x'
GOOGLE = shutil.which('gcloud')


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'run.yaml').write_text(
        json.dumps(BASE | {'name': 'x', 'batch': {'tokens': 1024, 'sequence_length': 16}})
    )
    return 'run.yaml'


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """The directory of the fake gcloud, which is first on the PATH."""
    home, programs = tmp_path / 'gcloud', tmp_path / 'bin'
    home.mkdir()
    programs.mkdir()
    (programs / 'gcloud').write_text(
        f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parents[1] / "fake_gcloud.py"} "$@"\n'
    )
    (programs / 'sudo').write_text('#!/bin/sh\nexec "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}')
    monkeypatch.setenv('FAKE_GCLOUD', str(home))
    (home / 'account').write_text('somebody@example.com')
    return home


def call(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as ended:
        main(['launch', *arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code or 0) == code, out + err
    return out + err if code else out


def calls(home):
    found = [json.loads(line) for line in (home / 'calls.jsonl').read_text().splitlines()]
    return [words[3] if words[0] == 'compute' else words[0] for words in found]


def commands_of(text):
    """The command lines of a dry run, after the startup script."""
    return [shlex.split(line) for line in text.split('\nEND_OF_SCRIPT\n')[1].splitlines() if not line.startswith('#')]


@pytest.mark.parametrize('line', ['END_OF_FILE', 'END_OF_FILE_', 'END_OF_SCRIPT', 'END_OF_FILE\nEND_OF_FILE_'])
def test_no_text_of_a_plugin_ends_its_file_in_the_script(line, tmp_path):
    """A text that contained the last line of the script's text was run by the shell from there on."""
    text = f'"""\n{line}\ntouch injected\n"""'
    files = {CONFIG: 'steps: 1', 'plugin.py': text}
    slices = Slices(name='x', accelerator='v5p-16', hosts=2, slices=1, runtime='tpu', zone='zone', setup='true')
    outer = tpu_vm.dry_run(slices, files).partition('\ngcloud')[0]
    subprocess.run(['bash', '-c', outer], cwd=tmp_path, check=True)
    inner = [part.partition('\n{ true; }')[0] for part in startup_script(slices, files).partition('> process\n')[2:]]
    subprocess.run(['bash', '-c', inner[0]], cwd=tmp_path, check=True)
    assert not (tmp_path / 'injected').exists()
    assert (tmp_path / 'startup.sh').read_text() == startup_script(slices, files)
    assert {name: (tmp_path / name).read_text() for name in files} == {
        name: f'{text}\n' for name, text in files.items()
    }


def test_a_dry_run_prints_a_shell_script_and_calls_nothing(config, capsys, gcloud, tmp_path):
    text = call(capsys, 'tpu-vm', config, BUCKET, *CALL, '--slices', '2', '--spot', '--dry-run')
    assert not (gcloud / 'calls.jsonl').exists()
    checked = subprocess.run(['bash', '-n'], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, '')
    script = text.split("<<'END_OF_SCRIPT'\n")[1].split('END_OF_SCRIPT\n')[0]
    assert subprocess.run(['bash', '-n'], input=script, text=True).returncode == 0
    create = commands_of(text)[0]
    assert {'--accelerator-type=v5p-16', '--spot', '--runtime-version=v2-alpha-tpuv5'} <= set(create)
    assert create[create.index('--node-count') + 1] == '2'


@pytest.mark.slow
@pytest.mark.skipif(GOOGLE is None, reason='there is no gcloud')
@pytest.mark.parametrize('slices', [1, 2])
def test_the_parser_of_gcloud_accepts_every_command(config, capsys, tmp_path, slices):
    """Nobody is logged in, which gcloud says after it has parsed the command; it refuses other options before."""
    text = call(
        capsys, 'tpu-vm', config, BUCKET, *CALL, '--slices', str(slices), '--spot', '--project', 'p', '--network', 'n',
        '--service-account', 's@p.iam.gserviceaccount.com', '--dry-run',
    )  # fmt: skip
    (tmp_path / 'startup.sh').write_text('#!/bin/bash\n')
    nobody = os.environ | {'CLOUDSDK_CONFIG': str(tmp_path / 'nobody'), 'CLOUDSDK_CORE_DISABLE_PROMPTS': '1'}
    commands = commands_of(text)
    assert [words[4] for words in commands] == ['create', 'describe', 'ssh', 'delete']
    for words in commands:
        said = subprocess.run(words, env=nobody, capture_output=True, text=True).stderr
        assert 'do not currently have an active account' in said, said
    said = subprocess.run([*commands[0], '--surprise'], env=nobody, capture_output=True, text=True).stderr
    assert 'unrecognized arguments: --surprise' in said


@pytest.mark.parametrize(
    ('arguments', 'expected'),
    [
        (['--accelerator', 'v5p-100'], 'no v5p slice has 100 cores'),
        (['--accelerator', 'h100x8'], 'is not a TPU'),
        (['--accelerator', 'v5p:4x4x16'], 'gcloud chooses the shape'),
        (['run_dir=runs/x'], 'is lost with the TPU VMs'),
        (['run_dir=s3://bucket/x'], 'give a bucket: run_dir=gs://'),
        (['mesh.d=3'], '2 nodes with 4 devices each'),
        (['data.name=text', 'data.text=${oc.env:HOME}/corpus.txt'], 'reads HOME from the environment'),
        (['--image', ''], '--setup COMMAND'),
    ],
)
@pytest.mark.usefixtures('gcloud')
def test_bad_input_is_refused_before_anything_is_asked(config, capsys, arguments, expected, gcloud):
    place = [] if any(word.startswith('run_dir=') for word in arguments) else [BUCKET]
    text = call(capsys, 'tpu-vm', config, *CALL, *place, *arguments, code=2)
    assert expected in ' '.join(text.split())
    assert len(text.splitlines()) <= 10
    assert not (gcloud / 'calls.jsonl').exists()


def test_a_missing_gcloud_or_account_is_explained(config, capsys, gcloud, monkeypatch, tmp_path):
    (gcloud / 'account').write_text('')
    assert 'gcloud auth login' in call(capsys, 'tpu-vm', config, *CALL, BUCKET, code=2)
    monkeypatch.setenv('PATH', str(tmp_path))
    assert 'there is no gcloud' in call(capsys, 'tpu-vm', config, *CALL, BUCKET, code=2)


def test_a_missing_bucket_is_found_before_slices_are_asked_for(config, capsys, gcloud, bucket_servers, monkeypatch):
    for key, value in bucket_servers('gs').environment.items():
        monkeypatch.setenv(key, value)
    text = call(capsys, 'tpu-vm', config, *CALL, 'run_dir=gs://no-such-bucket/x', code=2)
    assert 'No such bucket' in text
    assert 'create' not in calls(gcloud)


def test_plugins_in_metadata_have_a_limit(config, capsys, tmp_path):
    (tmp_path / 'large.py').write_text('#' * 300_000)
    text = call(capsys, 'tpu-vm', config, *CALL, BUCKET, 'plugins=[large.py]', code=2)
    assert 'metadata has at most 262,144' in text


def test_a_container_gets_the_configuration_and_its_number():
    slices = Slices(
        name='x', accelerator='v5p-16', hosts=2, slices=1, runtime='r', zone='z', image='registry/pretrax:tpu'
    )
    script = startup_script(slices, {CONFIG: 'steps: 1\n'})
    train = next(line for line in script.splitlines() if 'docker run' in line)
    directory = '/var/lib/pretrax/x'
    for part in (
        f'--volume {directory}:{directory}',
        '--privileged',
        '--network host',
        '--env PRETRAX_PROCESS',
        '--env PRETRAX_MEMORY',
    ):
        assert part in train
    assert f'registry/pretrax:tpu pretrax launch node {directory}/config.yaml' in train
    assert 'docker pull --quiet registry/pretrax:tpu' in script


def test_the_output_of_each_process_is_that_of_its_vm():
    slices = Slices(name='x', accelerator='v5p-16', hosts=2, slices=3, runtime='r', zone='z')
    record = LaunchRecord(engine='tpu-vm', job='x', nodes=6, facts={**vars(slices)})
    command = engine_of(record).log_command(record, Path('runs/x'), 5, 7, True)
    assert {'--node=2', '--worker=1'} <= set(command)
    assert command[-1] == '--command=tail -n 7 -F /var/lib/pretrax/x/output.txt'


SLICES = Slices(name='x', accelerator='v5p-8', hosts=1, slices=1, runtime='r', zone='z')
FAILS, HANGS = (1, '', 'ERROR: (gcloud) UNAVAILABLE: 503'), (124, '', 'no answer in 120 s')
ENDED = (0, 'pretrax: process 0 exit code 0\n', '')


@pytest.fixture
def watch(monkeypatch):
    """Watches a run whose gcloud gives these answers to each verb; the last one again and again."""

    def run(patience=60.0, **answers):
        said, asked = [], []

        def answer(command, seconds=120.0):
            assert seconds is not None
            asked.append(command[4])
            given = answers[command[4]]
            return subprocess.CompletedProcess(command, *(given.pop(0) if len(given) > 1 else given[0]))

        monkeypatch.setattr(tpu_vm, 'run_tool', answer)
        monkeypatch.setattr(tpu_vm, '_PATIENCE', patience)
        try:
            code = tpu_vm.Watch(SLICES, {CONFIG: 'steps: 1\n'}, said.append, every=0.01).run()
        except UserError as error:
            code = error
        return code, said, asked

    return run


def test_calls_of_gcloud_that_fail_or_hang_do_not_end_the_watch(watch):
    """A slice that was taken back meanwhile is replaced, and the slices are deleted at the end: they cost money."""
    code, said, asked = watch(
        describe=[FAILS, FAILS, HANGS, (0, 'SUSPENDED', ''), (1, '', 'NOT_FOUND'), FAILS, (0, 'ACTIVE', '')],
        delete=[(0, '', ''), FAILS, FAILS, (0, '', '')], create=[FAILS, (0, '', '')],
        ssh=[HANGS, HANGS, (1, '', ''), ENDED],
    )  # fmt: skip
    assert code == 0
    assert asked.count('delete') == 4
    assert asked[-1] == 'delete'
    assert asked.count('ssh') == 4, 'a run that has ended is not asked again'
    assert sum('no answer in 120 s' in line and 'ssh' not in line for line in said) == 1
    assert sum('do not answer ssh' in line for line in said) == 1
    assert sum('describe' in line and '503' in line for line in said) <= 2, 'each failure is reported once'


def test_a_watch_ends_after_gcloud_has_failed_for_long(watch):
    error, said, _ = watch(patience=0.2, describe=[(0, 'ACTIVE', ''), FAILS], ssh=[(1, '', '')])
    assert 'gcloud has failed for' in str(error)
    assert 'the run goes on' in str(error)
    assert 'gcloud auth login' in str(error)
    assert len([line for line in said if '503' in line]) == 1
    error, _, _ = watch(patience=0.2, describe=[(0, 'ACTIVE', '')], ssh=[ENDED], delete=[FAILS])
    assert 'the run has ended with 0' in str(error)
    assert 'delete x --zone=z --force' in str(error)


def test_a_gcloud_that_hangs_is_ended(monkeypatch, tmp_path):
    (tmp_path / 'gcloud').write_text('#!/bin/sh\nsleep 100\n')
    (tmp_path / 'gcloud').chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}{os.pathsep}{os.environ["PATH"]}')
    monkeypatch.setattr(tpu_vm, '_WAIT', 0.5)
    began = time.monotonic()
    with pytest.raises(UserError, match=r'no answer in 0\.5 s'):
        tpu_vm.ENGINE.status(tpu_vm.record_of(SLICES))
    assert time.monotonic() - began < 20


needs_namespaces = pytest.mark.skipif(
    shutil.which('unshare') is None or subprocess.run(['unshare', '--mount', 'true'],
    capture_output=True).returncode != 0,
    reason='namespaces of Linux need root',
)  # fmt: skip


class Vms:
    """Two slices of one host: metadata servers, and what the VMs need to run on this machine."""

    def __init__(self, tmp_path, gcloud, server, monkeypatch, **changes):
        self.gcloud, self.run_dir, self.directory = gcloud, locate(f'{server.url}/runs/run'), tmp_path
        self.config = write_run(tmp_path, steps=60, plugins=['plugin.py', 'tpu_vm.py'], **changes)
        (tmp_path / 'tpu_vm.py').write_text(TPU_VM)
        for key, value in environment(**server.environment).items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv('JAX_FORCE_TPU_INIT', '1')
        monkeypatch.setenv('JAX_COORDINATOR_PORT', str(free_port()))
        self.said = tmp_path / 'said.txt'
        self.process = None

    def serve(self, stack):
        addresses = []
        for this in range(2):
            slices = {
                'MEGASCALE_COORDINATOR_ADDRESS': '127.0.0.1',
                'MEGASCALE_NUM_SLICES': 2,
                'MEGASCALE_SLICE_ID': this,
            }
            attributes = {
                'agent-worker-number': '0', 'worker-network-endpoints': '127.0.0.1',
                'tpu-env': ''.join(f"{name}: '{value}'\n" for name, value in slices.items()),
            }  # fmt: skip
            addresses.append(stack.enter_context(serve_metadata(attributes)))
        (self.gcloud / 'metadata.json').write_text(json.dumps(addresses))

    def launch(self):
        """The foreground command; its output goes to the file `said`."""
        command = [
            sys.executable, '-m', 'pretrax', 'launch', 'tpu-vm', str(self.config), f'run_dir={self.run_dir}',
            'mesh.d=2',
            '--accelerator', 'v5e-1', '--slices', '2', '--zone', 'z', '--setup', 'true', '--every', '1',
        ]  # fmt: skip
        with self.said.open('w') as said:
            self.process = subprocess.Popen(command, cwd=self.directory, stdout=said, stderr=subprocess.STDOUT)

    def output(self):
        return self.said.read_text() + '\n'.join(
            path.read_text()[-3000:] for path in self.gcloud.glob('*/vm-*/pretrax/run/output.txt')
        )

    def until_checkpoint(self, after=0):
        def newest():
            assert self.process.poll() is None, self.output()
            return newest_checkpoint(self.run_dir) > after

        wait_until(newest)

    def losses(self):
        lines = read_metrics(self.run_dir / 'metrics.jsonl')
        return {line['step']: line['loss'] for line in lines}


@pytest.mark.slow
@needs_namespaces
class TestRecovery:
    @pytest.fixture
    def vms(self, tmp_path, gcloud, bucket_servers, monkeypatch):
        server = bucket_servers('gs')
        server.reset()
        vms = Vms(tmp_path, gcloud, server, monkeypatch)
        with contextlib.ExitStack() as stack:
            vms.serve(stack)
            yield vms
            if vms.process is not None:
                vms.process.kill()
                vms.process.wait()
            subprocess.run(
                ['gcloud', 'compute', 'tpus', 'queued-resources', 'delete', 'run', '--zone=z'], capture_output=True
            )

    def expected(self, vms, tmp_path, monkeypatch):
        with monkeypatch.context() as plain:
            plain.delenv('JAX_FORCE_TPU_INIT')
            return undisturbed(vms.config, tmp_path / 'undisturbed', 2, 'mesh.d=2')

    def test_slices_that_google_takes_back_are_replaced(self, vms, tmp_path, gcloud, monkeypatch):
        """Every loss equals that of a run on this machine;
        the number of each process comes from its metadata server.
        """
        expected = self.expected(vms, tmp_path, monkeypatch)
        vms.launch()
        vms.until_checkpoint()
        subprocess.run(['gcloud', 'compute', 'tpus', 'queued-resources', 'preempt', 'run'], check=True)
        assert vms.process.wait(300) == 0, vms.output()
        assert vms.losses() == expected
        made = [name for name in calls(gcloud) if name in ('create', 'delete')]
        assert made == ['create', 'delete', 'create', 'delete']  # deleted after its end: it costs no more money
        assert 'Google has taken the slices back' in vms.said.read_text()

    def test_a_killed_process_goes_on_from_the_memory_of_its_vm(self, vms, tmp_path, monkeypatch):
        values = json.loads(vms.config.read_text()) | {'checkpoint': {'every': 0, 'memory': {'every': 1}}}
        vms.config.write_text(json.dumps(values))
        expected = self.expected(vms, tmp_path, monkeypatch)
        vms.launch()
        wait_until(lambda: 'step 20/' in vms.output())
        os.kill(running('pretrax', 'train', '/var/lib/pretrax/run/config.yaml')[0], signal.SIGKILL)
        first = vms.gcloud / 'run' / 'vm-0' / 'pretrax' / 'run' / 'output.txt'
        wait_until(lambda: ', memory of this machine' in first.read_text())
        assert vms.process.wait(300) == 0, vms.output()
        assert vms.losses() == expected
