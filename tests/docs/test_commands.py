"""Every command in README.md and docs/ runs, and every quoted file is as it is in the repository.

What a page may contain, all of it visible in the page itself:

- a `sh` block: each line is run by bash, in a copy of the repository, in the order of the page. The other pages are run
  where README's commands have been run before, and repeat only a server of those. A trailing `# exit code 2` says how a
  command ends, if not with 0.
- a command that ends with ` &` runs until the next one without has ended, and has to end by itself.
- a block with a title, such as ```yaml title="mine.yaml": if the repository has a file of that name, it has to contain
  the block word for word; if not, the block is written to that file, for the commands after it.
- `pretrax serve` and `pretrax watch` without `--terminal`, which run until the next one or the end of the page; then
  they have to stop with exit code 0. The port 8000 of a page is another one in the test.
- `<!-- not run: reason -->` on the line before a block: only for what would run the tests inside the tests.

The commands are those of the page, with two exceptions: `uv run` is left out, so that they run in the environment of
the tests, and a number of steps up to 1,000 becomes STEPS. What makes them quick is a smaller quickstart in the copy:
SMALLER. The real one is trained in tests/cli/test_train.py.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import boxes
import preloaded
from ray_nodes import ray_nodes
from side_by_side import free_port

REPOSITORY = Path(__file__).parents[2]
PAGES = ['README.md', *sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / 'docs').rglob('*.md'))]
COMMAND = re.compile(r'\s*(\$ |[A-Z_]+=\S+ )*(pip|uv|pretrax|python3?|pytest|git|mkdocs)\s')

STEPS = 5
SMALLER = {
    'configs/quickstart.yaml': {
        'steps': 3, 'model.n_layers': 1, 'data.text': 'src/pretrax/model', 'data.vocab_size': 300, 'batch.tokens': 2048,
        'schedule.warmup': 1, 'eval.batches': 1, 'sample.tokens': 8,
    },
    'configs/moe.yaml': {
        'steps': 2, 'model.n_layers': 1, 'data.text': 'src/pretrax/model', 'data.vocab_size': 300, 'batch.tokens': 2048,
        'schedule.warmup': 1, 'eval.batches': 1,
    },
    'configs/sweeps/quick.yaml': {
        'grid': {'devices': [1], 'model.n_layers': [1], 'batch.tokens': [1024, 2048]}, 'steps': 2, 'warmup': 1,
    },
    'configs/search.yaml': {
        'trials': 2, 'change': {'steps': 3, 'eval.every': 1, 'eval.batches': 1, 'model.n_layers': 1},
        'parameters': {'optimizer.learning_rate': {'low': 3e-4, 'high': 0.1}, 'schedule.warmup': {'low': 1, 'high': 2}},
    },
    'configs/mup.yaml': {'data.text': 'src/pretrax/model', 'data.vocab_size': 300, 'model.n_layers': 1},
    'configs/curriculum.yaml': {'steps': 3, 'schedule.warmup': 1, 'eval.batches': 1},
    'examples/data.yaml': {'steps': 3, 'model.n_layers': 1, 'schedule.warmup': 1},
}  # fmt: skip
FOR_A_TPU = 'compiling for a TPU takes minutes; tests/deviceless compiles such a step'
FOR_GPUS = 'compiling for GPUs needs their compiler; tests/deviceless compiles this step'
FOR_MINUTES = 'compiling for GPUs needs their compiler, and takes minutes'
FOR_SLURM = 'an allocation of Slurm, which this test does not have'
NEEDS_SLURM = 'needs a Slurm; tests/launch/test_slurm.py runs it on one'
NEEDS_MPI = 'needs Open MPI; tests/launch/test_open_mpi.py runs it'
FOR_GOOGLE = 'an account at Google Cloud, which this test does not have'
FOR_A_DEBUGGER = 'it waits for a debugger; tests/repository/test_debugger.py attaches one'
FOR_DOCKER = 'needs a registry; the Dockerfile is built by hand'
TEN_MINUTES = 'it takes ten minutes; tests/benchmarks/test_speedrun.py verifies the entries'
NOT_RUN = {
    **dict.fromkeys(
        (
            'uv run pretrax search on-slurm.yaml',
            'uv run pretrax launch status searches/on-slurm/runs/3',
            'uv run pretrax launch logs searches/on-slurm/runs/3 -n 20',
        ),
        'needs a Slurm; tests/experiments/test_search_engines.py runs such a search on one',
    ),
    'uv run pretrax launch slurm configs/quickstart.yaml name=base --nodes 2 --time 24h': NEEDS_SLURM,
    'uv run pretrax launch status base': NEEDS_SLURM,
    'uv run pretrax launch logs base -n 20': NEEDS_SLURM,
    'uv run pretrax launch stop base': NEEDS_SLURM,
    'uv run pretrax launch slurm configs/sweeps/quick.yaml --time 30m --at-once 4': NEEDS_SLURM,
    'uv run pretrax bench configs/sweeps/quick.yaml --show': NEEDS_SLURM,
    'mpirun -n 2 uv run pretrax train configs/quickstart.yaml name=mpi steps=100': NEEDS_MPI,
    'until mpirun -n 2 uv run pretrax train configs/quickstart.yaml name=mpi steps=100; do sleep 10; done': NEEDS_MPI,
    'pip install uv && uv run pytest': 'it would run this test',
    'uv sync --inexact --extra tpu': FOR_A_TPU,
    'uv run pretrax compile configs/scale/16b.yaml --topology v5e-256 --slices 2 mesh.r=2 mesh.d=256 '
    'batch.tokens=4194304': FOR_A_TPU,
    'uv run pretrax plan configs/scale/16b.yaml --topology v5e-256 mesh.d=256 --verify': FOR_A_TPU,
    'uv run python benchmarks/scale.py v5p-128': FOR_A_TPU,
    'uv run python benchmarks/memory.py --missing': FOR_A_TPU,
    "uv run python benchmarks/schedule.py 'v5p, 8B'": FOR_A_TPU,
    'uv run pretrax train configs/base.yaml run_dir=gs://BUCKET/runs/base log.tensorboard=true': FOR_GOOGLE,
    'gcloud ai tensorboards create --display-name=pretrax --project=PROJECT --region=us-central1': FOR_GOOGLE,
    "pip install 'google-cloud-aiplatform[tensorboard]'": FOR_GOOGLE,
    'tb-gcp-uploader --tensorboard_resource_name=projects/PROJECT/locations/us-central1/tensorboards/ID '
    '--logdir=gs://BUCKET/runs/base/tb --experiment_name=base': FOR_GOOGLE,
    "uv run --with tensorboard --with gcsfs --with 'setuptools<81' tensorboard --logdir "
    "gs://BUCKET/runs/base/tb": FOR_GOOGLE,
    'docker build --target cuda -t REGISTRY/pretrax . && docker push REGISTRY/pretrax': FOR_DOCKER,
    'uv run python -m debugpy --listen 5678 --wait-for-client -m pretrax train configs/quickstart.yaml': FOR_A_DEBUGGER,
    'sky jobs launch examples/skypilot.yaml --env RUN_DIR=gs://bucket/runs/base': 'needs SkyPilot and a cloud',
    'srun pretrax doctor configs/base.yaml': FOR_SLURM,
    'srun pretrax launch node configs/base.yaml --check': FOR_SLURM,
    'uv run pretrax compile configs/scale/8b.yaml --topology h100x8 --slices 4 mesh.r=4 mesh.d=8': FOR_GPUS,
    'uv run pretrax launch slurm cluster.yaml --nodes 4 --gpus-per-node 8 --time 24h --partition gpu '
    '--check': NEEDS_SLURM,
    'uv run pretrax launch status cluster': NEEDS_SLURM,
    'uv run pretrax launch logs cluster -n 20': NEEDS_SLURM,
    'uv run pretrax launch slurm cluster.yaml --nodes 4 --gpus-per-node 8 --time 24h --partition gpu '
    '--elastic': NEEDS_SLURM,
    'uv run pretrax launch stop cluster': NEEDS_SLURM,
    'gcloud auth login': FOR_GOOGLE,
    'gcloud auth application-default login': FOR_GOOGLE,
    'gcloud config set project PROJECT': FOR_GOOGLE,
    'gcloud services enable tpu.googleapis.com': FOR_GOOGLE,
    'gcloud storage buckets create gs://BUCKET --location=us-west4 --uniform-bucket-level-access': FOR_GOOGLE,
    'gcloud compute tpus tpu-vm create try --zone=us-west4-a --accelerator-type=v5litepod-8 '
    '--version=v2-alpha-tpuv5-lite': FOR_GOOGLE,
    'gcloud compute tpus tpu-vm scp pod.yaml try: --zone=us-west4-a': FOR_GOOGLE,
    'gcloud compute tpus tpu-vm ssh try --zone=us-west4-a': FOR_GOOGLE,
    'uv run pretrax doctor pod.yaml run_dir=gs://BUCKET/runs/try': FOR_GOOGLE,
    'uv run pretrax train pod.yaml name=try run_dir=gs://BUCKET/runs/try steps=100': FOR_GOOGLE,
    'uv run pretrax runs gs://BUCKET/runs': FOR_GOOGLE,
    'gcloud compute tpus tpu-vm delete try --zone=us-west4-a --quiet': FOR_GOOGLE,
    'docker build --target tpu -t REGISTRY/pretrax:tpu . && docker push REGISTRY/pretrax:tpu': FOR_DOCKER,
    'uv run pretrax launch tpu-vm pod.yaml run_dir=gs://BUCKET/runs/pod --accelerator v5e-16 --zone us-west4-a --spot '
    '--image REGISTRY/pretrax:tpu': FOR_GOOGLE,
    'uv run pretrax watch gs://BUCKET/runs/pod': FOR_GOOGLE,
    'uv run pretrax launch status gs://BUCKET/runs/pod': FOR_GOOGLE,
    'uv run pretrax launch logs gs://BUCKET/runs/pod --process 3': FOR_GOOGLE,
    'uv run pretrax launch stop gs://BUCKET/runs/pod': FOR_GOOGLE,
    'gcloud compute tpus queued-resources list --zone=us-west4-a': FOR_GOOGLE,
    'gcloud compute tpus tpu-vm list --zone=us-west4-a': FOR_GOOGLE,
    'gcloud storage rm --recursive gs://BUCKET/runs/try': FOR_GOOGLE,
    'uv sync --inexact --extra cuda': FOR_GPUS,
    'uv run pretrax compile configs/scale/8b.yaml --topology h100x8 mesh.d=8 batch.micro=1 model.save=all': FOR_GPUS,
    'uv run pretrax compile configs/scale/8b.yaml --topology h100x8 --slices 8 mesh.d=8 mesh.c=8 batch.tokens=8388608 '
    'batch.sequence_length=1048576 batch.micro=1 model.loss_chunks=16': FOR_MINUTES,
    'uv run python benchmarks/speedrun.py smaller.yaml --by "your name"': TEN_MINUTES,
    'uv run python benchmarks/speedrun.py --check': TEN_MINUTES,
    **dict.fromkeys(
        (
            'pip install uv && export PATH="$HOME/.local/bin:$PATH"',
            'uv sync --inexact --extra tpu --extra cloud --extra nnx',
            'uv run --with tpu-info tpu-info',
            'uv run --with jupyterlab jupyter lab --no-browser --port 8888',
        ),
        'needs a TPU VM',
    ),
    'gcloud compute tpus tpu-vm ssh try --zone=us-west4-a -- -L 8888:localhost:8888': FOR_GOOGLE,
}  # fmt: skip


@dataclasses.dataclass
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    title: str | None
    not_run: str | None
    text: str

    @property
    def commands(self):
        return [line.strip() for line in self.text.replace('\\\n', ' ').splitlines() if line.strip(' #')]


def blocks(page):
    lines = (REPOSITORY / page).read_text().splitlines()
    found, opening = [], None
    for number, line in enumerate(lines):
        if opening is None and (fence := re.match(r' *(`{3,}|~{3,})([\w-]*)(.*)', line)):
            opening = number, *fence.groups()
        elif opening is not None and line.strip() == opening[1]:
            start, _, language, rest = opening
            title = re.search(r'title="([^"]*)"', rest)
            before = re.fullmatch(r'<!-- not run: (.+) -->', lines[start - 1].strip()) if start else None
            text = '\n'.join(lines[start + 1 : number]) + '\n'
            found.append(Block(page, start + 1, language, title and title[1], before and before[1], text))
            opening = None
    assert opening is None, f'{page}:{opening[0] + 1} has no end' if opening else None
    return found


def shortened(command):
    """What the test runs for a command of a page, and the exit code that the page says."""
    command, _, comment = command.partition('  #')
    command = command.strip().removeprefix('pip install uv && ')
    command = command.replace(' quickstart ', ' configs/quickstart.yaml ')  # of this directory, with few steps
    code = re.search(r'exit code (\d+)', comment)
    return few_steps(re.sub(r'uv run (--no-dev |--extra \w+ )*', '', command)), int(code[1]) if code else 0


def few_steps(text):
    return re.sub(r'\bsteps(=|: )(?:1000|\d{1,3})\b', rf'steps\g<1>{STEPS}', text)


def run_page(page, directory, caches, done_before=(), **variables):
    """Runs a page and returns what its commands printed."""
    environment = {
        # a user has no 8 devices
        **os.environ,
        'XLA_FLAGS': '--xla_backend_optimization_level=0',
        'PATH': f'{preloaded.programs()}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}',
        'XDG_CACHE_HOME': str(caches),
        'COLUMNS': '120',
        'BROWSER': 'curl -sf %s',
        **variables,
    }
    port, printed, running = free_port(), '', []
    with contextlib.ExitStack() as server:
        for block in blocks(page):
            if block.title and not (REPOSITORY / block.title).exists():
                (directory / block.title).parent.mkdir(parents=True, exist_ok=True)
                (directory / block.title).write_text(few_steps(block.text).replace(':8000', f':{port}'))
            if block.language != 'sh' or block.not_run:
                continue
            for written in block.commands:
                command, code = shortened(written)
                stays = command.startswith(('pretrax serve ', 'pretrax watch ')) and '--terminal' not in command
                if command in done_before and not stays:
                    continue
                command = command.replace(':8000', f':{port}')
                if stays:
                    server.close()
                    printed += server.enter_context(serving(f'{command} --port {port}', directory, environment))
                    continue
                running.append((written, code, started(command.removesuffix(' &'), directory, environment)))
                if command.endswith(' &'):
                    continue
                while running:
                    written, code, process = running.pop()
                    output, _ = process.communicate()
                    said = f'{block.page}:{block.line}: {written}\nran: {process.args[-1]}\n{output}'
                    assert process.returncode == code, said
                    printed += output
    return printed


def started(command, directory, environment):
    return subprocess.Popen(
        ['bash', '-euo', 'pipefail', '-c', command],
        cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


@contextlib.contextmanager
def serving(command, directory, environment):
    """Runs `pretrax serve` or `pretrax watch`, and gives what it printed until it listens."""
    with subprocess.Popen(
        ['bash', '-c', f'exec {command}'], cwd=directory, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            said = ''
            for line in process.stdout:
                said += line
                if line.startswith(('serving: ', 'watching: ')):
                    break
            assert 'serving: ' in said or 'watching: ' in said, f'{command}\n{said}'
            yield said
            process.terminate()
            assert process.wait(60) == 0, command
        finally:
            process.kill()


@pytest.fixture(scope='module')
def caches(tmp_path_factory):
    return tmp_path_factory.mktemp('caches')


@pytest.fixture(scope='module')
def after_readme(tmp_path_factory, caches):
    """A copy of the repository in which README's commands were run, and what they printed."""
    directory = tmp_path_factory.mktemp('readme') / 'pretrax'
    directory.mkdir()
    for name in ('README.md', 'pyproject.toml'):
        shutil.copy(REPOSITORY / name, directory)
    for name in ('src', 'configs', 'docs', 'examples', 'benchmarks'):
        shutil.copytree(REPOSITORY / name, directory / name, ignore=shutil.ignore_patterns('__pycache__', 'results'))
    for name, changes in SMALLER.items():
        values = OmegaConf.load(directory / name)
        for key, value in changes.items():
            OmegaConf.update(values, key, value)
        OmegaConf.save(values, directory / name)
    return directory, run_page('README.md', directory, caches)


