"""`pretrax generate`: text from a run or one of its checkpoints, whatever the devices that wrote it."""

import pty
import re
import sys
import tty
import types

import pytest

from pretrax import config_from_values, pretrain
from pretrax.cli import main
from pretrax.infer.sample import sample
from pretrax.weights.trained import open_trained
from runs import BIGRAM, Quiet


def test_text_of_a_run_and_of_a_checkpoint(values, tmp_path, capsys):
    """Each is the text that the weights of that step write, on other devices than they were trained on."""
    values['checkpoint'] = {'every': 3}
    config = config_from_values(values)
    result = pretrain(config, progress=Quiet())
    choices = types.SimpleNamespace(prompts=('abc', 'fed cab'), tokens=6, temperature=0.9, top_k=50, top_p=0.95)
    expected = sample(result.run.recipe.model, result.state.weights, result.run.source.tokenizer, choices, seed=4)
    flags = '--prompt|abc|--prompt|fed cab|--tokens|6|--temperature|0.9|--top-k|50|--top-p|0.95|--seed|4'.split('|')

    run = tmp_path / 'run'
    newest = text_of(['generate', str(run), *flags], capsys)
    assert newest == ''.join(text + '\n' for text in expected)
    assert text_of(['generate', str(run / 'checkpoints'), *flags], capsys) == newest
    assert text_of(['generate', str(run / 'checkpoints' / '6'), *flags], capsys) == newest
    assert text_of(['generate', str(run / 'checkpoints' / '3'), *flags], capsys) != newest


@pytest.mark.slow
def test_on_cpus_a_model_computes_in_f32_unless_a_flag_chooses_another_dtype(values, tmp_path, capsys):
    pretrain(
        config_from_values(values | {'model': BIGRAM, 'steps': 2, 'precision': {'compute': 'bf16'}}), progress=Quiet()
    )
    run = str(tmp_path / 'run')
    for flags, expected in ([], 'f32'), (['--dtype', 'bf16'], 'bf16'):
        assert open_trained(run, dtype=flags[-1] if flags else None).run.compute == expected
        for command in ['generate', run, '--tokens', '2'], ['eval', run, '--tasks', 'cloze', '--limit', '1']:
            with pytest.raises(SystemExit) as ended:
                main([*command, *flags])
            said = capsys.readouterr().err
            assert not ended.value.code, said
            assert re.search(rf'compute[ds] in {expected}\b', said)


@pytest.mark.slow
def test_generated_controls_reach_a_file_and_no_terminal(values, tmp_path, capsys, monkeypatch):
    pretrain(config_from_values(values), progress=Quiet())
    prompt = 'a\x1b[2J\x9b\u202e\tb\n'
    arguments = ['generate', str(tmp_path / 'run'), '--prompt', prompt, '--tokens', '1']
    assert text_of(arguments, capsys).startswith(prompt)
    screen, terminal = pty.openpty()
    tty.setraw(terminal)
    with open(terminal, 'w', encoding='utf-8') as stream, pytest.raises(SystemExit):
        monkeypatch.setattr(sys, 'stdout', stream)
        main(arguments)
    with open(screen, 'rb', buffering=0) as written:
        assert written.read(1000).decode().startswith('a\ufffd[2J\ufffd\ufffd\tb\n')


def text_of(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ('path', 'message'),
    [
        ('ruin', 'ruin: no such run or checkpoint\nfound: empty, run'),
        ('nowhere/at/all', 'nowhere/at/all: no such run or checkpoint'),
        ('run/checkpoints/5', 'run/checkpoints/5: no such run or checkpoint'),
        ('empty', 'empty has no checkpoint yet'),
    ],
)
def test_a_path_without_a_checkpoint_is_refused(path, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'run' / 'checkpoints' / '4').mkdir(parents=True)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(SystemExit) as ended:
        main(['generate', path])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    'flags',
    [['--top-p', '0'], ['--top-p', '1.5'], ['--tokens', '0'], ['--temperature', '-1'], ['--temperature', 'inf']],
)
def test_flags_out_of_range(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        main(['generate', 'run', *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_generates_with_its_own_tokenizer_even_if_the_text_changed(values, documents, tmp_path, capsys):
    """Tokenized again, the new text would give a tokenizer of the same size with other words in it."""
    values |= {'mesh': {}, 'steps': 2}
    pretrain(config_from_values(values), progress=Quiet())
    command = ['generate', str(tmp_path / 'run'), '--prompt', 'abc', '--tokens', '6']
    before = text_of(command, capsys)
    documents.write_text(documents.read_text().translate(str.maketrans('abcdefgh', 'stuvwxyz')))
    assert text_of(command, capsys) == before
    documents.unlink()
    assert text_of(command, capsys) == before

    (tokens,) = (tmp_path / 'run' / 'data').iterdir()  # without them there is only the text, and it is another one
    tokens.rename(tmp_path / 'elsewhere')
    documents.write_text(''.join(f'{{"text": "{number} words that the run has not seen"}}\n' for number in range(300)))
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    assert 'trained with another tokenizer' in capsys.readouterr().err
