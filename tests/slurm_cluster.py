"""A real Slurm on this machine: a login node and four others, each with its own host name, network and processes.

They are namespaces of Linux, connected by a bridge. A node can lose its power: its cable is pulled, and its processes
end. Everything ends with the process that started it, however that one ends, because the first process of the namespace
reads from it.

    python tests/slurm_cluster.py srun --nodes 4 hostname
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PROGRAMS = ('slurmctld', 'slurmd', 'sbatch', 'munged', 'ip', 'unshare', 'nsenter')
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=f'{os.environ["PATH"]}:/usr/sbin:/sbin')]
PATIENCE = 120  # seconds for what takes a few on a quiet machine
SLURMD_TIMEOUT = 10  # seconds; 300 by default

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={timeout}
KillWait=5
JobRequeue=1
OverTimeLimit=0
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=node[1-{nodes}] CPUs=2 RealMemory=2000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=2-00:00:00 State=UP PriorityTier=1 GraceTime=30 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=small Nodes=node1 MaxTime=60 MaxNodes=1 State=UP
"""

# The first process of the namespace. It runs the lines that it reads, each of which answers with a line, until there
# are no more because the test has ended; the kernel then ends all other processes.
_FIRST = """
cd $directory
ip link set lo up; ip link add br0 type bridge; ip addr add 10.77.9.1/24 dev br0; ip link set br0 up
hostname login; mount --bind hosts /etc/hosts
mkdir -p /run/munge /run/netns
for place in /etc/slurm /run/munge /run/netns; do mount -t tmpfs tmpfs $place; done
cp slurm.conf gres.conf /etc/slurm
chown munge: /run/munge; chmod 755 /run/munge; runuser -u munge -- munged --force 2> munged.txt
declare -A power
plug_in() {
    ip netns del node$1 2> /dev/null; ip link del cable$1 2> /dev/null
    ip netns add node$1
    ip link add cable$1 type veth peer name eth0 address 02:00:00:00:00:0$1 netns node$1  # the former address
    ip link set cable$1 master br0 up
    ip -n node$1 link set lo up; ip -n node$1 addr add 10.77.9.1$1/24 dev eth0; ip -n node$1 link set eth0 up
    nsenter --net=/run/netns/node$1 unshare --uts --pid --mount --fork --kill-child --mount-proc bash -c "
        hostname node$1; slurmd -D -N node$1 & while :; do wait; sleep 1; done" < /dev/null > slurmd-$1.txt 2>&1 &
    power[$1]=$!
}
unplug() { ip link set cable$1 down; kill -KILL ${power[$1]}; wait ${power[$1]} 2> /dev/null; }
slurmctld -c > slurmctld.txt 2>&1
for node in $nodes; do plug_in $node; done
echo started
while read -r line; do $line; echo done; done
"""


