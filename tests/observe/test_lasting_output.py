"""Output whose reader goes away: a terminal that is closed, and a pipe."""

import errno
import os

import pytest

from pretrax.observe.lasting_output import LastingOutput
from pretrax.observe.progress import Progress


@pytest.fixture(params=['terminal', 'dumb terminal', 'pipe'])
def ends(request, monkeypatch):
    """The file to write, and the descriptor that a reader has."""
    monkeypatch.setenv('TERM', 'dumb' if 'dumb' in request.param else 'xterm')
    reader, writer = os.pipe() if request.param == 'pipe' else os.openpty()
    with os.fdopen(writer, 'w') as file:
        yield file, reader


def test_progress_outlives_its_reader(ends):
    file, reader = ends
    with Progress(file) as progress:
        progress.start(100)
        progress.update({'step': 1, 'loss': 2.0})
        os.close(reader)
        progress.message('Ctrl-C')
        for step in range(2, 101):
            progress.update({'step': step, 'loss': 2.0})


def test_a_full_disk_is_still_an_error():
    with open('/dev/full', 'w') as full, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        try:
            print('text', file=LastingOutput(full), flush=True)
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # so that it can be closed
