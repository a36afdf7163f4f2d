"""Kills islands of real federations at random moments, and checks every round that they closed.

    nice -n 19 uv run python benchmarks/federation_kills.py                 # 500 kills; continues after an interruption
    nice -n 19 uv run python benchmarks/federation_kills.py --kills 40 --only s3-bf16

A kill costs about 4 seconds of a core. Do not change the source meanwhile: the islands import it.

Four islands train one model through a bucket on this machine, S3 or Cloud Storage: one on one device, one on two with
`mesh.d`, one on two with `mesh.t` and a clock (that of Python) five hours ahead, and one of two processes under
`pretrax launch local` with larger batches and a clock that is seven hours behind. One request in ten fails: 503, cut
answers and uploads, answers that are lost after the request was carried out. SIGKILL ends an island at a moment, while
it starts, or at a request (the lease, what it has learned, the contribution, the closing, an anchor, its state, a
removal), before or after the bucket has carried it out; or two islands at once; or one process of two. Each is started
again at once.

What is checked: each round is closed once; no batch and no row of the data counts twice; the numbers in the bucket,
computed again by `tests/recomputed_federation.py`, are those that every island began each round with; all islands end
with them; nobody has listed the bucket. With a large patience, which never leaves out an island, every difference also
equals, bit for bit, that of the same federation without kills and faults.

A row is added to `results/federation-kills.jsonl` for each federation. Delete the file to begin again. The exit code is
1 if something is wrong.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from result_files import circumstances, write_result

from pretrax.checkpoint import CheckpointWeights, steps_in
from pretrax.observe.attempts import read_attempts

TESTS = Path(__file__).parents[1] / 'tests'
sys.path.append(str(TESTS))

from buckets import BucketServer, bucket_server  # type: ignore[import-not-found]  # noqa: E402 - of the tests
from preloaded import programs  # type: ignore[import-not-found]  # noqa: E402
from recomputed_federation import Recomputed  # type: ignore[import-not-found]  # noqa: E402
from recorded_rows import CLOCK, ROWS, rows_of  # type: ignore[import-not-found]  # noqa: E402

PATIENCE = 300.0  # seconds for what takes a few
LARGE, SMALL = 3600.0, 2.0  # `federation.patience`
PLACE = 'federation'  # of it in the bucket
MESHES = {'a': {'d': 1}, 'b': {'d': 2}, 'c': {'t': 2}, 'd': {'d': 2}}  # of the islands; `d` has two processes
HOURS = {'a': 0, 'b': 0, 'c': 5, 'd': -7}  # that their clocks are ahead
OFTEN = {'a': 5, 'b': 2, 'c': 2, 'd': 3}  # how often each is drawn
# Requests at which an island is killed.
MOMENTS = {
    'lease': r'islands/NAME/lock', 'numbers': r'rounds/\d+/NAME/[^/]+/\d+/\d+', 'index': r'/\d+/NAME/.*index.json',
    'contribution': r'rounds/\d+/NAME\.json', 'closing': r'rounds/\d+/closed\.json', 'anchor': r'anchors/\d+/',
    'state': r'islands/NAME/state\.json',
}  # fmt: skip
KINDS = {'moment': 4, 'start': 3, 'two': 2, 'process': 3, 'removal': 1} | dict.fromkeys(MOMENTS, 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A federation. Attributes: scheme of the bucket; its section in the configuration; steps."""

    scheme: str
    section: dict[str, Any]
    steps: int = 40


CASES = {
    's3-bf16': Case('s3', {'encoding': 'bf16'}),
    'gs-int4-fragments': Case('gs', {'encoding': 'int4', 'fragments': 2, 'delay': 1}, 24),
    's3-f32-impatient': Case('s3', {'encoding': 'f32', 'patience': SMALL}),
    'gs-f32': Case('gs', {'encoding': 'f32'}),
    's3-int8-fragments': Case('s3', {'encoding': 'int8', 'fragments': 2, 'every': 6, 'delay': 2, 'mixing': 0.25}, 24),
    'gs-int8-impatient': Case('gs', {'encoding': 'int8', 'fragments': 2, 'delay': 1, 'patience': SMALL}, 24),
}