class SlurmCluster:
    """A cluster, from the login node.

    Args:
        directory: for the files of Slurm.
        nodes: number of nodes: node1, node2, ...; each has two CPUs, and two GPUs that no program can use.
    """

    def __init__(self, directory: Path, nodes: int = 4):
        self.directory, self.nodes = directory, nodes
        numbers = range(1, nodes + 1)
        for name in ('state', *(f'spool-node{number}' for number in numbers)):
            (directory / name).mkdir()
        configuration = _CONFIGURATION.format(directory=directory, nodes=nodes, timeout=SLURMD_TIMEOUT)
        (directory / 'slurm.conf').write_text(configuration)
        (directory / 'gres.conf').write_text(
            ''.join(f'NodeName=node[1-{nodes}] Name=gpu File=/dev/{device}\n' for device in ('zero', 'full'))
        )
        hosts = ['127.0.0.1 localhost', '10.77.9.1 login', *(f'10.77.9.1{number} node{number}' for number in numbers)]
        (directory / 'hosts').write_text('\n'.join(hosts) + '\n')
        self._log = (directory / 'first.txt').open('w')
        self._first = subprocess.Popen(
            ['unshare', '--net', '--mount', '--uts', '--pid', '--fork', '--mount-proc', 'bash', '-c', _FIRST],
            env=os.environ | {
                'directory': str(directory), 'nodes': ' '.join(map(str, numbers)),
                'PATH': f'{os.environ["PATH"]}:/usr/sbin:/sbin',
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip

    def __enter__(self) -> 'SlurmCluster':
        try:
            self._answer('started')
            self.until(lambda: self.states() == ['idle'] * self.nodes, 'idle nodes')
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._first.stdin
        assert self._first.stdout
        with contextlib.suppress(BrokenPipeError):
            self._first.stdin.close()
        self._first.wait()
        self._first.stdout.close()
        self._log.close()

    def command(self, *words: str) -> list[str]:
        """The command that runs another one on the login node, in the working directory of its caller."""
        first = Path(f'/proc/{self._first.pid}/task/{self._first.pid}/children').read_text().split()[0]
        return ['nsenter', '--target', first, '--net', '--mount', '--uts', '--pid', f'--wd={os.getcwd()}', *words]

    def run(self, *words: object, check: int | None = 0, **options) -> str:
        """Runs a command on the login node. Returns its output. `check`: the exit code that is expected; None: any."""
        done = subprocess.run(
            self.command(*map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            stdin=subprocess.DEVNULL, **options,
        )  # fmt: skip
        assert check in (None, done.returncode), f'{words}: exit code {done.returncode}\n{done.stdout}'
        return done.stdout

    def states(self) -> list[str]:
        """States of the nodes, by number."""
        found = self.run('sinfo', '-h', '-N', '-p', 'main', '-o', '%N %T', check=None).splitlines()
        return [line.split()[-1] for line in sorted(found)]

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: {'JobState': 'RUNNING', 'Restarts': '0', ...}."""
        return dict(re.findall(r'(\w+)=(\S*)', self.run('scontrol', 'show', 'job', '-o', number)))

    def processes(self, node: str, words: str) -> list[str]:
        """Process ids, as the login node sees them, of those on a node whose command has these words."""
        found = self.run('pgrep', '-f', words, check=None).split()
        environments = {pid: self.run('cat', f'/proc/{pid}/environ', check=None).split('\0') for pid in found}
        return [pid for pid, variables in environments.items() if f'SLURMD_NODENAME={node}' in variables]

    def unplug(self, number: int) -> None:
        """Cuts the power of a node."""
        self._tell(f'unplug {number}')

    def plug_in(self, number: int) -> None:
        """Starts a node again."""
        self._tell(f'plug_in {number}')

    def until[T](self, done: Callable[[], T], what: str, log: str = '') -> T:
        """What `done()` returns once that is something. `log` is for the message if it never is."""
        until = time.monotonic() + PATIENCE
        while not (found := done()):
            if time.monotonic() >= until:
                raise AssertionError(f'no sign of {what}\n{log}\n{self.run("squeue", check=None)}{self.last_lines()}')
            time.sleep(0.1)
        return found

    def last_lines(self) -> str:
        """The ends of the logs, for the message of a test that fails."""
        logs = [*sorted(self.directory.glob('*.log')), *sorted(self.directory.glob('*.txt'))]
        return ''.join(f'{log.name}:\n{"".join(log.read_text().splitlines(True)[-8:])}' for log in logs)

    def _tell(self, line: str) -> None:
        assert self._first.stdin
        self._first.stdin.write(f'{line}\n')
        self._first.stdin.flush()
        self._answer('done')

    def _answer(self, expected: str) -> None:
        assert self._first.stdout
        line = self._first.stdout.readline().strip()
        assert line == expected, f'{line!r}\n{self.last_lines()}'


def missing() -> str | None:
    """The reason why this machine cannot run a cluster; None: it can."""
    if MISSING:
        return f'needs Slurm ({", ".join(MISSING)}): apt-get install slurm-wlm munge iproute2'
    if os.geteuid() or subprocess.run(['unshare', '--net', '--mount', '--uts', '--pid', '--fork', 'true']).returncode:
        return 'needs root, and permission to create namespaces'
    return None


@contextlib.contextmanager
def slurm_cluster(nodes: int = 4) -> Iterator[SlurmCluster]:
    """A cluster that is ready to run jobs."""
    with tempfile.TemporaryDirectory(prefix='slurm-') as directory, SlurmCluster(Path(directory), nodes) as cluster:
        yield cluster


def main(command: Sequence[str]) -> int:
    with slurm_cluster() as cluster:
        return subprocess.run(cluster.command(*command)).returncode


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:] or ['sinfo']))
