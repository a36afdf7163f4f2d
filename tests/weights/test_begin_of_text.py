"""A run reads, writes and exports texts as it was trained: with what its documents begin with."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from goldens.make_text_bounds import write_model
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import find_checkpoint, read_description
from pretrax.cli import main
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.infer.answers import encode_prompt
from pretrax.storage import locate
from pretrax.weights.saved import SavedModel
from pretrax.weights.trained import open_trained
from runs import Quiet


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp('begins') / 'model'
    write_model(directory, ends=False)
    return directory


def exported(run, out):
    with pytest.raises(SystemExit) as ended:
        main(['export', str(run), str(out)])
    assert not ended.value.code
    settings = json.loads((out / 'tokenizer_config.json').read_text())
    return Library.from_file(str(out / 'tokenizer.json')).encode('a b').ids, settings


@pytest.mark.slow
@pytest.mark.parametrize('choice', [None, False])
def test_a_run_that_continues_an_import_begins_texts_as_its_documents(model, tmp_path, choice):
    (tmp_path / 'text.txt').write_text('the cat sat on the mat. ' * 40)
    values = {
        'name': 'begins', 'run_dir': str(tmp_path / 'run'), 'steps': 1, 'model': {}, 'init_from': f'hf:{model}',
        'data': {'text': str(tmp_path / 'text.txt'), 'tokenizer': str(model), 'begin_of_text': choice, 'validation': 0},
        'batch': {'tokens': 64, 'sequence_length': 8}, 'optimizer': {'learning_rate': 1e-3}, 'log': {'report': False},
        'eval': {'every': 0}, 'sample': {'every': 0},
    }  # fmt: skip
    progress = Quiet()
    pretrain(config_from_values(values), progress=progress)
    begin = [] if choice is False else [1]
    said = any(
        'texts begin with <s> (id 1) in' in line and 'with nothing in the data' in line for line in progress.said
    )
    assert said == (choice is False)
    trained = open_trained(str(tmp_path / 'run'))
    assert encode_prompt(trained.run.source.tokenizer, 'a b') == [*begin, 4, 3, 5]
    [first] = trained.run.source.train.tokens.read([(0, 3)])
    assert (first >> 1).tolist() == [*begin, 23, 11, 8][:3]
    ids, settings = exported(tmp_path / 'run', tmp_path / 'out')
    assert ids == [*begin, 4, 3, 5]
    assert settings.get('add_bos_token', True) == bool(begin)
    same = (tmp_path / 'out' / 'tokenizer.json').read_bytes() == (model / 'tokenizer.json').read_bytes()
    assert same == (choice is None)


def test_checkpoints_of_an_older_pretrax_begin_texts_as_it_did(model):
    content = (model / 'tokenizer.json').read_bytes()
    imported = {'config': {'data': {'name': 'tokenizer'}}}
    trained = {'config': {'data': {'name': 'text'}}}

    def begin_of_text(description):
        return SavedModel(Path('checkpoints'), 1, description).begin_of_text(content)

    assert begin_of_text(imported) == (1,)
    assert begin_of_text(trained) == ()
    assert begin_of_text(trained | {'begin_of_text': [1]}) == (1,)
    assert begin_of_text(imported | {'begin_of_text': []}) == ()


def test_an_import_says_that_add_bos_token_does_not_count(tmp_path, capsys):
    write_model(tmp_path / 'model', ends=False, add_bos_token=False)
    with pytest.raises(SystemExit):
        main(['import', str(tmp_path / 'model'), '--out', str(tmp_path / 'run')])
    assert 'although tokenizer_config.json has add_bos_token=false' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('choice', 'ids', 'name'),
    [('false', [], 'nothing'), ('true', [1], '<s> (id 1)'), ('</s>', [2], '</s> (id 2)'), ('<none>', None, '')],
)
def test_an_import_begins_texts_as_its_option_says(model, tmp_path, capsys, choice, ids, name):
    run = tmp_path / 'run'
    with pytest.raises(SystemExit) as ended:
        main(['import', str(model), '--out', str(run), '--begin-of-text', choice])
    said = capsys.readouterr()
    if ids is None:
        assert ended.value.code == 2
        assert "'<none>' is not a token" in said.err
        assert not run.exists()
        return
    assert f'tokenizer: {name} begins a text, as --begin-of-text says' in said.out
    assert read_description(*find_checkpoint(locate(str(run))))['begin_of_text'] == ids
    tokenizer = open_trained(str(run)).run.source.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    assert encode_prompt(tokenizer, 'a') == [*ids, 4]
    assert exported(run, tmp_path / 'out')[0] == [*ids, 4, 3, 5]


def test_an_import_records_what_begins_a_text_and_keeps_its_files(model, tmp_path, capsys):
    run, out = tmp_path / 'run', tmp_path / 'out'
    with pytest.raises(SystemExit):
        main(['import', str(model), '--out', str(run)])
    assert 'tokenizer: <s> (id 1) begins a text, as tokenizer.json says' in capsys.readouterr().out
    assert read_description(*find_checkpoint(locate(str(run))))['begin_of_text'] == [1]
    tokenizer = open_trained(str(run)).run.source.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    assert encode_prompt(tokenizer, 'a') == [1, 4]
    exported(run, out)
    for name in ('tokenizer.json', 'tokenizer_config.json'):
        assert (out / name).read_bytes() == (model / name).read_bytes()
