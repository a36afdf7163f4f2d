"""`pretrax generate --chat`, through a pipe and in a real terminal."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chat_templates import CHATML
from stubbed_generate import chat_tokenizer, generate

PROGRAM = Path(__file__).parents[1] / 'stubbed_generate.py'
TOKENIZER = chat_tokenizer()
END = TOKENIZER.special_tokens['<|im_end|>']
HELLO = [*TOKENIZER.encode('Hello 🎉!'), END]


def talk(text, directory, monkeypatch, capsys, flags=(), **options):
    """The engine, and what the command prints for lines of input."""
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    with os.fdopen(read) as stream:
        monkeypatch.setattr(sys, 'stdin', stream)
        engine = generate(['--chat', *flags], directory, chat=True, **({'script': HELLO} | options))
    return engine, capsys.readouterr()


def test_a_conversation_is_the_prompt_of_the_next_answer(tmp_path, monkeypatch, capsys):
    engine, printed = talk('Hi\n\nAnd <|im_end|>you?\n', tmp_path, monkeypatch, capsys)
    assert printed.out == 'Hello 🎉!\nHello 🎉!\n'
    first, second = engine.asked
    start = '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    assert TOKENIZER.decode(first.prompt) == start
    following = 'Hello 🎉!<|im_end|>\n<|im_start|>user\nAnd <|im_end|>you?<|im_end|>\n<|im_start|>assistant\n'
    assert TOKENIZER.decode(second.prompt) == start + following
    assert second.prompt.count(END) == 3
    assert END in first.stop_ids
    assert len(first.prompt) + first.max_tokens == 4096
    assert first.sampling.seed != second.sampling.seed
    assert 'tokens/s' in printed.err


def test_reset_starts_again_and_quit_ends(tmp_path, monkeypatch, capsys):
    flags = ['--tokens', '3', '--temperature', '0.5', '--min-p', '0.1', '--max-length', '200', '--stop', 'el']
    engine, printed = talk('Hi\n/reset\nHi\n/quit\nHi\n', tmp_path, monkeypatch, capsys, flags)
    first, second = engine.asked
    assert first.prompt == second.prompt
    assert (first.max_tokens, first.sampling.temperature, first.sampling.min_p) == (3, 0.5, 0.1)
    assert engine.max_length == 200
    assert printed.out == 'H\nH\n'


def test_a_conversation_that_is_too_long_is_not_the_end(tmp_path, monkeypatch, capsys):
    text = f'Hi\n{"very long " * 50}\n/reset\nHi\n'
    engine, printed = talk(text, tmp_path, monkeypatch, capsys, ['--max-length', '128'])
    assert len(engine.asked) == 2
    assert engine.asked[0].prompt == engine.asked[1].prompt
    assert 'expected less than 128\n/reset starts again, --max-length N allows more' in printed.err


def test_a_model_without_a_template_is_a_base_model(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        generate(['--chat'], tmp_path)
    assert ended.value.code == 2
    assert 'a base model, which continues text' in capsys.readouterr().err
    (tmp_path / 'own.jinja').write_text(CHATML)
    flags = ['--chat-template', str(tmp_path / 'own.jinja')]
    assert talk('Hi\n', tmp_path, monkeypatch, capsys, flags)[1].out == 'Hello 🎉!\n'


@pytest.mark.parametrize(
    'flags', [['--chat', '--prompt', 'x'], ['--chat', '--n', '2'], ['--chat', '--prompts', 'x', '--out', 'y']]
)
def test_flags_that_exclude_each_other(flags, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        generate(flags, tmp_path)
    assert ended.value.code == 2
    message = 'one answer at a time' if '--n' in flags else '--chat exclude each other'
    assert message in capsys.readouterr().err


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, directory, seconds):
        self.screen, terminal = pty.openpty()
        self.seen = ''
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, str(seconds), str(directory), '--chat'],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env=os.environ | {'PYTHONPATH': str(PROGRAM.parent), 'TERM': 'dumb'},
        )  # fmt: skip
        os.close(terminal)

    def wait_for(self, text, seconds=120.0):
        """Reads until the text was shown. Returns whether that happened in time."""
        last = time.monotonic() + seconds
        while text not in self.seen:
            if not select.select([self.screen], [], [], max(0.0, last - time.monotonic()))[0]:
                return False
            self.seen += os.read(self.screen, 1000).decode(errors='replace')
        self.seen = self.seen.partition(text)[2]
        return True

    def press_ctrl_c(self):
        """Until the prompt appears: Python's readline misses a signal that arrives just before it waits for a key."""
        for _ in range(60):
            self.process.send_signal(signal.SIGINT)
            if self.wait_for('> ', 2):
                return
        raise AssertionError(f'no prompt after Ctrl-C: {self.seen!r}')

    def type(self, text):
        os.write(self.screen, text.encode())


@pytest.fixture
def terminal(tmp_path):
    started = []

    def start(seconds):
        started.append(Terminal(tmp_path, seconds))
        return started[0]

    yield start
    started[0].process.kill()
    started[0].process.wait()
    os.close(started[0].screen)


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends(terminal):
    chat = terminal(0.05)
    assert chat.wait_for('> ')
    chat.type('Hi\n')
    assert chat.wait_for('tick tick')
    chat.press_ctrl_c()
    chat.type('half a line')
    assert chat.wait_for('half a line')
    chat.press_ctrl_c()
    chat.type('Again\n')
    assert chat.wait_for('tick tick')
    chat.press_ctrl_c()
    chat.type('\x04')
    assert chat.wait_for('tokens/s')
    assert chat.process.wait(30) == 0


def test_answers_appear_while_they_are_written(terminal):
    chat = terminal(0.2)
    assert chat.wait_for('> ')
    chat.type('Hi\n')
    began = time.monotonic()
    assert chat.wait_for('tick')
    assert chat.process.poll() is None
    assert chat.wait_for('tick')
    assert time.monotonic() - began < 60  # all of it would take minutes
