"""The flags of `pretrax generate`, with a stub engine; with a real one: tests/infer/test_command.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrax.infer.sampling_settings import Sampling
from stubbed_generate import generate

PROGRAM = Path(__file__).parents[1] / 'stubbed_generate.py'
SENTENCE = list(b'the cat sat on the mat ')


def test_flags_reach_the_engine(tmp_path):
    flags = (
        '--prompt a --prompt bc --tokens 9 --temperature 0.5 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty '
        '1.5 '
        '--presence-penalty -1 --frequency-penalty 0.25 --seed 7 --n 2 --slots 3'
    )
    engine = generate(flags.split(), tmp_path)
    assert [bytes(request.prompt) for request in engine.asked] == [b'a', b'a', b'bc', b'bc']
    assert [request.choice for request in engine.asked] == [0, 1, 2, 3]
    assert {request.max_tokens for request in engine.asked} == {9}
    sampling = Sampling(
        temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.5, presence_penalty=-1.0,
        frequency_penalty=0.25, seed=7,
    )  # fmt: skip
    assert all(request.sampling == sampling for request in engine.asked)
    assert engine.asked[0].stop_ids == (256,)
    assert (engine.max_length, engine.status().slots) == (11, 3)


def test_the_defaults(tmp_path):
    engine = generate(['--prompt', 'a'], tmp_path)
    assert engine.asked[0].sampling == Sampling(temperature=0.8)
    assert (engine.asked[0].max_tokens, engine.status().slots) == (128, 1)
    assert generate(['--prompt', 'a'] * 9, tmp_path).status().slots == 8
    small = generate(['--prompt', 'a', '--prompt', 'four'], tmp_path, max_length=64)
    assert [request.max_tokens for request in small.asked] == [63, 60]  # as many as the positions leave


def test_texts_are_printed_in_order_whichever_is_finished_first(tmp_path, capsys):
    """The second text is stopped first; what follows a stop is not shown."""
    flags = ['--prompt', 'one: ', '--prompt', 'two: ', '--n', '2', '--tokens', '23', '--temperature', '0']
    generate(flags, tmp_path, script=SENTENCE)
    out, err = capsys.readouterr()
    whole = 'the cat sat on the mat '
    assert out == f'one: {whole}\none: {whole}\ntwo: {whole}\ntwo: {whole}\n'
    assert err.startswith('92 tokens in ')
    assert err.rstrip().endswith(' prompt tokens/s')
    generate([*flags, '--stop', 'on', '--stop', 'sat o'], tmp_path, script=SENTENCE)
    assert capsys.readouterr().out == 'one: the cat \none: the cat \ntwo: the cat \ntwo: the cat \n'


def test_a_stop_string_frees_the_slot(tmp_path, capsys):
    engine = generate(
        ['--prompt', 'x', '--n', '3', '--tokens', '4000', '--stop', 'on', '--slots', '1'], tmp_path, script=SENTENCE
    )
    assert capsys.readouterr().out == 'xthe cat sat \n' * 3
    assert engine.steps < 30  # 1,000 blocks for each text otherwise


def test_text_reaches_a_pipe_while_it_is_written(tmp_path):
    """The whole text would take minutes."""
    arguments = [sys.executable, PROGRAM, '0.2', str(tmp_path), '--prompt', 'Say: ', '--tokens', '4000']
    environment = os.environ | {'PYTHONPATH': str(PROGRAM.parent)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment) as process:
        seen = b''
        while b'tick tick' not in seen:
            part = os.read(process.stdout.fileno(), 1000)
            assert part
            seen += part
        process.kill()
    assert seen.startswith(b'Say: tick ')


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--repetition-penalty', '0'], '--repetition-penalty'),
        (['--min-p', '1.5'], '--min-p'),
        (['--presence-penalty', 'nan'], '--presence-penalty is nan; expected a finite number'),
        (['--min-p', 'nan'], '--min-p'),
        (['--top-p', '0'], '--top-p is 0.0; expected a number above 0 and at most 1'),
        (['--n', '0'], '--n'),
        (['--stop', ''], '--stop is empty'),
        (
            ['--prompt', 'x' * 4000, '--tokens', '128'],
            'a prompt of 4000 tokens and 128 new ones exceed the 4096 positions',
        ),
        (['--prompt', 'x' * 4096], 'a prompt of 4096 tokens leaves no room for an answer'),
        (['--prompt', 'x', '--prompts', 'y', '--out', 'z'], '--prompt and --prompts exclude each other'),
    ],
)
def test_flags_that_cannot_be(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        generate(flags, tmp_path)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