@pytest.fixture
def engines(tmp_path_factory, monkeypatch):
    """The hosts box1 and box2 of `ssh`, and a Ray cluster of two nodes."""
    if boxes.MISSING:
        pytest.skip(boxes.MISSING)
    environment = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_backend_optimization_level=0'}
    directory = tmp_path_factory.mktemp('engines')
    with boxes.boxes(directory, 2, environment) as hosts, ray_nodes(2, environment) as cluster:
        program = directory / 'bin' / 'ssh'
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {hosts.config} "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv('PATH', f'{program.parent}{os.pathsep}{os.environ["PATH"]}')
        yield {'RAY_ADDRESS': cluster.address}


WITH_COMMANDS = [page for page in PAGES if any(block.language == 'sh' for block in blocks(page))]


# The pages of clusters and data start Ray, which forks, and JAX warns about forks if an earlier test has started JAX.
@pytest.mark.filterwarnings('ignore:Exception ignored in. <function _at_fork:pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize(
    'page',
    [
        pytest.param(page, marks=pytest.mark.slow if page == 'README.md' else pytest.mark.nightly)
        for page in WITH_COMMANDS
    ],
)
def test_commands_run(page, after_readme, caches, tmp_path, request):
    directory, printed = after_readme
    if page != 'README.md':
        shutil.copytree(directory, tmp_path / 'pretrax')
        before = {shortened(command)[0] for block in blocks('README.md') for command in block.commands}
        variables = {}
        if page in ('docs/storage.md', 'docs/federation.md'):
            s3 = request.getfixturevalue('s3')
            variables = s3.environment | {'BUCKET': s3.url}
        elif page == 'docs/clusters.md':
            variables = request.getfixturevalue('engines')
        printed = run_page(page, tmp_path / 'pretrax', caches, before, **variables)
    # An excerpt of what a command prints has the beginnings of real lines, whatever the numbers are.
    real = {beginning(line) for line in printed.splitlines()}
    for block in blocks(page):
        if block.language == 'text' and block.title == 'output':
            shown = {beginning(line) for line in block.text.splitlines() if line and not line.startswith((' ', '...'))}
            assert not shown - real, f'{page}:{block.line} shows lines that nothing printed'


