"""Commands in processes that are forked from one that has imported JAX and pretrax, and has no backend yet.

Importing takes seconds, forking takes milliseconds. Each command has its own arguments, directory, environment, streams
and devices, and is in the namespaces of its caller, such as a node of `slurm_cluster`. `run` takes the place of
`subprocess.run`; `programs` is a directory for a shell's PATH.
"""

import atexit
import contextlib
import functools
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from pathlib import Path

# A program that a shell runs: `pretrax` or `python`. Its interpreter starts in 20 ms, since it imports no packages.
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # they wait until there is a process that they can be passed to
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
request = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(connection, [len(request).to_bytes(8, 'big')], [0, 1, 2])
connection.sendall(request)
answers = connection.makefile()
process = int(answers.readline())
for number in SIGNALS:
    signal.signal(number, lambda number, frame: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
code = int(answers.readline() or 1)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
PROGRAMS = []  # the directory of the programs, in the process that forks
# JAX reads these when it is imported.
SETTINGS = {
    'JAX_ENABLE_COMPILATION_CACHE': lambda text: text.lower() in ('1', 'true', 'yes', 'on'),
    'JAX_COMPILATION_CACHE_DIR': str,
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': float,
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': int,
    'JAX_NUM_CPU_DEVICES': int,
}


def run(command, *, cwd=None, env=None, timeout=None):
    """Runs ['pretrax' or 'python', *arguments] to its end; its output is captured, stderr apart from stdout."""
    program = programs() / command[0]
    return subprocess.run(
        [program, *command[1:]], cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@functools.cache
def programs() -> Path:
    """A directory with `pretrax` and `python`, and the process that they are forked from, which ends with this one."""
    from pretrax.system.process_memory import with_kept_memory

    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    directory = Path(tempfile.mkdtemp(prefix='preloaded-'))
    process = subprocess.Popen(
        [sys.executable, __file__, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=with_kept_memory(environment) or environment,
    )  # fmt: skip
    assert process.stdout.readline() == b'ready\n'

    @atexit.register
    def end():
        process.kill()
        process.wait()
        shutil.rmtree(directory)

    return directory


def main(directory):
    """Imports, then forks a process for each connection."""
    import pretrax.checkpoint
    import pretrax.cli
    import pretrax.run.loop

    for module in pkgutil.walk_packages(pretrax.cli.__path__, 'pretrax.cli.'):
        __import__(module.name)
    from jax._src import xla_bridge

    assert not xla_bridge.backends_are_initialized()
    warnings.filterwarnings('ignore', 'os.fork')
    address = os.path.join(directory, 'socket')
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    for name in ('pretrax', 'python'):
        program = Path(directory, name)
        program.write_text(PROGRAM.format(python=sys.executable, address=address, name=name))
        program.chmod(0o755)
    PROGRAMS.append(directory)
    print('ready', flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:  # until its parent has ended
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(connection)
            os._exit(0)
        connection.close()


def serve(connection):
    """Forks the command, and reports its process id and its exit code. If the caller is killed, so is the command."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    request = b''
    while len(request) < int.from_bytes(size, 'big'):
        request += connection.recv(1 << 16)
    caller, _, _ = struct.unpack('3i', connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    namespaces = namespaces_of(caller)
    mounts = namespaces.pop('mnt', None)
    for namespace in namespaces.values():  # that of processes holds for those that are forked next
        os.setns(namespace)
    if not (process := os.fork()):
        connection.close()
        if mounts is not None:
            os.setns(mounts)
        command(streams, *json.loads(request))
    with contextlib.suppress(BrokenPipeError):  # the caller is gone
        connection.sendall(f'{id_in_its_namespace(process)}\n'.encode())
    ended = os.pidfd_open(process)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f'{code}\n'.encode())


def namespaces_of(process):
    """The namespaces of a process that differ from those of this one: open files, that of mounts last."""
    own, theirs = '/proc/self/ns', f'/proc/{process}/ns'
    kinds = [
        kind for kind in ('net', 'uts', 'pid', 'mnt') if os.readlink(f'{own}/{kind}') != os.readlink(f'{theirs}/{kind}')
    ]
    return {kind: os.open(f'{theirs}/{kind}', os.O_RDONLY) for kind in kinds}


def id_in_its_namespace(process):
    """The id that a process has in its own namespace of processes."""
    status = Path(f'/proc/{process}/status').read_text()
    return next(line.split()[-1] for line in status.splitlines() if line.startswith('NSpid:'))


def command(streams, name, arguments, cwd, environment):
    """Is the command: what an interpreter does from its start to its end."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    code = 1
    try:
        os.chdir(cwd)
        memory = os.environ.get('GLIBC_TUNABLES')
        os.environ.clear()
        os.environ.update(environment | ({'GLIBC_TUNABLES': memory} if memory else {}))
        configure(environment)
        sys.executable = os.path.join(PROGRAMS[0], 'python')  # so that what it starts is forked too
        sys.path[:0] = filter(None, environment.get('PYTHONPATH', '').split(os.pathsep))
        interpret(name, arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def configure(environment):
    import jax

    for name, kind in SETTINGS.items():
        if name in environment:
            jax.config.update(name.lower(), kind(environment[name]))


def interpret(name, arguments):
    if name == 'pretrax':
        from pretrax.cli import main

        sys.argv = [name, *arguments]
        main()
    elif arguments[0] == '-c':
        sys.argv = ['-c', *arguments[2:]]
        sys.path.insert(0, '')
        exec(compile(arguments[1], '<string>', 'exec'), {'__name__': '__main__'})
    elif arguments[0] == '-m':
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name='__main__', alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name='__main__')


if __name__ == '__main__':
    main(sys.argv[1])