class Program:
    """`pretrax` with arguments, forked by a process that has imported everything."""

    def __init__(self, directory: Path, arguments: list[str], environment: dict[str, str], output: Path):
        self.code: int | None = None
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(directory / 'socket'))
        request = json.dumps(['pretrax', arguments, str(output.parent), environment]).encode()
        with output.open('ab') as out, Path(os.devnull).open() as nothing:
            size = len(request).to_bytes(8, 'big')
            socket.send_fds(connection, [size], [nothing.fileno(), out.fileno(), out.fileno()])
            connection.sendall(request)
        self._answers = connection.makefile()
        self.pid = int(self._answers.readline())
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()
        connection.close()  # `_answers` keeps it

    def _wait(self) -> None:
        self.code = int(self._answers.readline() or 1)
        self._answers.close()

    def kill(self) -> None:
        """Ends it and what it has started, with SIGKILL."""
        with contextlib.suppress(OSError):
            children = Path(f'/proc/{self.pid}/task/{self.pid}/children').read_text().split()
            for pid in (self.pid, *map(int, children)):
                os.kill(pid, signal.SIGKILL)
        self._thread.join()


class Island:
    """An island, and its way to the bucket."""

    def __init__(self, name: str, case: Case, directory: Path, server: BucketServer, cache: Path, memory: Path):
        self.name, self.server, self.directory = name, server, directory / name
        self.run_dir, self.output = self.directory / 'run', self.directory / 'output.txt'
        self.lock, self.codes = threading.Lock(), collections.Counter[int]()
        self.processes, devices = (2, 1) if name == 'd' else (1, 2 if name in 'bc' else 1)
        self.program: Program | None = None
        self._seen = 0  # requests before it was started
        (memory / name).mkdir(parents=True)
        self.directory.mkdir(parents=True)
        self._environment = os.environ | server.environment | {
            'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_backend_optimization_level=0', 'PYTHONPATH': str(TESTS),
            'JAX_NUM_CPU_DEVICES': str(devices), 'JAX_ENABLE_COMPILATION_CACHE': 'true',
            'JAX_COMPILATION_CACHE_DIR': str(cache / f'programs-{name}'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0', 'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
            'XDG_CACHE_HOME': str(cache / 'cache'), ROWS: str(self.directory / 'rows.txt'),
            CLOCK: str(3600 * HOURS[name]),
        }  # fmt: skip
        self._environment |= {} if name == 'd' else {'PRETRAX_MEMORY': str(memory / name)}
        config = self.directory / 'run.yaml'
        config.write_text(json.dumps(values(name, case, server, self.run_dir)))
        launch = ['launch', 'local', str(config), '--processes=2', '--devices-per-process=1', '--retries=50']
        self._command = launch if name == 'd' else ['train', str(config)]

    def start(self) -> None:
        self._seen = len(self.server.requests)
        self.program = Program(programs(), self._command, self._environment, self.output)

    def kill(self, draw: random.Random) -> None:
        """Kills all of it and starts it again; or one process while only the memory of its launcher has a state."""
        with self.lock:
            assert self.program is not None
            if self.processes > 1 and not steps_in(self.run_dir / 'checkpoints'):
                self.kill_one(draw)
                return
            self.program.kill()
            if self.processes > 1:
                time.sleep(0.1)  # until what the wrappers stand for has ended
            self.start()

    def kill_one(self, draw: random.Random) -> bool:
        """Kills one of its processes; its launcher goes on. Returns whether there was one."""
        events = read_attempts(self.run_dir) if self.run_dir.is_dir() else []
        if not events or events[-1]['event'] not in ('began', 'stepped'):
            return False
        pids = next((event['processes'] for event in reversed(events) if event['event'] == 'started'), [])
        with contextlib.suppress(ProcessLookupError):
            self._seen = len(self.server.requests)
            os.kill(draw.choice(pids), signal.SIGKILL)
            return True
        return False

    def restart_if_ended(self) -> bool:
        """Starts it again if it says that it may be. Returns whether it has finished. Raises RuntimeError."""
        with self.lock:
            code = self.program.code if self.program is not None else None
            if code not in (None, 0):
                self.codes[code] += 1
                if code != 75:
                    raise RuntimeError(f'island {self.name} ended with {code}:\n{self.output.read_text()[-3000:]}')
                self.start()
            return code == 0

    def is_back(self) -> bool:
        """Whether it has ended, or has written to its federation since it was started, after the lease."""
        if self.program is not None and self.program.code == 0:
            return True
        said = rf'islands/{self.name}/state.json|rounds/\d+/'
        return any(
            method in ('PUT', 'POST') and re.search(said, path) for method, path in self.server.requests[self._seen :]
        )


def values(name: str, case: Case, server: BucketServer, run_dir: Path) -> dict[str, Any]:
    """The configuration of an island."""
    section = {
        'bucket': f'{server.url}/{PLACE}',
        'islands': len(MESHES),
        'wait_for': len(MESHES),
        'every': 4,
        'keep': 3,
        'patience': LARGE,
    }
    return {
        'name': name, 'run_dir': str(run_dir), 'steps': case.steps, 'mesh': MESHES[name],
        'model': {'family': 'llama', 'n_layers': 2, 'd_model': 32, 'attention': {'n_heads': 4}},
        'plugins': [str(TESTS / 'recorded_rows.py')], 'data': {'name': 'noted', 'vocab_size': 64},
        'batch': {'tokens': 128 if name == 'd' else 64, 'sequence_length': 16}, 'optimizer': {'learning_rate': 3e-3},
        'schedule': {'name': 'constant', 'warmup': 2}, 'precision': {'compute': 'f32'}, 'eval': {'every': 0},
        'checkpoint': {'every': 4, 'memory': {'every': 1}}, 'log': {'every': 1, 'report': False},
        'faults': {'heartbeat_seconds': 5}, 'federation': section | case.section,
    }  # fmt: skip


class Federation:
    """Four islands and their bucket, from the first start until all have finished."""

    def __init__(self, case: Case, directory: Path, cache: Path, seed: str, stack: contextlib.ExitStack):
        self.case, self.draw, self.kills = case, random.Random(seed), collections.Counter[str]()
        self.server = stack.enter_context(bucket_server(case.scheme))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir='/dev/shm')))
        proxies = {name: stack.enter_context(self.server.another_proxy()) for name in MESHES}
        self.islands = {name: Island(name, case, directory, proxy, cache, memory) for name, proxy in proxies.items()}
        self.removed: dict[str, bytes] = {}
        self.closings: dict[int, bytes] = {}
        self._writes = 'PUT' if case.scheme == 's3' else 'POST'
        stack.callback(self.stop)
        for island in self.islands.values():
            island.server.fault(method='DELETE', times=float('inf'), act=self._keep)

    def stop(self) -> None:
        for island in self.islands.values():
            if island.program is not None:
                island.program.kill()

    def train(self, disturbed: bool, kills: int) -> None:
        """Trains to the end. Raises RuntimeError if an island fails, or if nothing happens for long."""
        for number, island in enumerate(self.islands.values()):
            if disturbed:
                island.server.fail_often(self.draw.randrange(1 << 30), 10)
            island.start()
            wait(lambda number=number: len(self._shares()) > number, self)
        while not self.look():
            time.sleep(0.1)
            if self.kills.total() < kills:
                self.disturb()

    def look(self) -> bool:
        """Looks after the islands and the newest closing. Returns whether all have finished."""
        number = len(self.closings) + 1
        if (content := self._read(f'rounds/{number}/closed.json')) is not None:
            self.closings[number] = content
        return len([1 for island in self.islands.values() if island.restart_if_ended()]) == len(self.islands)

    def disturb(self) -> None:
        """Kills, once or twice, and waits until all who were killed are back, or not."""
        kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
        alive = [island for island in self.islands.values() if island.program and island.program.code is None]
        if len(alive) < 2:  # the last one would only be started again and again
            return
        island = self.draw.choices(alive, [OFTEN[one.name] for one in alive])[0]
        time.sleep(self.draw.uniform(0, 1))
        killed = [island]
        if kind == 'process':
            killed = [one for one in alive if one.processes > 1 and one.kill_one(self.draw)]
            self.kills[kind] += len(killed)
        elif kind == 'two':
            killed = self.draw.sample(alive, min(2, len(alive)))
            for one in killed:
                one.kill(self.draw)
            self.kills[kind] += len(killed)
        elif kind in ('moment', 'start'):
            island.kill(self.draw)
            if kind == 'start':
                time.sleep(self.draw.uniform(0, 2 if island.name == 'a' else 4))
                island.kill(self.draw)
            self.kills[kind] += 1 + (kind == 'start')
        else:
            killed = self._kill_at(kind, alive)
        if self.draw.random() < 0.8:
            wait(lambda: self.look() or all(one.is_back() for one in killed), self)

    def _kill_at(self, kind: str, alive: list[Island]) -> list[Island]:
        """Kills the first of some islands that makes a request. Returns it; [] if none does so soon."""
        killed, is_after, first = [], self.draw.random() < 0.5, threading.Lock()

        def act(island: Island) -> Callable[[str, str], None]:
            def kill(method: str, path: str) -> None:
                if method == 'DELETE':
                    self._keep(method, path)
                with first:
                    if not killed:
                        killed.append(island)
                        island.kill(self.draw)

            return kill

        armed = []
        for island in alive:
            what = {'method': 'DELETE', 'match': r'rounds/\d+/|anchors'} if kind == 'removal' else {
                'method': self._writes, 'match': MOMENTS[kind].replace('NAME', island.name)
            }  # fmt: skip
            end = {'lose_answer': True} if is_after else {'cut_after': 0}
            fault = island.server.fault(**what, **end, act=act(island))
            island.server.faults.insert(0, island.server.faults.pop(island.server.faults.index(fault)))
            armed.append((island, fault))
        end = time.monotonic() + 10
        while not killed and time.monotonic() < end and not self.look():
            time.sleep(0.05)
        for island, fault in armed:
            with contextlib.suppress(ValueError):
                island.server.faults.remove(fault)
        with first:
            self.kills[f'{kind}, {"after" if is_after else "before"}'] += len(killed)
            return killed

    def _keep(self, method: str, path: str) -> None:
        """Keeps what is removed, to compute it again."""
        del method
        key = path.partition('?')[0].partition(f'{PLACE}/')[2]
        if key and (content := self._read(key)) is not None:
            self.removed[key] = content

    def _shares(self) -> dict[str, int]:
        content = self._read('federation.json')
        return {} if content is None else json.loads(content)['islands']

    def _read(self, key: str) -> bytes | None:
        try:
            return self.server.content(f'{PLACE}/{key}')
        except AssertionError:
            return None

    def checked(self, reference: dict[Any, str] | None) -> tuple[Recomputed, list[str]]:
        """The rounds computed again from the bucket, and the problems that were found."""
        keys = [key.removeprefix(f'{PLACE}/') for key in self.server.keys(f'{PLACE}/')]
        objects = self.removed | {key: self.server.content(f'{PLACE}/{key}') for key in keys}
        found = Recomputed(objects)
        problems = found.problems
        problems += [
            f'round {n} was closed twice' for n, content in self.closings.items()
            if objects[f'rounds/{n}/closed.json'] != content
        ]  # fmt: skip
        owners: dict[int, tuple[str, int]] = {}
        for name, batches in found.batches().items():
            rows = rows_of(self.islands[name].directory / 'rows.txt')
            for row, owner in [(row, (name, batch)) for batch in batches for row in rows[batch]]:
                if owners.setdefault(row, owner) != owner:
                    problems.append(f'row {row} is in batches {owner} and {owners[row]}')
        for name, island in self.islands.items():
            saved = CheckpointWeights(island.run_dir / 'checkpoints', self.case.steps)
            other = [key for key, values in found.weights.items() if not np.array_equal(saved.read(key), values)]
            problems += [f'{name} ended with other weights: {", ".join(other)}'] if other else []
            listed = [path for method, path in island.server.requests
                      if method == 'GET' and re.search(r'list-type|/o(\?|$)', path)]  # fmt: skip
            problems += [f'{name} has listed the bucket: {listed[0]}'] if listed else []
        if self.case.section.get('patience', LARGE) == LARGE:
            left_out = [n for n, closing in found.closings.items() if len(closing['members']) < len(MESHES)]
            problems += [f'rounds {left_out} are not of all islands'] if left_out else []
            if reference is not None:
                other = [
                    one for one in reference.keys() | found.learned() if reference.get(one) != found.learned().get(one)
                ]
                problems += [f'without kills, these differ: {sorted(other)[:8]}'] if other else []
        return found, problems


