"""`distill:` a run learns from a teacher: any checkpoint, any mesh, exact resumes, and refusals that name the fix."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from decoders import decoder_options
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import CheckpointWeights
from pretrax.config import InitFrom
from pretrax.distill.student import fingerprint
from pretrax.errors import UserError
from pretrax.model.architecture import resolve
from pretrax.run.setup import prepare
from pretrax.train.state import init_state
from pretrax.weights.origin import Origin, with_layers
from pretrax.weights.trained import open_trained
from pretrax.weights.warm_start import warm_state
from runs import Quiet, StoppedAt, lines_of, small_values, without_clock, write_documents
from small import LLAMA4

LLAMA = Path(__file__).parents[1] / 'goldens' / 'llama2'
STUDENT = {'n_layers': 1, 'd_model': 8, 'attention': {'n_heads': 2}}


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
    """The values of a trained run."""
    directory = tmp_path_factory.mktemp('teacher')
    values = small_values(write_documents(directory), directory) | {'mesh': {'r': 8}}
    pretrain(config_from_values(values), progress=Quiet())
    return values


def student_of(teacher, directory, name='student', /, **distill):
    section = {'teacher': teacher['run_dir'], 'temperature': 2.0} | distill
    return teacher | {'name': name, 'run_dir': str(directory / name), 'model': STUDENT, 'distill': section}


def train(values, progress=None, **arguments):
    progress = progress or Quiet()
    pretrain(config_from_values(values), progress=progress, **arguments)
    return progress.said


def loaded(values):
    """The teacher of a run, what was said, and the run."""
    said = []
    run = prepare(config_from_values(values), said.append)
    with jax.set_mesh(run.mesh):
        return run.constants(said.append), said, run


@pytest.mark.slow
def test_a_run_resumes_exactly_and_its_checkpoints_do_not_have_the_teacher(teacher, tmp_path):
    hidden = {'layers': [[0, 0]], 'weight': 0.25}
    whole, parts = (student_of(teacher, tmp_path, name, hidden=hidden) for name in ('whole', 'parts'))
    said = train(whole | {'sample': {'every': 3, 'tokens': 2}})
    assert any(line.startswith('distill.teacher: ') and 'MiB per device' in line for line in said)
    train(parts, StoppedAt(3))
    assert any(line.startswith('resuming from step') for line in train(parts))
    lines, again = (list(map(without_clock, lines_of(values))) for values in (whole, parts))
    assert [line['step'] for line in lines] == [line['step'] for line in again] == [1, 2, 3, 4, 5, 6]
    names = ('loss', 'nll', 'distillation', 'hidden_mse')
    assert [[line[name] for name in names] for line in lines] == [[line[name] for name in names] for line in again]
    loss, nll, distillation, hidden_mse = (lines[0][name] for name in names)
    np.testing.assert_allclose(loss, (nll + distillation) / 2 + hidden_mse / 4, rtol=1e-5)
    assert lines[-1]['distillation'] < distillation
    assert lines[-1]['hidden_mse'] < hidden_mse
    written = json.loads((Path(whole['run_dir']) / 'checkpoints' / '6' / 'manifest.json').read_text())
    assert not [name for name in written['arrays'] if 'teacher' in name]
    check_projection(teacher, whole, written['arrays'], tmp_path)


def check_projection(teacher, student, arrays, directory):
    """Checkpoints have the projection of hidden states, which only training uses:
    another run begins with one of its own.
    """
    assert arrays['weights.hidden_projection']['shape'] == [1, 8, 16]
    assert open_trained(student['run_dir']).weights().hidden_projection is None
    assert 'hidden_projection' not in CheckpointWeights(Path(student['run_dir']) / 'checkpoints', 6).shapes
    values = student_of(teacher, directory, hidden={'layers': [[0, 0]]}) | {'init_from': student['run_dir'], 'seed': 5}
    run = prepare(config_from_values(values), lambda text: None)
    with jax.set_mesh(run.mesh):
        found, drawn = (
            warm_state(run.config.init_from, run, lambda text: None).weights,
            init_state(run.recipe, 5).weights,
        )
    np.testing.assert_array_equal(found.hidden_projection, drawn.hidden_projection)
    assert not np.array_equal(found.embed, drawn.embed)


def test_a_teacher_is_the_same_on_any_mesh(teacher, tmp_path):
    one = loaded(student_of(teacher, tmp_path))[0]
    student = student_of(teacher, tmp_path) | {'mesh': {'r': 2, 'd': 2, 't': 2}}
    other = loaded(student)[0]
    assert {s.data.size for s in other.weights.layers.attention.q.addressable_shards} == {
        other.weights.layers.attention.q.size // 4
    }
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))
    assert fingerprint(one) == fingerprint(other)
    changed = jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1e-6), one)
    assert fingerprint(one) != fingerprint(changed)


def test_a_teacher_of_hugging_face_in_the_compute_dtype(tmp_path):
    values = small_values('none', tmp_path) | {
        'model': STUDENT, 'data': {'name': 'synthetic', 'vocab_size': 96}, 'precision': {'compute': 'bf16'},
        'distill': {'teacher': f'hf:{LLAMA}'},
    }  # fmt: skip
    weights, said, run = loaded(values)
    theirs = load_file(LLAMA / 'model.safetensors')['model.layers.1.self_attn.q_proj.weight']
    found = weights.weights.layers.attention.q[1]
    assert found.dtype == 'bfloat16'
    np.testing.assert_array_equal(found, theirs.T.reshape(found.shape).astype('bfloat16'))
    assert run.recipe.model.teacher.arch.n_layers == 2
    assert any('cannot compare the tokenizer' in line for line in said)


def test_other_tokens_are_refused(teacher, tmp_path):
    values = student_of(teacher, tmp_path, teacher=f'hf:{LLAMA}')
    with pytest.raises(UserError, match=r'distill.teacher: hf:.* vocabulary of 96 tokens, and the model one of 300\n'):
        prepare(config_from_values(values), lambda text: None)
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    text = write_documents(elsewhere)
    lines = [
        json.loads(line)['text'].translate(str.maketrans('abcdefgh', 'stuvwxyz'))
        for line in text.read_text().splitlines()
    ]
    text.write_text(''.join(json.dumps({'text': line}) + '\n' for line in lines))
    values = student_of(teacher, tmp_path) | {'data': teacher['data'] | {'text': str(text)}}
    with pytest.raises(UserError, match=r'distill.teacher: .* was trained with another tokenizer: .* ids are other'):
        loaded(values)


def test_a_student_begins_as_some_layers_of_a_checkpoint(tmp_path):
    """The last layer of two; of Hugging Face, whose files are read by another library."""
    values = small_values('none', tmp_path) | {'data': {'name': 'synthetic', 'vocab_size': 96}}
    start = {'path': f'hf:{LLAMA}', 'layers': [1]}
    config = config_from_values(values | {'model': {}, 'init_from': start})
    assert config.model.options.n_layers == 1
    run = prepare(config, lambda text: None)
    said = []
    with jax.set_mesh(run.mesh):
        weights = warm_state(config.init_from, run, said.append).weights
    theirs = load_file(LLAMA / 'model.safetensors')
    q = theirs['model.layers.1.self_attn.q_proj.weight'].T
    np.testing.assert_array_equal(weights.layers.attention.q, q.reshape(weights.layers.attention.q.shape))
    np.testing.assert_array_equal(weights.norm, theirs['model.norm.weight'])
    assert f'init_from: layers [1] of hf:{LLAMA}' in said
    with jax.set_mesh(run.mesh), pytest.raises(UserError, match=r'init_from.layers: .* has no layer 2; .* 0 to 1'):
        warm_state(InitFrom(path=start['path'], layers=(2,)), run, said.append)
    two = prepare(config_from_values(values | {'model': {'n_layers': 2}, 'init_from': start}), lambda text: None)
    with jax.set_mesh(two.mesh), pytest.raises(UserError, match=r'model.n_layers differs: 1 in .*, 2 in the config'):
        warm_state(two.config.init_from, two, said.append)
    with pytest.raises(UserError, match=r'init_from.layers is given, and so is init_from.partial'):
        config_from_values(values | {'init_from': start | {'partial': True}})


def test_layers_of_other_kinds_are_refused():
    arch = resolve(decoder_options(**LLAMA4), 100, 16)
    origin = Origin('there', None, arch, {}, 100, None, None, (), Path('nowhere'))
    with pytest.raises(UserError, match='layer 1 of there is of another kind than layer 0 of the model has to be'):
        with_layers(origin, [1])


@pytest.mark.slow
def test_another_teacher_at_the_same_place_is_refused_on_resume(teacher, tmp_path):
    copy = tmp_path / 'copy'
    shutil.copytree(teacher['run_dir'], copy)
    values = student_of(teacher, tmp_path, teacher=str(copy))
    train(values, StoppedAt(3))
    more = teacher | {'run_dir': str(copy), 'steps': 8}
    train(more)
    with pytest.raises(UserError, match='was trained with another teacher') as refused:
        train(values)
    assert len(str(refused.value).splitlines()) < 10
    assert any('resuming from step' in line for line in train(values, allow_changes=True))
    shutil.rmtree(copy)
    assert (
        open_trained(values['run_dir']).weights().layers.attention.q.shape[0] == 1
    )  # a trained student needs no teacher
    with pytest.raises(UserError, match=r'distill.teacher: .* is neither a checkpoint nor a run'):
        train(values)


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        (
            {'mesh': {'r': 4, 'p': 2}, 'batch': {'tokens': 256, 'sequence_length': 16}},
            'distill does not support pipeline',
        ),
        ({'model': {'name': 'bigram-of-tests'}}, 'model.name = bigram-of-tests cannot be distilled'),
    ],
)
def test_models_and_meshes_that_do_not_fit_are_refused(teacher, tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        prepare(config_from_values(student_of(teacher, tmp_path) | changes), lambda text: None)
