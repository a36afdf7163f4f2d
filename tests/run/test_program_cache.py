"""Compiled programs kept from run to run: nothing that is computed changes,
and whatever fails costs the compiler's time.
"""

import json
import os
import subprocess
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

from preloaded import programs
from pretrax.run.devices import available_devices
from pretrax.run.program_cache import compile_or_load, keep_programs, remove_oldest
from runs import BIGRAM

VALUES = {
    'name': 'kept', 'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': 96}, 'steps': 4,
    'batch': {'tokens': 64, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-2}, 'mesh': {'d': 1},
    'schedule': {'name': 'constant'}, 'precision': {'compute': 'f32'}, 'log': {'every': 1}, 'eval': {'every': 0},
}  # fmt: skip

# Runs, each in a process that is forked before JAX has a backend: [{"values", "cache", "on", "cut"}, ...] in; what each
# said out.
RUNS = """
import glob, json, os, sys, warnings
import jax
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import Checkpoints
from runs import Quiet

warnings.filterwarnings('ignore', 'os.fork')
for order in json.load(sys.stdin):
    for path in glob.glob(order.get('cut', '')):
        os.truncate(path, 1000)
    if not (process := os.fork()):
        os.environ['XDG_CACHE_HOME'] = order['cache']
        jax.config.update('jax_enable_compilation_cache', order.get('on', True))
        progress = Quiet()
        pretrain(config_from_values(order['values']), progress=progress)
        with open(order['values']['run_dir'] + '/said.json', 'w') as said:
            json.dump(progress.said, said)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, order
"""


def run_all(*orders):
    """[(what a run said, its losses), ...]"""
    environment = {key: value for key, value in os.environ.items() if key != 'JAX_COMPILATION_CACHE_DIR'} | {
        'XLA_FLAGS': '--xla_backend_optimization_level=0', 'PYTHONPATH': str(Path(__file__).parents[1]),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }  # fmt: skip
    done = subprocess.run(
        [programs() / 'python', '-c', RUNS], input=json.dumps(orders), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = []
    for order in orders:
        directory = Path(order['values']['run_dir'])
        losses = [json.loads(line)['loss'] for line in (directory / 'metrics.jsonl').read_text().splitlines()]
        found.append((json.loads((directory / 'said.json').read_text()), losses))
    return found


@pytest.fixture
def disk(tmp_path):
    """A file system of its own that is full but for a few kilobytes, made for this user alone."""
    place = tmp_path / 'disk'
    place.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k,mode=700', 'tmpfs', place], capture_output=True)
    if mounted.returncode:
        pytest.skip('file systems cannot be mounted here')
    (place / 'other').write_bytes(b'x' * 40_000)
    yield place
    subprocess.run(['umount', '-l', place], check=True)


def test_a_run_takes_the_step_of_the_one_before_and_computes_the_same(tmp_path, disk):
    """Compiled, taken, compiled again where the file is cut, taken, without a cache,
    with a full disk, with other options.
    """
    cache = tmp_path / 'cache'

    def order(name, **more):
        return {'values': VALUES | {'run_dir': str(tmp_path / name)}, 'cache': str(cache)} | more

    options = {
        'compiler': {'options': {'xla_cpu_enable_fast_math': False}}
    }  # the default, but another key of the cache
    first, second, cut, after, without, full, other = run_all(
        order('first'), order('second'), order('cut', cut=f'{cache}/pretrax/xla/*-cache'), order('after'),
        order('without', on=False), order('full', cache=str(disk)),
        order('other', values=VALUES | options | {'run_dir': str(tmp_path / 'other')}),
    )  # fmt: skip
    loaded = f'loaded the compiled step from {cache}/pretrax/xla in '

    def spoke(said, beginning):
        return [line for line in said if line.startswith(beginning)]

    assert [len(spoke(said, loaded)) for said, _ in (first, second, cut, after, without, full, other)] == [
        0,
        1,
        0,
        1,
        0,
        0,
        0,
    ]
    assert len(spoke(cut[0], 'WARNING: compiled programs: reading ')) == 1, cut[0]
    (warning,) = spoke(full[0], 'WARNING: compiled programs: writing ')
    assert 'No space left on device' in warning
    assert 'JAX_ENABLE_COMPILATION_CACHE=false' in warning
    assert not [line for said, _ in (first, second, after, without) for line in said if 'WARNING' in line]
    assert len(first[1]) == 4
    assert all(losses == first[1] for _, losses in (second, cut, after, without, full, other)), 'to the last bit'
    assert (cache / 'pretrax' / 'xla').stat().st_mode & 0o777 == 0o700


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """JAX's, as of a user who has set nothing and has a home of his own; as they were, afterwards."""
    names = ('jax_enable_compilation_cache', 'jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs')
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(warnings, 'showwarning', warnings.showwarning)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    jax.config.update('jax_enable_compilation_cache', True)
    jax.config.update('jax_compilation_cache_dir', None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures('settings')
def test_it_is_on_in_a_directory_of_the_user(tmp_path):
    said = []
    for _ in range(2):  # a library may prepare many runs
        keep_programs(said.append)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / 'pretrax' / 'xla')
    assert not said


@pytest.mark.usefixtures('settings')
def test_programs_of_several_cpu_devices_are_compiled_and_not_loaded(tmp_path):
    """A loaded one would run its collectives in any order, and hang."""
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    compilation_cache.reset_cache()  # JAX opens its directory once
    keep_programs(pytest.fail)
    available_devices()
    loaded = {}
    for count in (1, 2):
        mesh = jax.make_mesh((count,), ('d',), devices=jax.devices()[:count])
        whole = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P('d')))
        summed = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, 'd'), mesh=mesh, out_specs=P()))
        loaded[count] = []
        for _ in range(2):
            jax.clear_caches()  # of programs in memory
            loaded[count].append(compile_or_load(summed.lower(whole))[1])
    compilation_cache.reset_cache()
    assert loaded == {1: [None, str(tmp_path / 'pretrax' / 'xla')], 2: [None, None]}


