"""`pretrax generate --prompts FILE --out FILE`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrax.data.tokenizers.tokenizer_files import bytes_tokenizer
from pretrax.storage import locate
from stubbed_generate import chat_tokenizer, generate

PROGRAM = Path(__file__).parents[1] / 'stubbed_generate.py'


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def files(tmp_path):
    """A function that writes lines and gives the flags to answer them."""

    def write(*lines):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / 'in.jsonl').write_text('\n'.join(texts))
        return ['--prompts', str(tmp_path / 'in.jsonl'), '--out', str(tmp_path / 'out.jsonl')]

    return write


def test_answers_are_in_the_order_of_the_prompts(files, tmp_path, capsys):
    """Long answers first, so that later ones are finished earlier."""
    lines = [{'id': n, 'prompt': f'prompt {n}', 'max_tokens': 40 - n} for n in range(30)]
    engine = generate([*files(*lines), '--slots', '7'], tmp_path)
    answers = written(tmp_path / 'out.jsonl')
    assert [{key: answer[key] for key in line} for line, answer in zip(lines, answers, strict=True)] == lines
    assert [answer['generated_tokens'] for answer in answers] == [40 - n for n in range(30)]
    assert [answer['prompt_tokens'] for answer in answers] == [len(line['prompt']) for line in lines]
    assert {answer['finish'] for answer in answers} == {'length'}
    assert engine.status().slots == 7
    assert [request.choice for request in engine.asked] == list(range(30))
    assert not (tmp_path / 'out.jsonl.partial').exists()
    out = capsys.readouterr()
    assert out.out == ''
    assert f'{sum(40 - n for n in range(30)):,} tokens in' in out.err


def test_a_line_has_settings_of_its_own(files, tmp_path):
    own = {
        'temperature': 0, 'top_k': 3, 'top_p': 0.5, 'min_p': 0.1, 'repetition_penalty': 1.5, 'presence_penalty': -1,
        'frequency_penalty': 0.25, 'seed': 9,
    }  # fmt: skip
    lines = [{'prompt': 'a'}, {'prompt': 'b', **own, 'n': 2, 'stop': ['on', 'é']}, '', {'prompt': '', 'stop': 'cat'}]
    flags = ['--tokens', '30', '--temperature', '1.5', '--top-k', '40', '--seed', '4', '--stop', 'mat']
    engine = generate([*files(*lines), *flags], tmp_path, script=list(b'the cat sat on the mat '))
    first, second, third, last = engine.asked
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.seed) == (1.5, 40, 4)
    assert {name: getattr(second.sampling, name) for name in own} == own
    assert (second.prompt, second.choice, third.choice) == (third.prompt, 0, 1)
    assert last.prompt == (bytes_tokenizer().end_of_text,)
    answers = written(tmp_path / 'out.jsonl')
    assert [answer['text'] for answer in answers] == ['the cat sat on the ', 'the cat sat ', 'the cat sat ', 'the ']
    assert [answer.get('choice') for answer in answers] == [None, 0, 1, None]
    assert {answer['finish'] for answer in answers} == {'stop'}


def test_an_answer_fits_the_positions_unless_more_tokens_are_asked_for(files, tmp_path):
    engine = generate(files({'prompt': 'four'}, {'prompt': 'a', 'max_tokens': 9}), tmp_path, max_length=64)
    assert [request.max_tokens for request in engine.asked] == [60, 9]


def test_messages_are_encoded_with_the_chat_template(files, tmp_path):
    tokenizer = chat_tokenizer()
    end = tokenizer.special_tokens['<|im_end|>']
    lines = [{'messages': [{'role': 'user', 'content': 'Hi'}]}, {'prompt': 'Hi'}]
    engine = generate(files(*lines), tmp_path, chat=True, script=[*tokenizer.encode('Hello'), end])
    assert tokenizer.decode(engine.asked[0].prompt) == '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    assert tokenizer.decode(engine.asked[1].prompt) == 'Hi'
    assert end in engine.asked[0].stop_ids
    answer = written(tmp_path / 'out.jsonl')[0]
    assert (answer['text'], answer['finish']) == ('Hello', 'stop')


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('{"prompt": ', 'line 2: not JSON'),
        ('[1]', 'line 2: expected an object with either "prompt" or "messages"'),
        ({'text': 'x'}, 'line 2: expected an object with either'),
        ({'prompt': 'x', 'messages': []}, 'line 2: expected an object with either'),
        ({'prompt': 3}, 'line 2: prompt is 3; expected text'),
        ({'messages': 'x'}, 'line 2: messages: expected a list'),
        ({'messages': []}, 'line 2: messages: expected a list'),
        ({'prompt': 'x', 'temperature': 'hot'}, 'line 2: temperature is "hot"; expected a number, 0 or more'),
        ('{"prompt": "x", "temperature": NaN}', 'line 2: temperature is NaN'),
        ({'prompt': 'x', 'top_p': 0}, 'line 2: top_p is 0; expected a number above 0 and at most 1'),
        ({'prompt': 'x', 'max_tokens': True}, 'line 2: max_tokens is true'),
        ({'prompt': 'x', 'n': 0}, 'line 2: n is 0'),
        ({'prompt': 'x', 'stop': ['']}, 'line 2: stop is [""]'),
        ({'prompt': 'x', 'temprature': 1}, 'line 2: temprature is not a setting; did you mean temperature?'),
        ({'prompt': 'x', 'text': 'y'}, 'line 2: text is a field of the answers'),
        ({'prompt': 'x' * 5000}, 'line 2: a prompt of 5000 tokens leaves no room for an answer'),
        ({'messages': [{'role': 'user', 'content': 'x'}]}, 'a base model, which continues text'),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_generated(line, message, files, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        generate(files({'prompt': 'x'}, line), tmp_path)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ['in.jsonl']


def test_an_answer_file_is_never_overwritten(files, tmp_path, capsys):
    (tmp_path / 'out.jsonl').write_text('mine')
    with pytest.raises(SystemExit):
        generate(files({'prompt': 'x'}), tmp_path)
    assert 'out.jsonl exists\nremove it, or give another --out' in capsys.readouterr().err
    assert (tmp_path / 'out.jsonl').read_text() == 'mine'


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--prompts', 'x'], '--prompts FILE.jsonl and --out FILE.jsonl need each other'),
        (['--out', 'x'], '--prompts FILE.jsonl and --out FILE.jsonl need each other'),
        (['--prompts', 'gone.jsonl', '--out', 'x'], '--prompts gone.jsonl: No such file or directory'),
        (['--prompts', 'empty.jsonl', '--out', 'x'], 'empty.jsonl has no prompts'),
        (['--prompts', 'one.jsonl', '--out', 'no/x'], '--out no/x: there is no directory no'),
    ],
)
def test_files_that_cannot_be_used(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty.jsonl').write_text('\n \n')
    (tmp_path / 'one.jsonl').write_text('{"prompt": "x"}')
    with pytest.raises(SystemExit) as ended:
        generate(flags, tmp_path)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_killed_command_is_continued(files, tmp_path, capsys):
    """The answers of both commands are those of one that was not killed."""
    lines = [{'prompt': f'{n}', 'max_tokens': 8} for n in range(40)]
    arguments = [sys.executable, PROGRAM, '0.02', str(tmp_path), *files(*lines), '--slots', '2']
    partial = tmp_path / 'out.jsonl.partial'
    process = subprocess.Popen(arguments, env=os.environ | {'PYTHONPATH': str(PROGRAM.parent)})
    while not partial.exists() or partial.read_bytes().count(b'\n') < 5:
        assert process.poll() is None
        time.sleep(0.01)
    with pytest.raises(SystemExit):
        generate(files(*lines), tmp_path, chat=True)
    assert 'another process writes it' in capsys.readouterr().err
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = partial.read_bytes().splitlines(keepends=True)
    with partial.open('ab') as file:
        file.write(b'{"cut": "he')
    with pytest.raises(SystemExit):
        generate([*files(*lines), '--seed', '1'], tmp_path, chat=True)
    assert 'begun with another model, other flags or other prompts' in capsys.readouterr().err
    tick = chat_tokenizer().encode('tick ')
    engine = generate([*files(*lines), '--slots', '2'], tmp_path, chat=True, script=tick)
    assert len(engine.asked) == 40 - len(there) + 1
    continued = (tmp_path / 'out.jsonl').read_bytes()
    assert continued.startswith(b''.join(there[1:]))
    (tmp_path / 'out.jsonl').unlink()
    generate([*files(*lines), '--slots', '2'], tmp_path, chat=True, script=tick)
    assert (tmp_path / 'out.jsonl').read_bytes() == continued
    assert not partial.exists()


def test_files_in_a_bucket(s3, tmp_path, capsys):
    place = locate(f'{s3.url}/prompts')
    (place / 'in.jsonl').write_bytes(b'{"prompt": "x", "id": 5}\n')
    flags = ['--prompts', f'{place}/in.jsonl', '--out', f'{place}/out.jsonl', '--tokens', '3']
    generate(flags, tmp_path)
    answer = json.loads((place / 'out.jsonl').read_bytes())
    assert (answer['id'], answer['generated_tokens']) == (5, 3)
    with pytest.raises(SystemExit):
        generate(flags, tmp_path)
    assert 'out.jsonl exists' in capsys.readouterr().err
