"""Injects faults into a run for as long as it trains, and compares it with an undisturbed run.

    uv run python benchmarks/soak.py                        # 2 processes, a fault about every 20 seconds
    uv run python benchmarks/soak.py --steps 100000         # hours
    uv run python benchmarks/soak.py --bucket s3            # the run is in a bucket, of a server on this machine

The kinds of faults are the functions after `FAULTS`. After each one it waits until the run has logged a step that it
had not logged before. It ends with a table of faults injected and survived, with times until they were detected and
until the run had recovered, with goodput, and with 1 as the exit code unless every loss is the same number in both
runs. Kinds and moments come from the seed.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

from pretrax.checkpoint import steps_in, verify
from pretrax.observe.attempts import read_attempts
from pretrax.observe.metrics import read_metrics
from pretrax.storage import AnyPath, BucketPath, locate
from pretrax.system.cores import usable_cores

PRETRAX = [sys.executable, '-c', 'from pretrax.cli import main; main()']
PATIENCE = 300.0  # seconds after which a run counts as lost
OUTAGE = 5.0  # seconds that a disk is full or a bucket fails
DISK = '64m'
# Shifts the clock of a process by the seconds in a file.
CLOCK = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *shift;
__attribute__((constructor)) static void start(void) {
    int file = open(getenv("SOAK_CLOCK"), O_RDONLY);
    void *map = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    shift = map == MAP_FAILED ? 0 : map;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = syscall(SYS_clock_gettime, clock, at);
    if (!result && clock == CLOCK_REALTIME && shift) at->tv_sec += *shift;
    return result;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return at ? (*at = now.tv_sec) : now.tv_sec;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument('--processes', type=int, default=2)
    parser.add_argument('--steps', type=int, default=3000)
    parser.add_argument('--seconds', type=float, default=20.0, help='mean time between faults')
    parser.add_argument('--faults', type=int, default=10**9, help='largest number of faults')
    parser.add_argument(
        '--kinds', nargs='+', choices=FAULTS, default=list(FAULTS), metavar='KIND', help=', '.join(FAULTS)
    )
    parser.add_argument(
        '--bucket', choices=['s3', 'gs'], help='put the run into a bucket; needs the tests of the repository'
    )
    parser.add_argument('--heartbeat', type=int, default=5, help='seconds')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--directory', type=Path, help='a new directory for both runs (default: a temporary one)')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        sys.exit(compare(options, options.directory or Path(temporary), stack))


@dataclass
class Soak:
    """A run under the launcher, and what can be seen of it from outside."""

    run_dir: AnyPath
    local: Path  # where the launcher writes
    directory: Path  # for its output, and for what injects faults
    options: argparse.Namespace
    draw: random.Random
    server: Any = None
    environment: dict[str, str] = field(default_factory=dict)
    launcher: subprocess.Popen | None = None
    starts: int = 0

    @property
    def output(self) -> Path:
        return self.directory / 'output.txt'

    def start(self) -> None:
        """Starts the launcher, again if it has been killed."""
        self.starts += 1
        with self.output.open('a') as output:
            self.launcher = subprocess.Popen(
                [*PRETRAX, 'launch', 'local', str(self.directory / 'run.yaml'), f'run_dir={self.run_dir}',
                 f'--processes={self.options.processes}', '--devices-per-process=1', '--retries=20'],
                stdout=output, stderr=subprocess.STDOUT, env=self.environment,
            )  # fmt: skip

    def is_possible(self, kind: str) -> bool:
        """Whether this kind of fault can happen to this run."""
        needs = {'hang': self.options.processes > 1, 'full-disk': (self.directory / 'disk').is_mount(),
                 'clock-jump': 'LD_PRELOAD' in self.environment, 'kill-standby': bool(self.standbys())}  # fmt: skip
        return self.server is not None if kind.startswith('bucket-') else needs.get(kind, True)

    def is_done(self) -> bool:
        """Whether the run has ended by itself. A launcher that was killed or gave up is started again."""
        assert self.launcher is not None
        code = self.launcher.poll()
        said = self.output.read_text() if code == 2 else ''
        if code == 2 and 'run the same command again' not in said[-1000:]:  # as it says on a full disk
            raise SystemExit(f'the run refused to start: {said[-2000:]}')
        if code not in (None, 0):
            self.start()
        return code == 0

    def step(self) -> int:
        """The newest step in the metrics."""
        with contextlib.suppress(OSError, ValueError, LookupError, KeyError):
            lines = (self.local / 'metrics.jsonl').read_bytes().rsplit(b'\n', 3)[-3:]
            return max(
                json.loads(line)['step'] for line in lines if line.startswith(b'{"step"') and line.endswith(b'}')
            )
        return 0

    def events(self) -> list[dict]:
        return read_attempts(self.local) if self.local.is_dir() else []

    def pids(self) -> list[int]:
        """The processes of the attempt that runs; none between two attempts."""
        events = self.events()
        if not events or events[-1]['event'] not in ('began', 'stepped'):
            return []
        return next((e['processes'] for e in reversed(events) if e['event'] == 'started'), [])

    def standbys(self) -> list[int]:
        """Children of the launcher that do not train, on Linux."""
        pids = self.pids()
        if not pids or self.launcher is None:
            return []
        try:
            children = Path(f'/proc/{self.launcher.pid}/task/{self.launcher.pid}/children').read_text().split()
        except OSError:
            return []
        return sorted({int(child) for child in children} - set(pids))

    def signal(self, how: signal.Signals, everyone: bool = False) -> bool:
        """Sends a signal to one of the processes or to everyone, if there are any."""
        pids = self.pids()
        for pid in pids if everyone else self.draw.sample(pids, min(1, len(pids))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        return bool(pids)


def kill(soak: Soak) -> bool:
    """Ends a process with SIGKILL."""
    return soak.signal(signal.SIGKILL)


def kill_twice(soak: Soak) -> bool:
    """Ends a process, and another one while the run starts again."""
    before = len(soak.events())
    if not soak.signal(signal.SIGKILL):
        return False
    if not wait(lambda: any(event['event'] == 'began' for event in soak.events()[before:])):
        return True
    time.sleep(soak.draw.uniform(0, 1))
    soak.signal(signal.SIGKILL)
    return True


def kill_all(soak: Soak) -> bool:
    """Ends all processes with SIGKILL at once."""
    return soak.signal(signal.SIGKILL, everyone=True)


def kill_standby(soak: Soak) -> bool:
    """Ends a process that waits to take the place of another one."""
    waiting = soak.standbys()
    for pid in soak.draw.sample(waiting, min(1, len(waiting))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(waiting)


def kill_launcher(soak: Soak) -> bool:
    """Ends the launcher, as the loss of a machine does."""
    if not soak.pids() or soak.launcher is None:
        return False
    soak.launcher.kill()
    soak.launcher.wait()
    return True


def hang(soak: Soak) -> bool:
    """Stops a process with SIGSTOP. Only others notice that."""
    return soak.signal(signal.SIGSTOP)


def corrupt_checkpoint(soak: Soak) -> bool:
    """Changes a byte of the newest checkpoint, and ends a process, so that the run needs it."""
    checkpoints = soak.run_dir / 'checkpoints'
    steps = steps_in(checkpoints)
    if len(steps) < 2:
        return False
    place = checkpoints / str(steps[-1])
    files = place.files() if isinstance(place, BucketPath) else [
        path.relative_to(place).as_posix() for path in place.rglob('*') if path.is_file()
    ]  # fmt: skip
    with contextlib.suppress(FileNotFoundError):  # it has been removed meanwhile
        file = place / soak.draw.choice(sorted(files))
        content = bytearray(file.read_bytes())
        if content:
            content[soak.draw.randrange(len(content))] ^= 1 << soak.draw.randrange(8)
            file.write_bytes(bytes(content))
    return soak.signal(signal.SIGKILL)


def torn_line(soak: Soak) -> bool:
    """Leaves half a line in a log, as a crash of the machine does, and ends a process."""
    if not soak.pids():
        return False
    soak.signal(signal.SIGKILL)
    with (soak.local / soak.draw.choice(['metrics.jsonl', 'attempts.jsonl'])).open('a') as log:
        log.write('{"step": 12, "lo')
    return True


def full_disk(soak: Soak) -> bool:
    """Fills the disk for some seconds."""
    filler = soak.directory / 'disk' / 'filler'
    with contextlib.suppress(OSError), filler.open('wb') as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    time.sleep(OUTAGE)
    filler.unlink()
    return True


def bucket_down(soak: Soak) -> bool:
    """The bucket answers 503 for some seconds."""
    return fault_of_bucket(soak, status=503)


def bucket_gone(soak: Soak) -> bool:
    """Connections to the bucket are cut for some seconds."""
    return fault_of_bucket(soak, cut_after=0)


def bucket_slow(soak: Soak) -> bool:
    """The bucket takes a second for each answer."""
    return fault_of_bucket(soak, delay=1.0)


def fault_of_bucket(soak: Soak, **what: Any) -> bool:
    fault = soak.server.fault(times=float('inf'), **what)
    time.sleep(OUTAGE)
    soak.server.faults.remove(fault)
    return True


def clock_jump(soak: Soak) -> bool:
    """Sets the clock of all processes forward or back by up to an hour."""
    seconds = soak.draw.randint(-3600, 3600)
    with (soak.directory / 'clock').open('r+b') as file:
        file.write(seconds.to_bytes(8, sys.byteorder, signed=True))
    return True


FAULTS: dict[str, Callable[[Soak], bool]] = {
    function.__name__.replace('_', '-'): function
    for function in (
        kill, kill_twice, kill_all, kill_standby, kill_launcher, hang, corrupt_checkpoint, torn_line, full_disk,
        bucket_down, bucket_gone, bucket_slow, clock_jump,
    )
}  # fmt: skip
QUIET = ('kill-standby', 'full-disk', 'bucket-down', 'bucket-gone', 'bucket-slow', 'clock-jump')  # the run goes on


@dataclass(frozen=True)
class Injected:
    """One fault. `detected` and `recovered` are seconds; None: not detected, or not survived.

    `lost`: steps that were trained again; None: the run went on.
    """

    kind: str
    step: int
    detected: float | None
    recovered: float | None
    lost: int | None


def compare(options: argparse.Namespace, directory: Path, stack: contextlib.ExitStack) -> int:
    """Makes both runs and prints the report. Returns the exit code."""
    directory.mkdir(parents=True, exist_ok=True)
    print(f'{machine.processor()}, {usable_cores()} cores; {machine.busy():.0%} used by other programs', flush=True)
    undisturbed = prepared('undisturbed', options, directory, None, stack)
    seconds, _ = trained(undisturbed, 0)
    print(f'undisturbed: {options.steps} steps in {seconds:.0f} s', flush=True)
    server = None
    if options.bucket:
        sys.path.append(str(Path(__file__).parents[1] / 'tests'))
        from buckets import bucket_server  # type: ignore[import-not-found]

        server = stack.enter_context(bucket_server(options.bucket))
    soak = prepared('disturbed', options, directory, server, stack)
    disturbed, injected = trained(soak, options.faults)
    report(injected, [kind for kind in options.kinds if soak.is_possible(kind)])
    print(f'disturbed: {options.steps} steps in {disturbed:.0f} s, the launcher was started {soak.starts} times')
    before, after = losses(undisturbed.run_dir), losses(soak.run_dir)
    other = [step for step in range(1, options.steps + 1) if before[step] != after.get(step)]
    different = f', first difference at step {other[0]}' if other else ''
    print(f'losses equal: {options.steps - len(other)} of {options.steps}{different}')
    for step in steps_in(soak.run_dir / 'checkpoints')[-1:]:
        verify(soak.run_dir / 'checkpoints', step)
    goodput = read_metrics(soak.run_dir / 'metrics.jsonl')[-1]['goodput']
    print(f'goodput: {goodput:.3f} as the run reports it, {seconds / disturbed:.3f} of the undisturbed pace')
    lost = [one for one in injected if one.recovered is None]
    return 1 if other or lost or not injected else 0


def prepared(
    name: str, options: argparse.Namespace, directory: Path, server: Any, stack: contextlib.ExitStack
) -> Soak:  # fmt: skip
    """A run that has not been started, with a disk and a clock of its own."""
    place = directory / name
    (place / 'disk').mkdir(parents=True)
    (place / 'run.yaml').write_text(json.dumps(small_run(options)))
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XDG_CACHE_HOME': str(directory / 'cache')}
    local = run_dir = place / 'disk' / 'run'
    if server is not None:
        from pretrax.storage.locate import working_directory

        os.environ.update(server.environment | {'XDG_CACHE_HOME': str(directory / 'cache')})
        environment |= os.environ
        run_dir = locate(f'{server.url}/{name}')
        local = working_directory(run_dir)
    elif name == 'disturbed' and 'full-disk' in options.kinds:
        mount = subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', f'size={DISK}', 'tmpfs', place / 'disk'], capture_output=True, text=True
        )
        if mount.returncode:
            print(f'no full disks: {mount.stderr.strip()}')
        else:
            stack.callback(subprocess.run, ['umount', '-l', place / 'disk'])
    if name == 'disturbed' and 'clock-jump' in options.kinds:
        environment |= shiftable_clock(place)
    return Soak(run_dir, local, place, options, random.Random(options.seed), server, environment)


def shiftable_clock(place: Path) -> dict[str, str]:
    """The environment of processes whose clock is shifted by the seconds in the file `clock`."""
    (place / 'clock').write_bytes(bytes(8))
    library = place / 'clock.so'
    command = ['cc', '-shared', '-fPIC', '-O1', '-x', 'c', '-', '-o', str(library)]
    try:
        subprocess.run(command, input=CLOCK, text=True, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f'no clock jumps: a C compiler is needed: {error}')
        return {}
    return {'LD_PRELOAD': str(library), 'SOAK_CLOCK': str(place / 'clock')}


def small_run(options: argparse.Namespace) -> dict:
    return {
        'name': 'soak', 'steps': options.steps,
        'model': {'family': 'llama', 'n_layers': 2, 'd_model': 64, 'attention': {'n_heads': 4}},
        'data': {'name': 'synthetic', 'vocab_size': 512},
        'batch': {'tokens': 12 * 128, 'sequence_length': 128},
        'optimizer': {'learning_rate': 1e-3}, 'precision': {'compute': 'f32'},
        'checkpoint': {'every': 25}, 'log': {'every': 1}, 'eval': {'every': 0},
        'faults': {'heartbeat_seconds': options.heartbeat},
    }  # fmt: skip


def trained(soak: Soak, faults: int) -> tuple[float, list[Injected]]:
    """Trains the run to its end. Returns the seconds and the faults that were injected."""
    began, injected = time.monotonic(), []
    soak.start()
    try:
        next_fault = began + soak.options.seconds
        while not soak.is_done():
            time.sleep(0.1)
            if time.monotonic() > next_fault and len(injected) < faults:
                injected += [fault for fault in [inject(soak)] if fault]
                next_fault = time.monotonic() + soak.options.seconds * soak.draw.uniform(0.5, 1.5)
    finally:
        assert soak.launcher is not None
        soak.launcher.terminate()
        soak.launcher.wait()
    return time.monotonic() - began, injected


def inject(soak: Soak) -> Injected | None:
    """Injects a fault and waits until the run has recovered. None if it could not be injected now."""
    kind = soak.draw.choice([kind for kind in soak.options.kinds if soak.is_possible(kind)])
    step, seen = soak.step(), len(soak.events())
    said = soak.output.stat().st_size
    if not step or soak.is_done():
        return None
    began = time.monotonic()
    detected: float | None = None
    over = threading.Event()

    def watch() -> None:
        nonlocal detected
        while not over.wait(0.05):
            warned = b'WARNING' in soak.output.read_bytes()[said:]
            if warned or any(event['event'] == 'ended' for event in soak.events()[seen:]):
                detected = time.monotonic() - began
                return

    def has_recovered() -> bool:
        restarted = kind in QUIET or any(event['event'] == 'stepped' for event in soak.events()[seen:])
        return soak.is_done() or (restarted and soak.step() > step)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        if not FAULTS[kind](soak):
            return None
        reached = max(step, soak.step())
        recovered = time.monotonic() - began if wait(has_recovered) else None
    finally:
        over.set()
        watcher.join()
    starts = [event['step'] for event in soak.events()[seen:] if event['event'] == 'began']
    lost = reached - starts[0] if starts else None
    print(
        f'{kind} at step {step}: {shown(detected)} until detected, {shown(recovered)} until recovered, steps lost: '
        f'{"none" if lost is None else lost}',
        flush=True,
    )
    return Injected(kind, step, detected, recovered, lost)


def wait(condition: Callable[[], bool]) -> bool:
    """Waits until a condition holds, as long as there is hope. Returns whether it does."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def report(injected: list[Injected], kinds: list[str]) -> None:
    """Prints a line for each kind of fault: counts, and the median and longest times."""
    print(f'{"fault":<20}{"injected":>9}{"survived":>9}{"detected after":>20}{"recovered after":>20}')
    for kind in kinds:
        found = [one for one in injected if one.kind == kind]
        survived = sum(one.recovered is not None for one in found)
        times = [
            [seconds for one in found if (seconds := getattr(one, name)) is not None]
            for name in ('detected', 'recovered')
        ]
        columns = [f'{statistics.median(t):.1f} s to {max(t):.1f} s' if t else '-' for t in times]
        print(f'{kind:<20}{len(found):>9}{survived:>9}{columns[0]:>20}{columns[1]:>20}')


def shown(seconds: float | None) -> str:
    return '-' if seconds is None else f'{seconds:.1f} s'


def losses(run_dir: AnyPath) -> dict[int, float]:
    lines: Iterator[dict] = (line for line in read_metrics(run_dir / 'metrics.jsonl') if 'loss' in line)
    return {line['step']: line['loss'] for line in lines}


if __name__ == '__main__':
    main()
