"""Progress: lines every few seconds, or a bar in a terminal."""

import io

from pretrax.data.tokenize.progress import TokenProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_report_the_remaining_time(said):
    clock = Clock()
    with TokenProgress(1000, said.append, stream=io.StringIO(), clock=clock) as progress:
        progress.skip(200)
        progress(100, 4_000_000)
        assert said == [], 'a short run prints nothing'
        clock.now = 20.0
        progress(100, 4_000_000)
        assert said == ['tokens: 40% of the text, 8.0 M tokens, 0.40 M tokens/s, 1:00 left']
        progress.finished(100)  # 200 bytes of text were 100 stored bytes
        clock.now = 40.0
        progress(200, 4_000_000)
    assert said[1:] == ['tokens: 40% of the text, 12.0 M tokens, 0.30 M tokens/s, 2:00 left']


def test_a_terminal_shows_a_bar_and_no_lines(said, monkeypatch):
    monkeypatch.setenv('TERM', 'xterm')
    clock, terminal = Clock(), Terminal()
    with TokenProgress(1000, said.append, stream=terminal, clock=clock) as progress:
        for second in range(1, 60):
            clock.now = float(second)
            progress(10, 10_000_000)
    assert said == []
    assert '59%' in terminal.getvalue()
    assert '10.00 M tokens/s' in terminal.getvalue()