@pytest.mark.usefixtures('settings')
def test_what_the_user_has_chosen_stays(tmp_path):
    jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'mine'))
    keep_programs(pytest.fail)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / 'mine')
    jax.config.update('jax_compilation_cache_dir', None)
    jax.config.update('jax_enable_compilation_cache', False)
    keep_programs(pytest.fail)
    assert jax.config.jax_compilation_cache_dir is None
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures('settings')
def test_a_directory_that_others_can_write_in_is_not_trusted(tmp_path):
    place = tmp_path / 'pretrax' / 'xla'
    place.mkdir(parents=True)
    place.chmod(0o777)
    said = []
    keep_programs(said.append)
    assert jax.config.jax_compilation_cache_dir is None
    assert said == [
        f'WARNING: compiled programs are not kept: others may write to {place} (chmod go-w); '
        'JAX_ENABLE_COMPILATION_CACHE=false switches it off'
    ]


@pytest.mark.usefixtures('settings')
def test_a_home_that_cannot_be_written_is_told_in_a_line(tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    for home, why in ((str(tmp_path / 'file'), 'Not a directory'), ('~nobody-at-all', 'no home directory')):
        monkeypatch.setenv('XDG_CACHE_HOME', home)
        said = []
        keep_programs(said.append)
        assert jax.config.jax_compilation_cache_dir is None
        assert len(said) == 1
        assert why in said[0]


@pytest.mark.usefixtures('settings')
def test_other_warnings_go_where_they_went(recwarn):
    keep_programs(pytest.fail)
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.warn('of something else', UserWarning, stacklevel=1)
    assert [str(one.message) for one in recwarn] == ['of something else']


def test_what_was_used_longest_ago_goes_first(tmp_path):
    (tmp_path / 'below').mkdir()
    for age, name in enumerate(('new', 'below/older', 'oldest')):
        (tmp_path / name).write_bytes(b'x' * 100)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    remove_oldest(tmp_path, 300)
    assert len([path for path in tmp_path.rglob('*') if path.is_file()]) == 3
    remove_oldest(tmp_path, 250)
    assert not (tmp_path / 'oldest').exists()
    remove_oldest(tmp_path, 100)
    assert [path.name for path in tmp_path.rglob('*') if path.is_file()] == ['new']


SCOPES = """
import jax, jax.numpy as jnp
from pretrax.run.devices import available_devices
from pretrax.run.program_cache import compile_or_load

def lowered(scope):
    def program(x):
        with jax.named_scope(scope):
            return jnp.tanh(x @ x)
    return jax.jit(program).lower(jnp.eye(8))

compile_or_load(lowered('first'))
for with_places in (False, True):
    text = compile_or_load(lowered('second'), with_places)[0].as_text()
    print('first' in text, 'second' in text)
"""


def test_a_program_whose_scopes_are_read_is_not_one_of_older_code(tmp_path):
    environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(tmp_path), 'JAX_ENABLE_COMPILATION_CACHE': 'true'}
    environment |= {
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '0',
    }
    done = subprocess.run(
        [programs() / 'python', '-c', SCOPES], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ['True False', 'False True']
