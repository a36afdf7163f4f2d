"""Variables of the environment at the start of a run: used, ignored with a line, or refused with the fix."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from preloaded import run
from pretrax.errors import UserError
from pretrax.run import variables
from pretrax.run.variables import TABLE, check_other_launchers, check_variables, seen_variables, warnings_of
from runs import write_yaml

PAGE = Path(__file__).parents[2] / 'docs' / 'clusters.md'


def test_the_page_has_the_table():
    rows = [f'| {", ".join(f"`{name}`" for name in row.names.split())} | {row.what} |' for row in TABLE]
    assert '\n'.join(['| variables | what pretrax does with them |', '|---|---|', *rows, '']) in PAGE.read_text()


@pytest.mark.parametrize(
    ('setting', 'value'),
    [
        ('jax_enable_x64', True), ('jax_disable_jit', True), ('jax_threefry_partitionable', False),
        ('jax_default_prng_impl', 'rbg'),
        ('jax_random_seed_offset', 5), ('jax_numpy_dtype_promotion', 'strict'), ('jax_numpy_rank_promotion', 'raise'),
        ('jax_transfer_guard', 'disallow'), ('jax_transfer_guard_host_to_device', 'disallow_explicit'),
    ],
)  # fmt: skip
def test_settings_of_jax_that_change_or_end_a_run_are_refused(setting, value):
    check_variables()
    before = jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        with pytest.raises(UserError, match=rf'{setting.upper()} is set to {value}: .*\nunset {setting.upper()}'):
            check_variables()
    finally:
        jax.config.update(setting, before)


def test_what_changes_numbers_is_a_warning(monkeypatch):
    assert warnings_of({'JAX_PLATFORMS': 'cpu', 'JAX_DEFAULT_MATMUL_PRECISION': ''}) == []
    with jax.default_matmul_precision('bfloat16'):
        [line] = warnings_of({'JAX_DEFAULT_MATMUL_PRECISION': 'bfloat16'})
    assert line.startswith('JAX_DEFAULT_MATMUL_PRECISION=bfloat16: products')
    flags = '--xla_dump_to=/tmp/x --xla_cpu_enable_fast_math=true'
    [line] = warnings_of({'XLA_FLAGS': flags})
    assert line == 'XLA_FLAGS=--xla_cpu_enable_fast_math=true: the numbers of the run differ from those without it'
    monkeypatch.setattr(variables, 'gpu_files', lambda: ['/dev/nvidia0'])
    assert warnings_of({'CUDA_VISIBLE_DEVICES': ''}) == ['CUDA_VISIBLE_DEVICES hides all GPUs: the run uses the CPU']


@pytest.mark.parametrize(
    ('name', 'near'),
    [
        ('JAX_ENABLE_X46', 'JAX_ENABLE_X64'),
        ('JAX_NUM_PROCESES', 'JAX_NUM_PROCESSES'),
        ('JAX_PLATFORM', 'JAX_PLATFORMS'),
    ],
)
def test_a_name_that_jax_would_ignore_is_a_warning_with_the_nearest(name, near):
    [line] = warnings_of({name: '1'})
    assert line == f'{name}: JAX {jax.__version__} has no such setting, and ignores it; did you mean {near}?'


def test_every_variable_that_jax_reads_is_known():
    """The source of JAX names them: those of its tests and of its build are not for users."""
    source = Path(jax.__file__).parent
    texts = [
        path.read_text()
        for path in [*source.glob('*.py'), *(source / '_src').rglob('*.py')]
        if 'test' not in path.name and path.name != 'version.py'
    ]
    read = {name for text in texts for name in re.findall(r'environ(?:\.get)?[\[(]\s*[\'"](JAX_\w+)', text)}
    assert {'JAX_LOCAL_DEVICE_IDS', 'JAX_COORDINATOR_ADDRESS'} <= read
    assert [line for line in warnings_of(dict.fromkeys(read, '1')) if 'no such setting' in line] == []


def test_what_is_set_is_in_the_start_up_report():
    seen = {
        'JAX_PLATFORMS': 'cpu',
        'NCCL_DEBUG': 'INFO',
        'RAY_JOB_ID': '1',
        'KUBERNETES_PORT': 'x',
        'HOME': '/root',
        'RANK': '0',
    }
    assert seen_variables(seen) == [
        ('environment', 'used: JAX_PLATFORMS, NCCL_DEBUG'),
        ('environment', 'ignored: KUBERNETES_PORT, RANK, RAY_JOB_ID'),
    ]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(variables, 'gpu_files', lambda: ['/dev/nvidia4', '/dev/nvidia5'])
    for text in ('0,1', 'GPU-1a2b', ''):
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', text)
        check_variables()
    for text in ('0,2', 'gpu0'):
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', text)
        with pytest.raises(UserError, match='is not a GPU of this machine, which has the numbers 0 to 1'):
            check_variables()


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ('--xla_dump_to=/tmp/x --xla_cpu_enable_fast_math', ''),
        ('--xla_cpu_enable_fast_mth=1',
        r'does not know --xla_cpu_enable_fast_mth; did you mean --xla_cpu_enable_fast_m\w+\?\nleave it out'),
        ('--xla_tpu_enable_x=1 --xla_tpu_y',
        'does not know --xla_tpu_enable_x, --xla_tpu_y.*\nflags of TPUs belong in LIBTPU_INIT_ARGS'),
        ('--xla_cpu_enable_fast_math=maybe', '--xla_cpu_enable_fast_math=maybe: XLA does not accept this value\n'),
        ('xla_cpu_enable_fast_math=true', 'is neither a flag.*\nwrite --xla_cpu_enable_fast_math=true'),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_flags_that_xla_does_not_know_are_refused_in_two_lines(flags, said):
    """In a process in which XLA has not read its flags yet."""
    program = 'from pretrax.run.variables import check_variables\ncheck_variables()'
    done = run(['python', '-c', program], env=os.environ | {'XLA_FLAGS': flags})
    last = ''.join(done.stderr.splitlines(keepends=True)[-2:])
    assert bool(done.returncode) == bool(said), done.stderr
    assert re.search(said, last), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'value'), [('JAX_ENABLE_X64', 'maybe'), ('JAX_NUM_CPU_DEVICES', 'two')])
def test_a_value_that_jax_does_not_accept_is_named(name, value, small, tmp_path):
    done = subprocess.run(
        [sys.executable, '-m', 'pretrax', 'train', write_yaml(small | {'model': {'name': 'transformer'}},
        tmp_path / 'run.yaml')],
        env=os.environ | {name: value}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2, f'{name}={value!r}: JAX does not accept this value\nset another one, or unset {name}\n',
    )  # fmt: skip


@pytest.mark.parametrize(
    ('seen', 'count', 'said'),
    [
        ({'PMI_SIZE': '2', 'PMI_RANK': '1'}, 1,
        'JAX_NUM_PROCESSES=$PMI_SIZE JAX_PROCESS_ID=$PMI_RANK JAX_COORDINATOR_ADDRESS=HOST:'),
        ({'WORLD_SIZE': '2', 'RANK': '0', 'MASTER_ADDR': 'a'}, 1, 'JAX_COORDINATOR_ADDRESS=$MASTER_ADDR:'),
        # mpirun of MPICH in a job of Slurm with two nodes
        ({'PMI_SIZE': '8', 'PMI_RANK': '1'}, 2, 'PMI_SIZE=8: MPICH'),
        ({'PMI_SIZE': '2', 'PMI_RANK': '1'}, 2, ''),  # srun --mpi=pmi2
        ({'WORLD_SIZE': '2'}, 1, ''),  # in a shell
        ({'PMI_SIZE': '1', 'PMI_RANK': '0'}, 1, ''),
    ],
)  # fmt: skip
def test_processes_of_other_launchers_are_not_trained_side_by_side(seen, count, said):
    if not said:
        check_other_launchers(count, seen)
        return
    with pytest.raises(UserError, match=re.escape(said)):
        check_other_launchers(count, seen)
