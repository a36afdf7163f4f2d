"""Files that are appended to: what a kill, a full disk or a person leaves in them costs one line."""

import json
import subprocess
import sys

import pytest

from pretrax.system.line_files import append_record, not_a_record, read_lines

FOREIGN = [b'{"n": 2', b'\x00\x00', b'caf\xc3', b'[' * 100_000, b'17', b'{"m": 1}', b'<<<<<<< HEAD']


def numbers(path):
    with path.open('rb') as lines:
        return [line.record and line.record['n'] for line in read_lines(lines, lambda record: 'n' in record)]


@pytest.mark.parametrize('foreign', FOREIGN)
@pytest.mark.parametrize('end', [b'', b'\n', b'\r\n\n'])
def test_a_torn_or_foreign_line_costs_that_line_alone(tmp_path, foreign, end):
    path = tmp_path / 'lines.jsonl'
    append_record(path, {'n': 1})
    with path.open('ab') as file:
        file.write(foreign + end)
    append_record(path, {'n': 3})
    assert numbers(path) == [1, None, 3]


def test_a_whole_last_line_without_its_end_is_read(tmp_path):
    path = tmp_path / 'lines.jsonl'
    path.write_text('{"n": 1}')
    append_record(path, {'n': 2})
    assert numbers(path) == [1, 2]


def test_a_skipped_line_is_shown_with_its_number(tmp_path):
    path = tmp_path / 'lines.jsonl'
    path.write_bytes(b'{"n": 1}\n\n\x1b[31mred\n')
    line = list(read_lines(path.read_bytes().splitlines(keepends=True), lambda record: True))[-1]
    assert (
        not_a_record(path, line, 'a result')
        == f"WARNING: {path}, line 3 is not a result, and is skipped: '\\x1b[31mred'"
    )


def test_processes_that_append_at_the_same_time_lose_no_line(tmp_path):
    path = tmp_path / 'lines.jsonl'
    program = (
        'import pathlib, sys; from pretrax.system.line_files import append_record\n'
        'for n in range(300): append_record(pathlib.Path(sys.argv[1]), {"n": n, "padding": "x" * 5000})'
    )
    writers = [subprocess.Popen([sys.executable, '-c', program, str(path)]) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    # A writer that sees half of another's line ends it first, which leaves a blank line at most.
    lines = [line for line in path.read_text().splitlines() if line]
    assert sorted(json.loads(line)['n'] for line in lines) == sorted([*range(300)] * 3)
