"""`init_from`: a run begins with the weights of a Hugging Face checkpoint or of another run, on any mesh."""

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pretrax import config_from_values, pretrain
from pretrax.cli import main
from pretrax.data.chat.templates import read_chat_template
from pretrax.errors import UserError
from pretrax.huggingface.model import KEPT
from pretrax.model.option_names import nest
from pretrax.run.setup import prepare
from pretrax.train.state import init_state
from pretrax.weights.origin import open_origin
from pretrax.weights.trained import open_trained
from pretrax.weights.warm_start import partial_weights, start_weights
from runs import Quiet, small_values, write_documents

EIGHT = {'r': 8, 'd': 1, 't': 1}  # the quickest to compile
GOLDENS = Path(__file__).parents[1] / 'goldens'
LLAMA = f'hf:{GOLDENS / "llama2"}'


def started(values, **changes):
    """The weights that a run starts from, on the host, and what was said."""
    said = []
    run = prepare(config_from_values(values | changes), said.append)
    with jax.set_mesh(run.mesh):
        weights = start_weights(open_origin(run.config.init_from), run, said.append)
    sizes = {s.data.size for s in weights.layers.attention.q.addressable_shards}
    assert sizes == {
        weights.layers.attention.q.size // run.mesh.shape['d'] // run.mesh.shape['t']
    }  # a slice on each device
    return jax.device_get(weights), '\n'.join(said)


def test_weights_of_hugging_face_on_a_mesh_with_a_larger_vocabulary(values):
    """llama2 of the goldens has 96 tokens, the data 300; 24 is divisible by d, 4 heads by t."""
    weights, said = started(values, model={'vocab_size': 300}, init_from=LLAMA)
    theirs = load_file(GOLDENS / 'llama2' / 'model.safetensors')
    q = theirs['model.layers.1.self_attn.q_proj.weight']
    np.testing.assert_array_equal(weights.layers.attention.q[1], q.T.reshape(24, 4, 6))
    head = theirs['lm_head.weight']
    np.testing.assert_array_equal(weights.unembed[:96], head)
    np.testing.assert_allclose(weights.unembed[96:300], np.tile(head.mean(0), (204, 1)), rtol=1e-5)
    assert not weights.unembed[300:].any()
    assert 'the vocabulary grows from 96 to 300' in said
    assert 'cannot compare the tokenizer with that of' in said


def test_the_model_of_the_checkpoint_need_not_be_repeated(values):
    config = config_from_values(values | {'model': {'vocab_size': 300, 'z_loss': 0.1}, 'init_from': LLAMA})
    assert config.model.options.n_layers == 2
    assert config.model.options.vocab_size == 300  # said here, so not the checkpoint's 96
    assert config.origins['model', 'feed_forward', 'd_ff'] == f'init_from {LLAMA}'
    again = config_from_values(
        config.model_dump(mode='json') | {'init_from': 'hf:/gone'}
    )  # a whole section asks nobody
    assert again.model == config.model


