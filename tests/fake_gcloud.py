#!/usr/bin/env python3
"""A gcloud for tests: its queued resources are directories, and its TPU VMs are processes with a /var/lib of their own.

$FAKE_GCLOUD is its directory. `calls.jsonl` has every command line; `NAME/state` is the state of a queued resource,
which a test may change; `metadata.json` has the address of the metadata server of each VM.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HOME = Path(os.environ['FAKE_GCLOUD'])
HOSTS = 1  # of a slice


def main(words):
    with (HOME / 'calls.jsonl').open('a') as calls:
        calls.write(json.dumps(words) + '\n')
    if words[:2] == ['auth', 'list']:
        print((HOME / 'account').read_text())
        return
    assert words[:3] == ['compute', 'tpus', 'queued-resources'], words
    parser = argparse.ArgumentParser()
    parser.add_argument('verb')
    parser.add_argument('name')
    for option in ('zone', 'project', 'accelerator-type', 'runtime-version', 'metadata-from-file', 'labels', 'node-id',
                   'node-prefix', 'node-count', 'node', 'worker', 'command', 'format', 'network',
                   'service-account'):  # fmt: skip
        parser.add_argument(f'--{option}')
    for flag in ('spot', 'force', 'quiet'):
        parser.add_argument(f'--{flag}', action='store_true')
    given = parser.parse_args(words[3:])
    place = HOME / given.name
    if given.verb != 'create' and not place.exists():
        sys.exit(f'ERROR: (gcloud) NOT_FOUND: Resource {given.name!r} was not found')
    {'create': create, 'describe': describe, 'delete': delete, 'ssh': ssh, 'preempt': preempt}[given.verb](given, place)


def create(given, place):
    place.mkdir()
    script = given.metadata_from_file.removeprefix('startup-script=')
    shutil.copy(script, place / 'startup.sh')
    (place / 'state').write_text('WAITING_FOR_RESOURCES')
    (place / 'slices').write_text(given.node_count or '1')


def describe(given, place):
    """The slices become active after the first look."""
    state = (place / 'state').read_text()
    print(state)
    if state == 'WAITING_FOR_RESOURCES' and not (HOME / 'no_resources').exists():
        boot(place)
        (place / 'state').write_text('ACTIVE')


def boot(place):
    metadata = json.loads((HOME / 'metadata.json').read_text())
    for number in range(int((place / 'slices').read_text()) * HOSTS):
        vm = place / f'vm-{number}'
        vm.mkdir()
        script = f'mount --bind {vm} /var/lib && mount -t tmpfs none /dev/shm && exec bash {place}/startup.sh'
        process = subprocess.Popen(
            ['unshare', '--mount', 'bash', '-c', script], env=os.environ | {'GCE_METADATA_IP': metadata[number]},
            stdin=subprocess.DEVNULL, stdout=(vm / 'boot.txt').open('w'), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        (vm / 'pid').write_text(str(process.pid))


def delete(given, place):
    kill(place)
    shutil.rmtree(place)


def preempt(given, place):
    """What Google does with spot slices; no verb of gcloud."""
    (place / 'state').write_text('SUSPENDED')
    kill(place)


def kill(place):
    """Ends the VMs with all their processes."""
    for vm in place.glob('vm-*'):
        first = int((vm / 'pid').read_text())
        for process in [first, *below(first)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def below(process):
    """The processes that a process has started, and those that they have started."""
    try:
        children = [int(child) for child in Path(f'/proc/{process}/task/{process}/children').read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(one for child in children for one in below(child))]


def ssh(given, place):
    code = 0
    for vm in sorted(place.glob('vm-*'), key=lambda path: int(path.name[3:])):
        node, worker = divmod(int(vm.name[3:]), HOSTS)
        if given.node in ('all', str(node)) and given.worker in ('all', str(worker)):
            inside = f'mount --bind {vm} /var/lib && eval "$1"'
            print(f'SSH: Attempting to connect to worker {worker}...', file=sys.stderr)
            code |= subprocess.run(['unshare', '--mount', 'bash', '-c', inside, 'bash', given.command]).returncode
    sys.exit(code)


if __name__ == '__main__':
    main(sys.argv[1:])
