"""Whole sets of files, with the names and dtypes of releases on the hub, come in and go out again.

The weights are those of tests/goldens. What is around them, such as masks, tables, tokenizers and ids, is as in the
releases that each case names; sizes are small. Names and dtypes are from memory, since the tests have no network; that
of Gemma 3's token without a row is in huggingface/transformers issue 37011.
"""

import json
import struct
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import models, pre_tokenizers

from pretrax.cli import main
from pretrax.config import load
from pretrax.data.batches.source import HostBatch
from pretrax.errors import UserError
from pretrax.evaluate.scorer import Scorer
from pretrax.huggingface.model import open_model
from pretrax.run.setup import prepare
from pretrax.weights.origin import shapes_of
from pretrax.weights.trained import open_trained

GOLDENS = Path(__file__).parents[1] / 'goldens'
# Names of safetensors 0.8, and their bits
BITS = {
    'BOOL': 8, 'U8': 8, 'I8': 8, 'F8_E5M2': 8, 'F8_E4M3': 8, 'F8_E8M0': 8, 'F8_E4M3FNUZ': 8, 'F8_E5M2FNUZ': 8,
    'I16': 16,
    'U16': 16, 'I32': 32, 'U32': 32, 'C64': 64, 'F64': 64, 'I64': 64, 'U64': 64, 'F4': 4, 'F6_E2M3': 6, 'F6_E3M2': 6,
}  # fmt: skip


def write_tensors(path, tensors, raw=()):
    """Writes arrays, and tensors of dtypes that NumPy lacks: {name: (dtype, shape, bytes)}."""
    save_file(tensors, path)
    content = path.read_bytes()
    (length,) = struct.unpack('<Q', content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for name, (dtype, shape, values) in dict(raw).items():
        header[name] = {'dtype': dtype, 'shape': shape, 'data_offsets': [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack('<Q', len(text)) + text + data)


def write_tokenizer(directory, n, special=(), **settings):
    """A tokenizer with `n` tokens, letters and special tokens, and the file that names these."""
    letters = {chr(0x21 + i if i < 90 else 0x100 + i): i for i in range(n)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(letters, unk_token='!'))
    tokenizer.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in special])
    tokenizer.save(str(directory / 'tokenizer.json'))
    (directory / 'tokenizer_config.json').write_text(json.dumps(settings))


def golden(case):
    return json.loads((GOLDENS / case / 'config.json').read_text()), load_file(GOLDENS / case / 'model.safetensors')


def gpt2(directory):
    """openai-community/gpt2: without the prefix, with masks in F32;
    files of other tools have them in U8, and the head twice.
    """
    config, tensors = golden('gpt2')
    weights = {name.removeprefix('transformer.'): x for name, x in tensors.items()}
    mask = np.tril(np.ones((1, 1, 64, 64), np.uint8))
    masks = {f'h.{i}.attn.bias': mask if i else mask.astype(np.float32) for i in range(2)}
    masks |= {f'h.{i}.attn.masked_bias': np.array(-1e4, np.float32) for i in range(2)}
    save_file(weights | masks | {'lm_head.weight': weights['wte.weight']}, directory / 'model.safetensors')
    write_tokenizer(directory, 95, ['<|endoftext|>'], model_max_length=1024)
    (directory / 'vocab.json').write_text('{}')
    (directory / 'merges.txt').write_text('#version: 0.2\n')
    return config | {'n_ctx': 64, 'bos_token_id': 95, 'eos_token_id': 95}, tensors


def pythia(directory):
    """EleutherAI/pythia-160m: F16, masks in BOOL or U8, the value of masked scores, and the angles in F32 or F64."""
    config, tensors = golden('gpt-neox')
    weights = {name: x.astype(np.float16) for name, x in tensors.items()}
    for i in range(2):
        layer = f'gpt_neox.layers.{i}.attention.'
        weights[layer + 'bias'] = np.tril(np.ones((1, 1, 64, 64), np.uint8 if i else bool))
        weights[layer + 'masked_bias'] = np.array(-1e9, np.float32)
        weights[layer + 'rotary_emb.inv_freq'] = np.ones(2, np.float64 if i else np.float32)
    save_file(weights, directory / 'model.safetensors')
    write_tokenizer(directory, 94, ['<|endoftext|>', '<|padding|>'], eos_token='<|endoftext|>')
    (directory / 'special_tokens_map.json').write_text(json.dumps({'eos_token': '<|endoftext|>'}))
    return config | {'bos_token_id': 94, 'eos_token_id': 94}, {
        name: x.astype(np.float16) for name, x in tensors.items()
    }


