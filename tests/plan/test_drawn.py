"""`pretrax compile --graph FILE`: a compiled step as text, a page and a picture."""

import pytest

from pretrax.cli import main
from pretrax.config import from_values
from pretrax.errors import UserError
from pretrax.plan.drawn import draw
from pretrax.plan.step import compile_ahead
from pretrax.view.program.file import read_program
from runs import BIGRAM

VALUES = {
    'name': 'tiny',
    'steps': 3,
    'model': BIGRAM,
    'data': {'name': 'synthetic', 'vocab_size': 104},
    'batch': {'tokens': 128, 'sequence_length': 16},
    'optimizer': {'learning_rate': 3e-3},
    'mesh': {'d': 4, 't': 2},
    'eval': {'every': 0},
}


def command(*arguments, code=0):
    with pytest.raises(SystemExit) as ended:
        main(['compile', *map(str, arguments)])
    assert ended.value.code == code


def test_a_step_is_drawn_as_text_which_is_drawn_again(tmp_path, capsys):
    planned = compile_ahead(from_values(VALUES | {'run_dir': str(tmp_path / 'run')}), None, lambda _: None)
    text = tmp_path / 'new' / 'step.txt.gz'
    assert draw(planned, text).endswith('kB')
    program = read_program(text)
    assert program.mesh == {'r': 1, 'd': 4, 'e': 1, 'c': 1, 't': 2, 'p': 1}
    command(text, '--graph', tmp_path / 'step.svg')
    assert capsys.readouterr().out == f'wrote {tmp_path / "step.svg"}\n'
    picture = (tmp_path / 'step.svg').read_text()
    assert picture.startswith('<svg ')
    assert '▾ update' in picture
    draw(planned, tmp_path / 'step.html')
    assert '<h1>tiny</h1><span class="hint">8 x cpu</span>' in (tmp_path / 'step.html').read_text()
    with pytest.raises(UserError, match=r'step.html/below.svg: cannot be written'):
        draw(planned, tmp_path / 'step.html' / 'below.svg')


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (['none.yaml', '--graph', 'step.png'], 'must end in .html'),
        (['none.txt.gz', '--graph', 'step.html'], 'none.txt.gz: cannot be read: No such file'),
        (['none.txt.gz'], 'to draw it: pretrax compile none.txt.gz --graph FILE.html'),
    ],
)
def test_mistakes_are_errors_before_anything_is_compiled(arguments, said, capsys):
    command(*arguments, code=2)
    output = capsys.readouterr().err
    assert said in output
    assert len(output.splitlines()) <= 10
