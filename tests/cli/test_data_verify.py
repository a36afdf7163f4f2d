"""`pretrax data verify`: what is whole passes, what is not ends with exit code 2 and the file's name."""

import pytest

from pretrax.cli import main
from pretrax.data.flat_tokens import TokenizerIdentity
from pretrax.data.flat_tokens_writer import create
from pretrax.data.tokenizer_training import train_tokenizer


def run(*arguments: object) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as caught:
        main(['data', *map(str, arguments)])
    return int(caught.value.code or 0)


def test_whole_tokens_pass_and_others_are_refused(tmp_path, capsys):
    tokenizer = train_tokenizer(['a b c'], 300)
    identity = TokenizerIdentity(sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, end_of_text=0)
    with create(tmp_path / 'tokens', identity, tokenizer.content, {}) as writer:
        writer.append('train', [[1, 2, 0], [3, 0]], n_bytes=3, predicted_bytes=1)
    assert run('verify', tmp_path / 'tokens') == 0
    assert 'train: 2 documents, 5 tokens' in capsys.readouterr().out
    (tmp_path / 'tokens' / 'tokenizer.json').write_text('{}')
    assert run('verify', tmp_path / 'tokens') == 2
    assert 'not the tokenizer that made these tokens' in capsys.readouterr().err
    assert run('verify', tmp_path / 'token') == 2
    assert 'did you mean' in capsys.readouterr().err
