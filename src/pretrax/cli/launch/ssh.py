"""Train on hosts that are reached with OpenSSH.

Starts one process on each host, restarts all of them from the newest checkpoint if one is lost, and ends all of them
when it ends. ~/.ssh/config is respected. The hosts need this version of pretrax in the same directory, and a run
directory that they share, or a bucket.
"""

import contextlib
import dataclasses
import functools
import sys

from pretrax.cli._arguments import Launch, Retries, Standbys, Variables, Verbose, variables
from pretrax.launch.options import SshOptions
from pretrax.option import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Launch):
    ssh: SshOptions
    retries: Retries = 3
    standbys: Standbys = True
    check: bool = option('Run `pretrax doctor` on the hosts before each start.', default=False)
    environment: Variables = ()
    verbose: Verbose = False


def ssh(options: Options) -> int:
    import shlex

    from pretrax.launch.elastic import Slots
    from pretrax.launch.foreground import record_launcher
    from pretrax.launch.host_checks import check_hosts, devices_of_hosts
    from pretrax.launch.registry import refuse_if_running
    from pretrax.launch.restarts import RestartOptions
    from pretrax.launch.sizes import check_request, gpu_key, misfit
    from pretrax.launch.ssh import SshLaunch, hosts_of
    from pretrax.launch.supervisor import Supervisor
    from pretrax.observe.lasting_output import LastingOutput
    from pretrax.storage.locate import working_directory
    from pretrax.system.target import Target

    elastic, devices, given = options.ssh.elastic, options.ssh.devices, hosts_of(options.ssh)
    loaded = options.load()
    say = functools.partial(print, flush=True, file=LastingOutput(sys.stdout))
    added = variables(options.environment)  # perhaps secrets
    no_standbys = [] if options.standbys else ['--no-standbys']
    launch = SshLaunch(
        options.ssh,
        [*options.words, *options.flags('allow_changes', 'verbose', 'check'), *no_standbys],
        dict.fromkeys(added, '***') if options.dry_run else added,
        working_directory(loaded.run_dir),
        say,
    )
    has_files, platform = options.ssh.directory is None, 'gpu' if gpu_key(loaded) else 'cpu'
    training = given[: len(given) - options.ssh.spares]
    if devices is not None:
        check_request(loaded, len(training), devices)
    if options.dry_run:
        options.check_start(Target(len(training) * (devices or 0), platform, has_these_files=has_files))
        for process in launch.processes(training):
            print(f'{process.host}: {shlex.join(process.command)}')
        return 0
    refuse_if_running(loaded.run_dir)
    say(f'launch: checking {len(given)} hosts')
    found = check_hosts(launch, loaded, options.words)
    count = devices or devices_of_hosts(given, found)
    check_request(loaded, len(training), count)
    platform = 'gpu' if found[0]['gpus'] else 'cpu'
    options.check_start(Target(len(training) * count, platform, has_these_files=has_files))
    say(
        f'launch: {len(training)} processes with {count} device{"s" if count > 1 else ""} each on '
        f'{", ".join(host.name for host in training)}; output in {loaded.run_dir}/output'
    )
    slots = Slots(
        len(given),
        lambda number: misfit(loaded, number * count) is None,
        ready=launch.ready if elastic else None,
        spares=launch.spares,
    )
    record_launcher(loaded.run_dir, 'ssh', len(given), say, hosts=[host.name for host in given])
    restarts = RestartOptions(retries=options.retries, elastic=elastic)
    with contextlib.closing(launch.agents):
        return Supervisor(loaded, launch.start, slots, restarts, say=say).run()
