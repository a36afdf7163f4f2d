"""A worker process of data/tokenize/engines.py: reads calls from stdin and writes answers to stdout.

Messages are pickles between two processes of the same run. If the parent is killed, the worker ends at its next
progress report or when it waits for the next call.
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
    os.dup2(2, 1)  # output of libraries must not mix with the messages

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
            answer = ('user error', str(error))
        except Exception:
            answer = ('failure', traceback.format_exc())
        send(answers, answer)


def send(stream: BinaryIO, message: Any) -> None:
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


if __name__ == '__main__':
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)  # the parent is gone, and flushing would fail again