def llama2(directory):
    """meta-llama/Llama-2-7b-hf: F16 in shards with angles,
    an index that lists more angles than the files have, tokenizer.model.
    """
    config, tensors = golden('llama2')
    half = {name: x.astype(np.float16) for name, x in tensors.items()}
    angles = {f'model.layers.{i}.self_attn.rotary_emb.inv_freq': np.ones(3, np.float32) for i in range(2)}
    names = sorted(half)
    shards = {
        f'model-0000{number + 1}-of-00002.safetensors': {name: half[name] for name in names[number::2]}
        for number in (0, 1)
    }
    first, second = shards
    save_file(shards[first] | {next(iter(angles)): angles[next(iter(angles))]}, directory / first)
    save_file(shards[second], directory / second)
    weight_map = {name: file for file, part in shards.items() for name in part} | dict.fromkeys(angles, second)
    (directory / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))
    (directory / 'tokenizer.model').write_bytes(b'a model of sentencepiece')
    write_tokenizer(directory, 94, ['<s>', '</s>'], bos_token='<s>', eos_token='</s>', add_bos_token=True)
    (directory / 'generation_config.json').write_text(json.dumps({'bos_token_id': 94, 'eos_token_id': 95}))
    return config | {'bos_token_id': 94, 'eos_token_id': 95}, half


def mistral(directory):
    """mistralai/Mistral-7B-v0.3: the weights again under Mistral's own names,
    in consolidated.safetensors, and its params.json.
    """
    config, tensors = golden('mistral')
    half = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    save_file(half, directory / 'model.safetensors')
    save_file({'layers.0.attention.wq.weight': np.ones((2, 2), np.float32)}, directory / 'consolidated.safetensors')
    (directory / 'params.json').write_text('{"dim": 24}')
    (directory / 'tokenizer.model.v3').write_bytes(b'a model of sentencepiece')
    write_tokenizer(directory, 94, ['<s>', '</s>'], bos_token='<s>', eos_token='</s>')
    return config | {'bos_token_id': 94, 'eos_token_id': 95}, half


def gemma3(directory):
    """google/gemma-3-1b-it: BF16, and a tokenizer with <image_soft_token>, for which the text model has no row."""
    config, tensors = golden('gemma3')
    half = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    save_file(half, directory / 'model.safetensors')
    write_tokenizer(directory, 93, ['<bos>', '<eos>', '<end_of_turn>', '<image_soft_token>'], eos_token='<eos>')
    (directory / 'added_tokens.json').write_text(json.dumps({'<image_soft_token>': 96}))
    (directory / 'generation_config.json').write_text(json.dumps({'bos_token_id': 93, 'eos_token_id': [94, 95]}))
    return config | {'bos_token_id': 93, 'eos_token_id': [94, 95], 'pad_token_id': 0}, half


def qwen2(directory):
    """Qwen/Qwen2.5-0.5B, as `safetensors.torch.save_model` writes it:
    of the tied embedding and head only lm_head.weight.
    """
    config, tensors = golden('qwen2')
    half = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    stored = {'lm_head.weight' if name == 'model.embed_tokens.weight' else name: x for name, x in half.items()}
    save_file(stored, directory / 'model.safetensors')
    write_tokenizer(
        directory, 90, ['<|endoftext|>', '<|im_start|>', '<|im_end|>'], eos_token='<|im_end|>', bos_token=None
    )
    return config | {'bos_token_id': 90, 'eos_token_id': 92}, half


def imported(write, tmp_path, name='source'):
    """The run of an import, and the tensors that an export should have."""
    source = tmp_path / name
    source.mkdir()
    config, expected = write(source)
    (source / 'config.json').write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        main(['import', str(source), '--out', str(tmp_path / 'run')])
    assert ended.value.code in (0, None)
    return tmp_path / 'run', config, expected


@pytest.mark.parametrize('write', [gpt2, pythia, llama2, mistral, gemma3, qwen2])
def test_a_whole_release_comes_in_and_goes_out(write, tmp_path, capsys):
    run, config, expected = imported(write, tmp_path)
    said = capsys.readouterr().out
    count = sum(x.size for x in expected.values())
    assert f'imported {count:,} parameters into' in said  # without the rows that pad the vocabulary
    assert ('tensors that are not weights are left out' in said) == (write in (gpt2, pythia, llama2))
    with pytest.raises(SystemExit):
        main(['export', str(run), str(tmp_path / 'out')])
    found = load_file(tmp_path / 'out' / 'model.safetensors')
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name].dtype, found[name].tobytes()) == (x.dtype, x.tobytes()), name
    written = json.loads((tmp_path / 'out' / 'config.json').read_text())
    for field in ('bos_token_id', 'eos_token_id', 'pad_token_id'):
        assert written.get(field) == config.get(field), field


