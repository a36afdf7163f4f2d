"""The machine that a benchmark runs on: processor, cores, and how busy they are."""

import os
import time
from pathlib import Path

from pretrax.system.cores import cpu_flags, cpu_name

QUIET = 0.05  # largest share of the cores that other programs may use


def busy(seconds: float = 0.5) -> float:
    """Share of this process's cores that is in use while it sleeps; 0 if the system does not report it."""

    def times() -> tuple[int, int]:
        lines = [line.split() for line in Path('/proc/stat').read_text().splitlines()]
        ours = {f'cpu{core}' for core in os.sched_getaffinity(0)}
        counts = [[int(field) for field in fields[1:9]] for fields in lines if fields and fields[0] in ours]
        return sum(map(sum, counts)), sum(idle + wait for _, _, _, idle, wait, *_ in counts)

    if not Path('/proc/stat').exists():
        return 0.0
    all_before, idle_before = times()
    time.sleep(seconds)
    all_after, idle_after = times()
    return 1 - (idle_after - idle_before) / max(all_after - all_before, 1)


def processor() -> str:
    """The name of the processor and the extensions that matter for matrix products."""
    known = cpu_flags()
    flags = [flag for flag in ('amx_bf16', 'avx512_bf16', 'avx512f', 'avx2') if flag in known]
    return f'{cpu_name()} ({", ".join(flags)})'
