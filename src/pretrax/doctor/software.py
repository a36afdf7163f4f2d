"""Software that must be the same on all nodes: versions, the checkout, the configuration, and variables."""

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from pretrax.config import Processes
from pretrax.doctor.findings import Context, Finding
from pretrax.doctor.host_facts import digest
from pretrax.errors import UserError
from pretrax.run.environment import git_state
from pretrax.run.variables import check_variables, warnings_of
from pretrax.system.software import versions

# Variables that change what JAX and its libraries do.
_VARIABLES = re.compile(r'XLA_.*|LIBTPU_INIT_ARGS|TPU_.*|JAX_.*|NCCL_.*|GLOO_.*|UCX_.*|CUDA_DEVICE_.*|TF_GPU_.*')
# The identity of a process, its devices, and where it writes.
_OWN = re.compile(
    r'JAX_(PROCESS_ID|COORDINATOR_\w+|LOCAL_DEVICE_IDS|COMPILATION_CACHE_DIR|NUM_PROCESSES)|NCCL_DEBUG_FILE|'
    r'TPU_(WORKER_ID|WORKER_HOSTNAMES|PROCESS_\w+|VISIBLE_\w+|SKIP_MDS_QUERY)|XLA_FLAGS'
)
_INTERFACE = re.compile(
    r'.*_(IFNAME|HCA|NET_DEVICES)'
)  # names of cards, which differ between machines for good reasons
_NO_MATTER = re.compile(r'--xla_dump_\w+=\S+|--xla_force_host_platform_device_count=\d+')


def software(context: Context) -> Iterator[Finding]:
    """Versions: processes that compile different programs hang, or compute different numbers."""
    found = {'Python': platform.python_version(), **versions()}
    fix = 'install the same on all nodes: uv sync --locked in a checkout that they share, or one container image'
    for name, version in found.items():
        yield Finding(name, version, fix=fix, same=version, absent='none', group='versions')


def checkout(context: Context) -> Iterator[Finding]:
    """The commit of the repository that pretrax runs from."""
    state = git_state(Path(__file__).parent)
    if state is not None:
        text = f'{state["commit"][:10]}{", with changes" if state["changed"] else ""}'
        yield Finding('git commit', text, fix='git pull on all nodes, or share one checkout', same=text)


def configuration(context: Context) -> Iterator[Finding]:
    """A digest of the resolved configuration: another file or another value on one node changes the program there."""
    if context.config is None:
        return
    same = digest(context.config.model_copy(update={'processes': Processes()}))[:10]
    fix = 'start all nodes with the same CONFIG and key=value: copy the file, or keep it on the shared disk'
    yield Finding('configuration', f'{context.config.name}, digest {same}', fix=fix, same=same)


def variables(context: Context) -> Iterator[Finding]:
    """Variables of the environment that change behavior, and those that a run is warned of or refuses."""
    try:
        check_variables()
    except UserError as error:
        what, _, fix = str(error).partition('\n')
        yield Finding('variables', what, 'failure', fix)
    for text in warnings_of(os.environ):
        yield Finding('variables', text, 'warning', 'unset it unless you mean it; docs/clusters.md lists the variables')
    found = {
        name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name) and not _OWN.fullmatch(name)
    }
    flags = ' '.join(sorted(_NO_MATTER.sub('', os.environ.get('XLA_FLAGS', '')).split()))
    found |= {'XLA_FLAGS': flags} if flags else {}
    for name in sorted(found):
        fix = f'set {name} to the same value on all nodes, or on none: srun --export, mpirun -x, the job script'
        status = 'warning' if _INTERFACE.fullmatch(name) else 'failure'
        yield Finding(name, found[name], fix=fix, same=found[name], differs=status, absent='not set', group='variables')