def test_a_token_without_a_row_is_refused_only_where_it_occurs(tmp_path):
    run, _, _ = imported(gemma3, tmp_path)
    trained = open_trained(str(run))
    model = trained.run.recipe.model
    assert (trained.run.source.vocab_size, model.vocab_size) == (97, 96)
    assert trained.end_tokens == (94, 95)
    scorer = Scorer(model, trained.run.mesh, 8)
    weights = scorer.prepare(trained.weights())
    assert len(scorer.score(weights, [([5, 95, 7], 2)])) == 1
    with pytest.raises(UserError, match='a text has token 96, but the model has the tokens 0 to 95'):
        scorer.score(weights, [([5, 96, 7], 1)])


def continued(tmp_path, **data):
    """A configuration that trains an import of Gemma 3 on a text."""
    run, _, _ = imported(gemma3, tmp_path)
    (tmp_path / 'text.txt').write_text('the quick brown fox jumps over the lazy dog ' * 40)
    values = {
        'name': 'more', 'run_dir': str(tmp_path / 'more'), 'init_from': str(run), 'steps': 2,
        'data': {'text': str(tmp_path / 'text.txt'), 'tokenizer': str(run / 'data'), **data},
        'batch': {'tokens': 128, 'sequence_length': 16}, 'optimizer': {'learning_rate': 0.001},
    }  # fmt: skip
    (tmp_path / 'config.yaml').write_text(json.dumps(values))
    return tmp_path / 'config.yaml'


@pytest.mark.parametrize('data', [{'validation': 0}, {'streaming': True, 'validation_documents': 0}])
def test_a_run_continues_a_model_with_fewer_rows_than_tokens(data, tmp_path):
    """The text has none of the others. A row of ids
    that has one is refused before a device reads another row instead.
    """
    prepared = prepare(load(continued(tmp_path, **data)), lambda line: None)
    assert 'vocabulary: the tokenizer has 97 tokens, the model the first 96' in '\n'.join(map(str, prepared.startup))
    text = prepared.batch(0)
    assert int(text.tokens.max()) < 96
    rows = HostBatch(*(np.full(text.tokens.shape, n) for n in (5, 96, 1, 0, 1)))
    with pytest.raises(UserError, match='the data have token 96, but the model has the tokens 0 to 95'):
        prepared.place(lambda index: HostBatch(*(x[index] for x in rows)))


@pytest.mark.slow
def test_a_tokenizer_with_more_tokens_trains_from_its_import_and_generates(tmp_path, capsys):
    for command in (
        ['train', str(continued(tmp_path, validation=0))],
        ['generate', str(tmp_path / 'more'), '--prompt', 'the', '--tokens', '4'],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code in (0, None), capsys.readouterr().err


@pytest.mark.parametrize('dtype', BITS)
def test_every_dtype_may_be_ignored_and_none_but_numbers_may_be_used(dtype, tmp_path):
    config, tensors = golden('llama2')
    (tmp_path / 'config.json').write_text(json.dumps(config))
    angles = (dtype, [8], bytes(BITS[dtype]))
    write_tensors(tmp_path / 'model.safetensors', tensors, {'model.layers.0.self_attn.rotary_emb.inv_freq': angles})
    model = open_model(str(tmp_path))
    like = shapes_of(model.arch)
    assert model.weights(like).dtype == 'F32'
    norm = tensors.pop('model.norm.weight')
    used = (dtype, [24], bytes(24 * BITS[dtype] // 8))
    write_tensors(tmp_path / 'model.safetensors', tensors, {'model.norm.weight': used})
    if dtype == 'F64':
        assert len(list(open_model(str(tmp_path)).weights(like).pieces('norm'))) == 1
        return
    with pytest.raises(UserError, match=f'model.norm.weight is {dtype}; expected F32, BF16, F16, F64') as error:
        open_model(str(tmp_path)).weights(like)
    assert ('quantized' in str(error.value)) == (dtype not in ('BOOL', 'C64'))
    assert norm.shape == (24,)


def test_weights_in_f64_are_rounded_to_f32_unless_they_are_too_large(tmp_path):
    config, tensors = golden('llama2')
    (tmp_path / 'config.json').write_text(json.dumps(config))
    exact = {name: x.astype(np.float64) * (1 + 1e-9) for name, x in tensors.items()}
    save_file(exact, tmp_path / 'model.safetensors')
    model = open_model(str(tmp_path))
    weights = model.weights(shapes_of(model.arch))
    assert weights.notes == [f'{sum(x.size for x in exact.values()):,} numbers are F64 and are rounded to F32']
    ((_, norm),) = weights.pieces('norm')
    np.testing.assert_array_equal(norm, jnp.asarray(exact['model.norm.weight'], jnp.float32))
    exact['model.norm.weight'][3] = 1e39
    save_file(exact, tmp_path / 'model.safetensors')
    weights = model.weights(shapes_of(model.arch))
    with pytest.raises(
        UserError, match=r'model.norm.weight is F64 and has 1e\+39, but the largest number of F32 is 3.4e\+38'
    ):
        list(weights.pieces('norm'))
