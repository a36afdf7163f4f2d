"""Progress: plain lines when piped, a live bar on a real pseudo-terminal, nothing claimed that is unknown."""

import io
import os
import pty
import re
import threading

import pytest

from pretrax.observe.progress import Progress, format_line

FULL = {'step': 120, 'loss': 3.12341, 'bits_per_byte': 1.4321, 'tokens_per_second': 45_123.0, 'mfu': 0.1234}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_a_line_shows_every_number():
    assert format_line(FULL, 300, eta=42) == (
        'step 120/300  40.0%  loss 3.1234  bpb 1.432  45.1k tok/s  mfu 12.3%  eta 0:42'
    )


def test_unknown_numbers_are_not_shown():
    assert format_line(FULL | {'mfu': None, 'bits_per_byte': None}, 300) == (
        'step 120/300  40.0%  loss 3.1234  45.1k tok/s'
    )
    assert format_line({'step': 1, 'loss': float('nan')}, 3) == 'step 1/3  33.3%  loss nan'


def test_an_evaluation_has_its_own_line():
    line = format_line({'step': 100, 'val_loss': 3.0, 'val_bits_per_byte': 1.25}, 300)
    assert line == 'step 100/300  val loss 3.0000  val bpb 1.250'


@pytest.mark.parametrize(
    ('rate', 'shown'), [(7.0, '7'), (950, '950'), (999.7, '1k'), (45_123, '45.1k'), (999_900, '1M'), (1.234e6, '1.23M')]
)
def test_rates_have_three_digits(rate, shown):
    assert f'  {shown} tok/s' in format_line({'step': 1, 'tokens_per_second': rate}, 2)


@pytest.mark.parametrize(
    ('seconds', 'shown'), [(0, '0:00'), (59.6, '1:00'), (3700, '1:01:40'), (200_000, '2d 7:33:20')]
)
def test_durations(seconds, shown):
    assert format_line({'step': 1}, 2, eta=seconds).endswith(f'eta {shown}')


def test_without_a_terminal_each_report_is_a_plain_line():
    out, clock = io.StringIO(), Clock()
    with Progress(out, clock) as progress:
        progress.message('devices: 1 cpu')
        progress.start(300, resumed_step=100)
        for step in (110, 120, 130):
            progress.update({'step': step, 'loss': 2.0})
            clock.now += 5
        progress.update({'step': 130, 'val_loss': 2.5})
        progress.message('sample:\n\tdef [bold]f[/bold](x): :smile:')
    assert out.getvalue().splitlines() == [
        'devices: 1 cpu',
        'step 110/300  36.7%  loss 2.0000',  # the first report has no ETA: compilation is in its time
        'step 120/300  40.0%  loss 2.0000  eta 1:30',
        'step 130/300  43.3%  loss 2.0000  eta 1:25',
        'step 130/300  val loss 2.5000',
        'sample:',
        '\tdef [bold]f[/bold](x): :smile:',
    ]


def test_the_eta_of_batches_that_grow_counts_their_work():
    out, clock = io.StringIO(), Clock()
    with Progress(out, clock) as progress:
        progress.start(30, 0, lambda step: min(step, 10) + 4 * max(0, step - 10))
        for step in (2, 7, 12):
            progress.update({'step': step})
            clock.now += 5
    # 5 units of work in 5 s, of 90 units; then 16 in 10 s
    assert [line.partition('eta ')[2] for line in out.getvalue().splitlines()] == ['', '1:23', '0:45']


def test_control_codes_in_samples_do_not_reach_the_terminal():
    out = io.StringIO()
    Progress(out).message('a\x1b[2Jb\x07c\rd\x9be\u00e9')
    assert out.getvalue() == 'a\ufffd[2Jb\ufffdc\ufffdd\ufffde\u00e9\n'


def test_an_ascii_log_does_not_stop_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding='ascii')
    Progress(stream).message('sample: \u00e9\u4e2d')
    assert raw.getvalue() == b'sample: ??\n'


def on_a_terminal(monkeypatch, columns, play, terminal='xterm-256color'):
    """What `play(progress, clock)` writes to a pseudo-terminal of this width."""
    monkeypatch.setenv('TERM', terminal)
    monkeypatch.setenv('COLUMNS', str(columns))
    for name in ('NO_COLOR', 'FORCE_COLOR', 'TTY_COMPATIBLE', 'TTY_INTERACTIVE'):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = pty.openpty()
    chunks = []

    def drain():
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # Linux's way to say that the other side is closed
                return
            if not chunk:
                return
            chunks.append(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    with open(theirs, 'w', encoding='utf-8') as stream:
        clock = Clock()
        with Progress(stream, clock) as progress:
            play(progress, clock)
    reader.join()
    os.close(ours)
    return b''.join(chunks).decode()


def visible(output):
    return re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', output)


def play_a_run(progress, clock):
    progress.message('devices: 1 cpu')
    progress.start(300)
    for step in (10, 20, 30):
        clock.now += 1
        progress.update({'step': step, 'loss': 2.0})
    progress.update({'step': 30, 'val_loss': 2.5})
    progress.message('sample: [bold] x')
    clock.now += 1
    progress.update(FULL | {'step': 300})


@pytest.mark.parametrize('columns', [80, 120])
def test_in_a_terminal_one_live_line_with_messages_above_it(monkeypatch, columns):
    output = on_a_terminal(monkeypatch, columns, play_a_run)
    assert '\x1b[2K' in output  # lines are drawn over
    assert output.rstrip().endswith('\x1b[?25h')  # the cursor is given back
    text = visible(output)
    assert 'step 0/300  compiling' in text
    assert 'step 20/300  6.7%  loss 2.0000  eta 0:28' in text
    assert 'step 30/300  val loss 2.5000\r\n' in text
    assert 'sample: [bold] x\r\n' in text
    last = re.sub(r'\s+', ' ', text[text.rindex('step 300/300') :])
    assert last.startswith('step 300/300 100.0% loss 3.1234 bpb 1.432 45.1k tok/s mfu 12.3% eta 0:00')
    assert ('━' in text) == (columns == 120)


def test_of_fast_steps_some_are_drawn_and_always_the_last(monkeypatch):
    def play(progress, clock):
        progress.start(1000)
        for step in range(1, 1001):
            clock.now += 0.001
            progress.update({'step': step, 'loss': 1.0})
        progress.message('evaluating')

    text = visible(on_a_terminal(monkeypatch, 120, play))
    assert len(set(re.findall(r'step (\d+)/1000 ', text))) < 20
    assert 'step 1000/1000  100.0%' in text[: text.index('evaluating')]


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch):
    def play(progress, _):
        progress.start(10)
        progress.update({'step': 1, 'loss': 2.0})
        progress.update({'step': 2, 'loss': 1.0})

    lines = ['step 1/10  10.0%  loss 2.0000', 'step 2/10  20.0%  loss 1.0000  eta 0:00', '']
    assert on_a_terminal(monkeypatch, 80, play, terminal='dumb').split('\r\n') == lines