def beginning(line):
    return re.split(r'[\s/]', line, maxsplit=1)[0]


@pytest.mark.parametrize('page', PAGES)
def test_quoted_files_are_what_they_are(page):
    for block in blocks(page):
        if block.title and (REPOSITORY / block.title).is_file():
            assert block.text in (REPOSITORY / block.title).read_text(), (
                f'{page}:{block.line} differs from {block.title}'
            )


@pytest.mark.parametrize('page', PAGES)
def test_every_command_is_marked_as_one(page):
    for block in blocks(page):
        if block.not_run:
            assert {NOT_RUN.get(command) for command in block.commands} == {block.not_run}, f'{page}:{block.line}'
        hidden = [line for line in block.text.splitlines() if block.language != 'sh' and COMMAND.match(line)]
        assert not hidden, f'{page}:{block.line} has commands, but is no `sh` block: {hidden[0]}'
        assert block.language not in ('bash', 'shell', 'console'), f'{page}:{block.line}: the language is `sh`'


def test_the_first_commands_in_the_table_of_readme_are_run_by_the_pages_beside_them():
    rows = re.findall(
        r'^\|[^|]+\| `([^`]*uv run [^`]+)` \| \[.*\]\((.+)\) \|$', (REPOSITORY / 'README.md').read_text(), re.MULTILINE
    )
    assert len(rows) == 7
    for command, page in rows:
        run = [written for block in blocks(page) for written in block.commands if block.language == 'sh']
        assert any(written.removeprefix('pip install uv && ').startswith(command) for written in run), (
            f'{page} does not run {command}'
        )


