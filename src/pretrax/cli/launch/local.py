"""Train in several processes of this machine.

If a process is lost, all of them restart from the newest checkpoint.
"""

import dataclasses
import functools
import shlex
import sys

from pretrax.cli._arguments import Launch, Retries, Standbys, Verbose
from pretrax.errors import UserError
from pretrax.option import REQUIRED, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Launch):
    processes: int = option('Number of processes.', '-n', default=REQUIRED, min=1)
    devices: int | None = option(
        'Devices per process. [default: what the mesh needs, or all]', '--devices-per-process', min=1
    )
    retries: Retries = 3
    standbys: Standbys = True
    elastic: bool = option('Continue with fewer processes if one is lost repeatedly.', default=False)
    verbose: Verbose = False


def local(options: Options) -> int:
    from pretrax.launch.foreground import record_launcher
    from pretrax.launch.local import local_launch, pretrax_command
    from pretrax.launch.registry import refuse_if_running
    from pretrax.launch.restarts import RestartOptions
    from pretrax.launch.sizes import devices_per_process
    from pretrax.observe.lasting_output import LastingOutput
    from pretrax.system.accelerators import gpus_here
    from pretrax.system.target import Target

    loaded, processes, elastic = options.load(), options.processes, options.elastic
    section = loaded.processes
    if section.index is not None or section.coordinator is not None:
        raise UserError('the launcher sets processes.index and processes.coordinator; leave them out')
    if section.count is not None and (elastic or section.count != processes):
        raise UserError(
            f'processes.count is {section.count}, but --processes is {processes}'
            f'{" or fewer (--elastic)" if elastic else ""}\nleave processes.count out'
        )
    count, why = devices_per_process(loaded, processes, options.devices)
    say = functools.partial(print, flush=True, file=LastingOutput(sys.stdout))
    others = f'; output of {"1" if processes == 2 else f"1 to {processes - 1}"} in {loaded.run_dir}/output'
    say(
        f'launch: {processes} process{"es" if processes > 1 else ""} '
        f'with {count} device{"s" if count > 1 else ""} each ({why}){others if processes > 1 else ""}'
    )
    if not options.dry_run:
        refuse_if_running(loaded.run_dir)
    options.check_start(Target(processes * count, 'gpu' if gpus_here() else 'cpu'))
    command = pretrax_command('train', *options.words, *options.flags('allow_changes', 'verbose'))
    if options.dry_run:
        print(shlex.join(command))
        return 0
    restarts = RestartOptions(retries=options.retries, elastic=elastic)
    launch = local_launch(
        loaded, command, restarts, processes=processes, devices=count, standbys=options.standbys, say=say
    )
    record_launcher(loaded.run_dir, 'local', processes, say)
    return launch.run()
