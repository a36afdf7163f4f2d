"""Train in one process on this machine, as part of a launched run.

Every engine starts this on each of its machines: Slurm, ssh, a Ray actor, a container of a pod, `mpirun`. It passes
signals on, leaves a crash report in the run directory when the training fails, and exits with its code. After a request
to stop before the run is finished, the exit code is 75: start it again to continue.
"""

import dataclasses
import functools
import sys

from pretrax.cli._arguments import AllowChanges, Configuration, Standbys, Verbose
from pretrax.option import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Configuration):
    attempt: str | None = option('Names the directory of crash reports. [default: the time]', metavar='LABEL')
    check: bool = option('Run `pretrax doctor` first; train only if it finds no failure.', default=False)
    controlled: bool = option('Take signals from standard input, and end when it ends.', default=False)
    lasting: bool = option('Train as often as a launcher asks for it on standard input.', default=False)
    standbys: Standbys = True
    until_done: bool = option('Exit with 143 if an unfinished run was asked to stop.', default=False)
    allow_changes: AllowChanges = False
    verbose: Verbose = False


def node(options: Options) -> int:
    from pretrax.system.children import signals_from_now_on

    waiting = signals_from_now_on()  # before the slow imports
    from pretrax.launch.crash import attempt_label
    from pretrax.launch.local import pretrax_command
    from pretrax.launch.node import Node

    loaded = options.load()  # a mistake is reported before anything starts
    here = Node(
        loaded,
        attempt=options.attempt or attempt_label(),
        controlled=options.controlled,
        lasting=options.lasting,
        until_done=options.until_done,
        waiting=waiting,
        say=functools.partial(print, file=sys.stderr, flush=True),
    )
    command = pretrax_command('train', *options.words, *options.flags('allow_changes', 'verbose'))
    check = pretrax_command('doctor', *options.words) if options.check else None
    return here.run(command, check, options.standbys)