def wait(done: Callable[[], Any], federation: Federation) -> None:
    """Waits until something is done. Raises RuntimeError if it takes too long."""
    end = time.monotonic() + PATIENCE
    while not done():
        federation.look()
        if time.monotonic() > end:
            said = [
                f'{one.name}: {one.output.read_text()[-1500:]}'
                for one in federation.islands.values()
                if one.output.exists()
            ]
            raise RuntimeError('nothing happens any more\n' + '\n'.join(said))
        time.sleep(0.05)


def trained(
    name: str, directory: Path, cache: Path, seed: str, reference: dict[Any, str] | None, kills: int = 0
) -> tuple[dict[Any, str], dict[str, Any]]:
    """Trains a federation. Returns what its islands learned, and a row of the table.

    Args:
        reference: what they learn without kills; None: there are no kills and no faults.
        kills: how many at most.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        federation = Federation(CASES[name], directory, cache, seed, stack)
        federation.train(reference is not None, kills)
        found, problems = federation.checked(reference)
        row = {
            'case': name,
            'seed': seed,
            'kills': federation.kills,
            'rounds': len(found.closings),
            'incomplete': sum(len(one['members']) < len(MESHES) for one in found.closings.values()),
            'removed': len(federation.removed),
            'unavailable': sum(one.codes.total() for one in federation.islands.values()),
            'problems': problems,
            'seconds': round(time.monotonic() - began, 1),
        }
    print(json.dumps(row), flush=True)
    return found.learned(), row


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = result['federations']
    kinds = sum((collections.Counter(row['kills']) for row in rows), collections.Counter())
    lines = [
        f'# Kills of islands, {result["date"]}', '',
        f'`{result["command"]}` on {result["cores"]} cores of {result["processor"]}.',
        f'Programs in the queue of the cores, averaged over the last minutes: {result["load"]}.',
        'Several commands made these rows; the command and the load are those of the last one.', '',
        'Every federation has four islands of other meshes, one of them of two processes; one request in ten fails,',
        'and two clocks are off by hours. `incomplete` counts the rounds without some island, which happens only with',
        'a patience of two seconds. `wrong` counts what differs from the same federation without kills, or from the',
        'numbers in the bucket computed again.', '',
        '| federation | runs | kills | rounds | incomplete | wrong | seconds a kill |', '|---|---|---|---|---|---|---|',
    ]  # fmt: skip
    for case in [*dict.fromkeys(row['case'] for row in rows), None]:
        some = [row for row in rows if case in (row['case'], None)]
        kills = sum(sum(row['kills'].values()) for row in some)
        sums = [sum(row[key] for row in some) for key in ('rounds', 'incomplete')]
        cells = [len(some), kills, *sums, sum(len(row['problems']) for row in some)]
        seconds = sum(row['seconds'] for row in some) / max(1, kills)
        lines.append(f'| {case or "all"} | {" | ".join(map(str, cells))} | {seconds:.1f} |')
    lines += ['', f'Kills: {", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))}.']
    return '\n'.join(lines) + '\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument('--kills', type=int, default=500, help='in all, with those in the rows')
    parser.add_argument('--each', type=int, default=60, help='kills of a federation at most')
    parser.add_argument('--only', nargs='+', choices=CASES, default=list(CASES))
    parser.add_argument('--minutes', type=float, default=float('inf'), help='after which no further federation begins')
    parser.add_argument('--directory', type=Path, help='where the runs stay (default: a temporary directory)')
    parser.add_argument('--out', type=Path, default=Path(__file__).parent / 'results')
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    end, file = time.monotonic() + 60 * asked.minutes, asked.out / 'federation-kills.jsonl'
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    references: dict[str, dict[Any, str]] = {}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all islands end too
    with contextlib.ExitStack() as stack:
        directory = asked.directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='federations-')))
        while sum(sum(row['kills'].values()) for row in rows) < asked.kills and time.monotonic() < end:
            counts = {name: sum(row['case'] == name for row in rows) for name in asked.only}
            name = min(counts, key=counts.__getitem__)
            if name not in references:
                references[name], row = trained(name, directory / f'{name}-whole', directory, name, None)
                if row['problems']:
                    return 1
            seed = f'{name}-{counts[name]}'
            rows.append(trained(name, directory / seed, directory, seed, references[name], asked.each)[1])
            with file.open('a') as lines:
                lines.write(json.dumps(rows[-1]) + '\n')
    result = circumstances() | {'load': round(os.getloadavg()[2], 1), 'federations': rows}
    write_result(result, table, asked.out, 'federation-kills')
    return any(row['problems'] for row in rows)


if __name__ == '__main__':
    sys.exit(main())
