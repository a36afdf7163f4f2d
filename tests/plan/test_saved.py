"""A compiled step in a file: the same losses without compiling, and everything else refused."""

import hashlib
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import zipfile

import jax
import pytest
import yaml

from former import unpacked
from preloaded import programs
from pretrax.config import from_values, load, upgrade_file
from pretrax.errors import UserError
from pretrax.jax_compat import can_be_loaded
from pretrax.plan.saved import opened, save
from pretrax.plan.step import compile_ahead
from pretrax.run.loop import train
from runs import Quiet

VALUES = {
    'name': 'tiny',
    'steps': 3,
    'model': {'n_layers': 2, 'd_model': 32, 'attention': {'n_heads': 4}, 'feed_forward': {'d_ff': 64}},
    'data': {'name': 'synthetic', 'vocab_size': 101},
    'batch': {'tokens': 512, 'sequence_length': 32},
    'optimizer': {'name': 'adamw', 'learning_rate': 3e-3},
    'mesh': {'d': 8},
    'log': {'every': 1},
    'eval': {'every': 0},
}


def config(tmp_path: pathlib.Path, **changes):
    return from_values(VALUES | {'run_dir': str(tmp_path / 'run')} | changes)


@pytest.fixture(scope='module', autouse=True)
def like_an_accelerator():
    """These tests load programs of eight devices, and do not run them: on CPUs, they would hang."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('pretrax.plan.saved.can_be_loaded', lambda devices: True)
        yield


@pytest.fixture(scope='module')
def planned(tmp_path_factory):
    planned = compile_ahead(config(tmp_path_factory.mktemp('compiled')), None, lambda text: None)
    assert planned.fits
    return planned


@pytest.fixture(scope='module')
def file(planned, tmp_path_factory) -> pathlib.Path:
    place = tmp_path_factory.mktemp('saved')
    save(planned, place / 'a.step')
    return place / 'a.step'


def rewritten(file: pathlib.Path, place: pathlib.Path, executable: bytes | None = None, **changes) -> pathlib.Path:
    """A copy with another executable, described rightly, or with other lines in its manifest."""
    with zipfile.ZipFile(file) as old:
        manifest, content = json.loads(old.read('manifest.json')), executable or old.read('executable')
    manifest |= {'executable': hashlib.sha256(content).hexdigest()} | changes
    with zipfile.ZipFile(place, 'w') as new:
        new.writestr('manifest.json', json.dumps(manifest))
        new.writestr('executable', content)
    return place


def test_a_step_that_was_compiled_with_former_keys_is_compared_by_those_of_today(tmp_path, monkeypatch):
    """The manifest is of an earlier pretrax, whose executable cannot be loaded elsewhere:
    only configurations are compared.
    """
    monkeypatch.chdir(unpacked(tmp_path))
    upgrade_file(pathlib.Path('old.yaml'))
    manifest = json.loads(pathlib.Path('step-manifest.json').read_text())
    with zipfile.ZipFile('former.step', 'w') as archive:
        archive.writestr('manifest.json', json.dumps(manifest | {'executable': hashlib.sha256(b'x').hexdigest()}))
        archive.writestr('executable', b'x')
    pathlib.Path('former.step').chmod(0o644)
    assert callable(opened('former.step', load('old.yaml')))
    with pytest.raises(UserError, match=r'another configuration\n +model.attention.window: 8 -> 4\n'):
        opened('former.step', load('old.yaml', ['model.attention.window=4']))


def losses(directory: pathlib.Path) -> list[float]:
    return [json.loads(line)['loss'] for line in (directory / 'metrics.jsonl').read_text().splitlines()]


@pytest.mark.slow
def test_a_step_saved_by_one_process_runs_in_another_without_compiling(tmp_path):
    values = VALUES | {'mesh': {'d': 1}, 'schedule': {'name': 'cosine', 'warmup': 1}}
    (tmp_path / 'a.yaml').write_text(yaml.safe_dump(values))
    environment = {k: v for k, v in os.environ.items() if k not in ('XLA_FLAGS', 'JAX_COMPILATION_CACHE_DIR')}
    environment |= {'XDG_CACHE_HOME': str(tmp_path), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}

    def pretrax(*arguments: str) -> str:
        command = [programs() / 'pretrax', *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout + done.stderr

    plain = pretrax('train', 'a.yaml', 'name=plain')
    pretrax('compile', 'a.yaml', '--save', 'step')  # compiled afresh: a program from XLA's cache cannot be saved
    loaded = pretrax('train', 'a.yaml', 'name=loaded', '--compiled', 'step')
    assert 'compiled the step in' in plain
    assert 'loaded the compiled step in' in loaded
    assert losses(tmp_path / 'runs' / 'plain') == losses(tmp_path / 'runs' / 'loaded')


def test_a_saved_step_is_loaded_and_not_compiled(planned, file, monkeypatch):
    def compile_(*_, **__):
        pytest.fail('a step is compiled')

    monkeypatch.setattr(jax.stages.Lowered, 'compile', compile_)
    loaded = opened(file, planned.run.config)(planned.run, planned.lowered)
    assert loaded.cost_analysis() == planned.compiled.cost_analysis()


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'optimizer': {'name': 'adamw', 'learning_rate': 1e-3}}, r'optimizer.learning_rate: 0.003 -> 0.001'),
        ({'batch': {'tokens': 1024, 'sequence_length': 32}}, r'batch.tokens: 512 -> 1024'),
        ({'batch': {'tokens': 512, 'sequence_length': 64}}, r'batch.sequence_length: 32 -> 64'),
        ({'mesh': {'r': 8}}, r'mesh'),
        ({'steps': 5}, r'steps: 3 -> 5'),
        (
            {'compiler': {'options': {'xla_cpu_enable_fast_math': True}}},
            r'xla_cpu_enable_fast_math: \(absent\) -> True',
        ),
    ],
)
def test_another_configuration_is_refused_with_the_keys_that_differ(file, tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        opened(file, config(tmp_path, **changes))


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'device_kind': 'TPU v5'}, 'other hardware\n.*TPU v5 in the file, cpu in this run'),
        ({'versions': {'jax': '0.11.2'}}, '(?s)by other versions.*jax: 0.11.2 in the file'),
        ({'flags': {'XLA_FLAGS': '--xla_x=1'}}, 'with other flags\n.*--xla_x=1 in the file'),
        (
            {'compiler_options': {'xla_a': True}},
            'with other options of XLA\n.*xla_a: True in the file, none in this run',
        ),
        ({'processes': 2}, 'another number of processes'),
        ({'program': 'f00'}, 'from another program'),
    ],
)
def test_other_hardware_versions_flags_or_programs_are_refused(file, tmp_path, changes, said):
    run = config(tmp_path)
    other = rewritten(file, tmp_path / 'b.step', **changes)
    with pytest.raises(UserError, match=said):
        train(run, progress=Quiet(), compiled=opened(other, run))


def test_a_step_for_several_cpu_devices_is_neither_saved_nor_loaded(planned, file, tmp_path, monkeypatch):
    """XLA loads it without the order of its collectives, and it hangs."""
    monkeypatch.setattr('pretrax.plan.saved.can_be_loaded', can_be_loaded)
    with pytest.raises(UserError, match=r'--save .*: a step for several CPU devices hangs when it is loaded'):
        save(planned, tmp_path / 'a.step')
    assert not (tmp_path / 'a.step').exists()
    with pytest.raises(UserError, match=r'(?s)--compiled .*hangs when it is loaded.*leave --compiled out'):
        opened(file, planned.run.config)(planned.run, planned.lowered)


def test_an_executable_with_unknown_names_is_not_unpickled(file, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'made'),)

    run = config(tmp_path)
    other = rewritten(file, tmp_path / 'b.step', executable=pickle.dumps(Attack()))
    with pytest.raises(UserError, match=r'names (posix|os).mkdir, which is not part of an executable'):
        train(run, progress=Quiet(), compiled=opened(other, run))
    assert not (tmp_path / 'made').exists()


def test_a_malformed_executable_is_refused(planned, file, tmp_path):
    with zipfile.ZipFile(file) as archive:
        whole = archive.read('executable')
    for content in (
        b'x',
        b'\x80',
        whole[:1000],
        pickle.dumps(1),
        pickle.dumps({}),
        pickle.dumps((1, 2, 3)),
        b'\x80\x04R.',
    ):
        other = rewritten(file, tmp_path / 'b.step', executable=content)
        with pytest.raises(UserError, match='the executable cannot be loaded on this machine'):
            opened(other, planned.run.config)(planned.run, planned.lowered)


def test_damaged_and_unrelated_files_are_refused(file, tmp_path):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    bad = {'flipped': bytes(content), 'cut': file.read_bytes()[:-100], 'text': b'hello', 'empty': b''}
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=r'not a compiled step|damaged'):
            opened(tmp_path / name, config(tmp_path))
    with zipfile.ZipFile(tmp_path / 'zip', 'w') as archive:
        archive.writestr('a', 'b')
    for name in ('zip', 'missing'):
        with pytest.raises(UserError, match=r'not a compiled step|cannot be read'):
            opened(tmp_path / name, config(tmp_path))


def test_a_file_that_others_may_have_written_is_refused(file, tmp_path, monkeypatch):
    """A file that `--save` wrote is not, whatever the umask is."""
    assert file.stat().st_mode & 0o022 == 0
    shared = tmp_path / 'shared.step'
    shutil.copy(file, shared)
    shared.chmod(0o666)
    with pytest.raises(
        UserError, match=r'others may write to .*shared.step \(chmod go-w\), and loading the file would run'
    ):
        opened(shared, config(tmp_path))
    monkeypatch.setattr('os.getuid', lambda: 4711)
    monkeypatch.setattr('pathlib.Path.stat', lambda path: os.stat_result((0, 0, 0, 0, 815, 0, 0, 0, 0, 0)))
    with pytest.raises(UserError, match=r'belongs to another user \(number 815\)'):
        opened(file, config(tmp_path))


def test_a_step_for_another_mesh_is_refused_with_both_meshes(file, tmp_path):
    other = rewritten(file, tmp_path / 'b.step', mesh=dict.fromkeys('rdectp', 1) | {'r': 2, 'd': 4})
    run = config(tmp_path)
    with pytest.raises(
        UserError, match=r'another mesh\n    d: 4 in the file, 8 in this run\n    r: 2 in the file, 1 in this run'
    ):
        train(run, progress=Quiet(), compiled=opened(other, run))


def test_a_file_imports_no_plugin(file, tmp_path):
    plugin = tmp_path / 'plugin.py'
    plugin.write_text('raise SystemExit("imported")')
    with zipfile.ZipFile(file) as archive:
        theirs = json.loads(archive.read('manifest.json'))['config'] | {'plugins': [str(plugin)]}
    changed = rewritten(file, tmp_path / 'b.step', config=theirs)
    with pytest.raises(UserError, match=r'plugins: .*plugin\.py'):
        opened(changed, config(tmp_path))
    theirs['schedule'] = {'name': 'of-a-plugin'}
    with pytest.raises(UserError, match='imported only if you name them'):
        opened(rewritten(file, tmp_path / 'c.step', config=theirs), config(tmp_path))


@pytest.mark.filterwarnings('ignore:Error writing persistent compilation cache')
def test_a_program_that_xla_cannot_store_is_refused(tmp_path):
    """XLA cannot store products of oneDNN."""
    options = {
        'xla_cpu_use_onednn': True,
        'xla_cpu_experimental_onednn_fusion_type': 'LIBRARY_FUSION_TYPE_DOT',
    }
    planned = compile_ahead(config(tmp_path, compiler={'options': options}, mesh={}), None, lambda text: None)
    with pytest.raises(UserError, match=r'XLA cannot store this program: .*onednn'):
        save(planned, tmp_path / 'a.step')
    assert not (tmp_path / 'a.step').exists()