def test_a_tied_checkpoint_may_be_untied(values):
    place = f'hf:{GOLDENS / "smollm2"}'
    weights, said = started(
        values, model={'vocab_size': 300, 'embedding': {'tied': False}}, init_from=place, mesh={'r': 2, 'd': 2, 't': 2}
    )
    np.testing.assert_array_equal(weights.unembed, weights.embed)
    assert 'shares its embedding with its unembedding' in said


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A run of 12 steps: its directory, its configuration and how it ended."""
    directory = tmp_path_factory.mktemp('trained')
    values = small_values(write_documents(directory), directory)
    values |= {'steps': 12, 'mesh': EIGHT, 'schedule': {'name': 'constant'}}
    return directory / 'run', values, pretrain(config_from_values(values), progress=Quiet())


def test_training_goes_on_from_another_run(trained, tmp_path):
    """The weights are those of the run, on another mesh;
    the first loss is where the run ended and not that of a new one.
    """
    run, values, first = trained
    tokenizer = next((run / 'data').glob('*/tokenizer.json'))
    data = {'text': values['data']['text'], 'tokenizer': str(tokenizer)}
    values = values | {'run_dir': str(tmp_path / 'second'), 'init_from': str(run), 'data': data, 'model': {}}
    weights, said = started(values, mesh={'r': 1, 'd': 4, 't': 2})
    same = jax.tree.map(np.array_equal, weights, jax.device_get(first.state.weights))
    assert all(jax.tree.leaves(same))
    assert not [line for line in said.splitlines() if line.startswith('init_from') and 'tokenizer' in line]
    values['optimizer'] = {'learning_rate': 1e-9}
    second = pretrain(config_from_values(values | {'steps': 1}), progress=Quiet())
    assert second.metrics['loss'] == pytest.approx(first.metrics['loss'], abs=0.2)
    assert second.metrics['loss'] < np.log(300) - 0.3
    assert int(second.state.step) == 1


def test_another_tokenizer_is_refused(trained, tmp_path):
    """Two byte-level BPEs, trained on other text: the ids past the bytes mean other tokens."""
    run, values, _ = trained
    other = tmp_path / 'other.txt'
    other.write_text('zyxw zyzy xwxw yxyx wzwz ' * 400)
    data = values['data'] | {'text': str(other), 'validation': 0}
    changes = {'data': data, 'run_dir': str(tmp_path / 'second'), 'init_from': str(run)}
    with pytest.raises(UserError, match=r'trained with another tokenizer: .* ids are other tokens'):
        started(values | changes)
    moved = tmp_path / 'moved'
    shutil.copytree(run / 'checkpoints', moved / 'checkpoints')  # without the tokenizer
    with pytest.raises(UserError, match=r'was trained with another tokenizer \(sha256'):
        started(values | changes | {'init_from': str(moved)})


@pytest.mark.parametrize(
    ('model', 'message'),
    [
        ({'activation': 'geglu'}, 'model.feed_forward.activation differs: swiglu in .*run, geglu in the configuration'),
        (
            {'family': 'qwen2'},
            r'model.attention.qkv_bias differs: False in .*run, True in .*\nleave out the keys of model:',
        ),
        ({'d_ff': 32}, r'model.feed_forward.d_ff differs: 64 in .*\nleave out model.feed_forward.d_ff, to use'),
        ({'n_layers': 2}, r'model.n_layers differs: 1 in .*take only the weights that fit: init_from.partial'),
    ],
)
def test_another_model_than_that_of_the_run_is_refused(trained, tmp_path, model, message):
    run, values, _ = trained
    data = {'text': values['data']['text'], 'tokenizer': str(next((run / 'data').glob('*/tokenizer.json')))}
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)):
        started(values | {'run_dir': str(tmp_path), 'data': data, 'init_from': str(run), 'model': nest(model)})


def test_what_works_with_the_same_weights_is_announced(trained, tmp_path):
    run, values, _ = trained
    data = {'text': values['data']['text'], 'tokenizer': str(next((run / 'data').glob('*/tokenizer.json')))}
    model = {'attention': {'window': 5}, 'rope': {'base': 500.0}}
    _, said = started(values | {'run_dir': str(tmp_path), 'data': data, 'init_from': str(run), 'model': model})
    assert f'model.attention.window differs: 0 in {run}, 5 in the configuration' in said
    assert f'model.rope.base differs: 10000.0 in {run}, 500.0 in the configuration' in said


def test_the_weights_that_fit_are_taken_from_hugging_face_layer_by_layer(values):
    """The golden has two layers: a model of three begins with them,
    and its third layer and its vocabulary are drawn.
    """
    said = []
    model = {'vocab_size': 300, 'n_layers': 3, 'feed_forward': {'d_ff': 48}}
    run = prepare(
        config_from_values(values | {'model': model, 'init_from': {'path': LLAMA, 'partial': True}}), said.append
    )
    with jax.set_mesh(run.mesh):
        drawn = init_state(run.recipe, 0).weights
        weights = jax.device_get(partial_weights(open_origin(LLAMA), run, drawn, said.append))
    theirs = load_file(GOLDENS / 'llama2' / 'model.safetensors')
    for layer in range(2):
        q = theirs[f'model.layers.{layer}.self_attn.q_proj.weight']
        np.testing.assert_array_equal(weights.layers.attention.q[layer], q.T.reshape(24, 4, 6))
    for taken, own in (
        (weights.layers.attention.q[2], drawn.layers.attention.q[2]),
        (weights.layers.feed_forward.up, drawn.layers.feed_forward.up),
        (weights.embed, drawn.embed),
    ):
        np.testing.assert_array_equal(taken, own)
    np.testing.assert_array_equal(weights.norm, theirs['model.norm.weight'])
    said = '\n'.join(said)
    assert f'2 of 3 layers are from {LLAMA}, and the others are drawn' in said
    assert 'layers.up is drawn: [3, 24, 48] here, [2, 24, 40] there' in said


def test_numbers_that_are_not_finite_are_reported(values, tmp_path):
    source = tmp_path / 'source'
    shutil.copytree(GOLDENS / 'llama2', source)
    tensors = load_file(source / 'model.safetensors')
    name = 'model.layers.1.mlp.up_proj.weight'
    tensors[name][3, :2] = np.nan, np.inf
    save_file(tensors, source / 'model.safetensors')
    with pytest.raises(UserError, match=rf'2 numbers are NaN or infinite: 2 in {name}\n.*--allow-not-finite'):
        started(values, model={'vocab_size': 300}, init_from=f'hf:{source}')
    run = tmp_path / 'imported'
    command = ['import', str(source), '--out', str(run)]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    assert not run.exists()
    with pytest.raises(SystemExit) as ended:
        main([*command, '--allow-not-finite'])
    assert not ended.value.code
    _, said = started(values, model={'vocab_size': 300}, init_from=str(run))
    assert f'{run}: 2 numbers are NaN or infinite: 2 in layers.up[1]' in said


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'init_from': LLAMA, 'model': {'vocab_size': 300, 'feed_forward': {'d_ff': 44}}},
            r'model.feed_forward.d_ff differs: 40 in hf:.*, 44 in the',
        ),
        (
            {'init_from': LLAMA, 'model': {'vocab_size': 300, 'embedding': {'tied': True}}},
            'model.embedding.tied differs: False',
        ),
        ({'init_from': LLAMA, 'model': {}}, "vocab_size = 96 is smaller than the tokenizer's 300"),
        ({'init_from': 'hf:/nowhere', 'model': {}}, 'neither a directory nor the id of a hub repository'),
        ({'init_from': 'nowhere', 'model': {}}, 'nowhere is neither a checkpoint nor a run with one'),
        ({'init_from': str(GOLDENS / 'llama2'), 'model': {}}, 'write init_from=hf:'),
        ({'init_from': str(GOLDENS / 'llama-2'), 'model': {}}, 'nor a run with one\nfound: '),
    ],
)
def test_what_does_not_fit_is_refused(values, changes, message):
    with pytest.raises(UserError, match=message):
        started(values, **changes)


def test_a_run_with_a_tokenizer_goes_out_comes_in_and_writes_the_same_text(trained, tmp_path, capsys):
    run = trained[0]
    with pytest.raises(SystemExit):
        main(['export', str(run), str(tmp_path / 'out')])
    assert {path.name for path in (tmp_path / 'out').iterdir()} == {
        'config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json',
    }  # fmt: skip
    (tmp_path / 'out' / 'special_tokens_map.json').write_text('{}')
    (tmp_path / 'out' / 'chat_template.jinja').write_text(
        '{% for message in messages %}{{ message.content }}{% endfor %}'
    )
    with pytest.raises(SystemExit):
        main(['import', str(tmp_path / 'out'), '--out', str(tmp_path / 'imported')])
    first, second = (open_trained(str(place)) for place in (run, tmp_path / 'imported'))
    one, other = (jax.device_get(opened.weights()) for opened in (first, second))
    jax.tree.map(np.testing.assert_array_equal, one.layers, other.layers)
    np.testing.assert_array_equal(one.embed[:300], other.embed[:300])  # the rows after that are padding
    tokenizer = second.run.source.tokenizer
    template = read_chat_template(second.directory.parent / KEPT, tokenizer)
    assert template.encode([{'role': 'user', 'content': 'abc'}]) == tokenizer.encode('abc')
    assert read_chat_template(first.directory.parent / KEPT, tokenizer) is None
    capsys.readouterr()
    for place in (run, tmp_path / 'imported'):
        with pytest.raises(SystemExit):
            main(['generate', str(place), '--prompt', 'abc', '--tokens', '6'])
    texts = capsys.readouterr().out
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]
    assert texts.startswith('abc')
    with pytest.raises(SystemExit):
        main(['export', str(tmp_path / 'imported'), str(tmp_path / 'again'), '--dtype', 'bf16'])
    assert (tmp_path / 'again' / 'special_tokens_map.json').is_file()
    assert (tmp_path / 'again' / 'chat_template.jinja').is_file()
    with pytest.raises(UserError, match='holds weights that were imported, and no training state'):
        pretrain(second.run.config, progress=Quiet())