def test_readme_opens_with_two_commands_that_set_themselves_up():
    first, second = (block for block in blocks('README.md')[:2])
    assert first.commands == ['pip install uv && uv run --no-dev pretrax train configs/quickstart.yaml']
    assert second.commands == ['pip install uv && uv run pytest']
    assert second.commands[0] in (REPOSITORY / '.ci' / 'run').read_text().splitlines()
    assert 'pip install uv' not in (REPOSITORY / 'README.md').read_text().split('```', 4)[-1]
    assert len((REPOSITORY / 'README.md').read_text().splitlines()) <= 110, 'README has two screens'


@pytest.mark.slow
@pytest.mark.skipif(shutil.which('gcloud') is None, reason='there is no gcloud')
@pytest.mark.parametrize(
    'command',
    # `gcloud auth` waits for a browser.
    [command for command in NOT_RUN if command.startswith('gcloud ') and not command.startswith('gcloud auth')],
)
def test_gcloud_knows_the_command_and_its_options(command, tmp_path):
    """Nobody is logged in, which gcloud says after it has parsed a command; it refuses what it does not know before."""
    nobody = {
        'CLOUDSDK_CONFIG': str(tmp_path / 'nobody'),
        'CLOUDSDK_CORE_DISABLE_PROMPTS': '1',
        'CLOUDSDK_CORE_PROJECT': 'project',
    }
    done = subprocess.run(
        ['bash', '-c', command.replace('PROJECT', 'project')],
        env=os.environ | nobody, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert 'active account' in done.stderr or done.returncode == 0, done.stderr
