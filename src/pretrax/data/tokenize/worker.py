"""A process that works for data/tokenize/engine_local.py: calls come in by standard input, answers go out by standard output.

Frames are pickles; both ends are pretrax's own, of one run. A parent that is gone is noticed when the next progress is
told or the next call is waited for, so that a killed run leaves no workers behind.
"""

import os
import pickle
import sys
import traceback
from typing import Any, BinaryIO

from pretrax.errors import UserError


def main() -> None:
    calls = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), 'wb')
    os.dup2(2, 1)  # what a library prints must not come between the frames

    def progress(n_bytes: int, n_tokens: int) -> None:
        send(answers, ('progress', (n_bytes, n_tokens)))

    while True:
        try:
            function, arguments = pickle.load(calls)
        except EOFError:
            return
        try:
            answer = ('result', function(*arguments, progress))
        except BrokenPipeError:
            raise
        except UserError as error:
            answer = ('mistake', str(error))
        except Exception:
            answer = ('defect', traceback.format_exc())
        send(answers, answer)


def send(stream: BinaryIO, frame: Any) -> None:
    pickle.dump(frame, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


if __name__ == '__main__':
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)  # nobody is left to read, and flushing what is not sent would fail again
