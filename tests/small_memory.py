"""Python programs that limit their own addresses (RLIMIT_AS)."""

import os
import subprocess
import sys


def output_of(program: str, *arguments: str, **environment: str) -> bytes:
    """What a Python program prints, whose threads take few addresses, so that its limit is on data.

    A thread takes 8 MiB of addresses for its stack and up to 64 MiB for an arena, and cannot start where they are
    missing.
    """
    command = ['sh', '-c', 'ulimit -s 1024; exec "$@"', 'sh', sys.executable, '-c', program, *arguments]
    small = {'OPENBLAS_NUM_THREADS': '1', 'MALLOC_ARENA_MAX': '1'}
    return subprocess.run(command, env=os.environ | small | environment, stdout=subprocess.PIPE, check=True).stdout
