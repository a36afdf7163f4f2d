"""Checks that need several nodes but no devices: connections, clocks, and the run directory that the nodes share."""

import contextlib
import ipaddress
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pretrax.doctor.disk import existing_parent
from pretrax.doctor.findings import Context, Finding, failure, warning

_NEIGHBORS = 8  # nodes that each node connects to
_CONNECT = 5.0  # seconds
_SEEN = 10.0  # seconds for a file to be seen by other nodes: NFS keeps what it knows of a directory for a while
_SKEW, _LARGE_SKEW = 1.0, 300.0  # seconds


def listen() -> socket.socket:
    """Listens on a free port of all addresses. The system completes connections, and nothing has to accept them."""
    try:
        return socket.create_server(('', 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    except (OSError, ValueError):  # no IPv6
        return socket.create_server(('', 0), backlog=128)


def connect(address: str, port: int, seconds: float) -> str | None:
    """Connects to a port. Returns the reason if that fails."""
    try:
        socket.create_connection((address, port), seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def connections(context: Context, others: Mapping[int, Any]) -> Iterator[Finding]:
    """Connects to the ports on which the next nodes listen.

    Args:
        others: for every process its 'host', its 'port', and the 'address' from which it reached process 0.
    """
    order = sorted(others)
    at = order.index(context.index)
    targets = [order[(at + k) % len(order)] for k in range(1, min(_NEIGHBORS, len(order) - 1) + 1)]
    closed, nameless = [], []
    for target in targets:
        host, address, port = (others[target][key] for key in ('host', 'address', 'port'))
        if others[target]['host'] != context.host:
            try:
                socket.getaddrinfo(host, None)
            except OSError:
                nameless.append(host)
        if problem := connect(address or host, port, _CONNECT):
            closed.append(f'{host} port {port}: {problem}')
    if closed:
        fix = (
            'allow all TCP ports between the nodes in their firewall or security group; NCCL and gloo choose free ones'
        )
        yield failure('connections', f'cannot connect to {"; ".join(closed[:2])}', fix)
    else:
        yield Finding('connections', f'each node reaches {len(targets)} other{"s" * (len(targets) > 1)}')
    if {value['host'] for value in others.values()} != {context.host} and (own := _own_loopback(context.host)):
        fix = f'/etc/hosts: give {context.host} the address of the network card, not {own}'
        yield warning(
            'host name', f'{context.host} is {own}, which other nodes cannot reach (gloo and MPI use it)', fix
        )
    if nameless:
        fix = 'add the nodes to the DNS or to /etc/hosts of each node; ssh and MPI connect by name'
        yield warning('host name', f'cannot resolve {", ".join(sorted(set(nameless))[:3])}', fix)


def _own_loopback(host: str) -> str:
    """The address of this machine's name if only this machine can reach it, such as Debian's 127.0.1.1; else ''."""
    try:
        addresses = sorted({str(found[4][0]).partition('%')[0] for found in socket.getaddrinfo(host, None)})
    except OSError:  # `machine.own_name` reports that
        return ''
    return addresses[0] if all(ipaddress.ip_address(address).is_loopback for address in addresses) else ''


def clock_findings(clocks: Mapping[int, tuple[float, float]]) -> dict[int, Finding]:
    """The finding about each process's clock. Services refuse requests from wrong clocks: S3, by 15 minutes."""
    found, fix = {}, 'start a time service there: timedatectl set-ntp true; chronyc tracking'
    for index, (ahead, uncertainty) in clocks.items():
        text = (
            f'{abs(ahead):.3g} s {"ahead of" if ahead > 0 else "behind"} the first node (+-{uncertainty * 1e3:.2g} ms)'
        )
        if abs(ahead) - uncertainty > _LARGE_SKEW:
            found[index] = failure('clock', text, fix)
        elif abs(ahead) - uncertainty > _SKEW:
            found[index] = warning('clock', text, fix)
        else:
            text = f'within {(abs(ahead) + uncertainty) * 1e3:.2g} ms of the first node'
            found[index] = Finding('clock', text, amount=-abs(ahead))
    return found


@contextlib.contextmanager
def token(context: Context) -> Iterator[str | None]:
    """Creates a file in the run directory, in process 0; the others look for it. None: nothing to share."""
    if (
        context.config is None
        or not isinstance(context.config.run_dir, Path)
        or context.index
        or context.processes == 1
    ):
        yield None
        return
    path = existing_parent(context.config.run_dir) / f'.pretrax-doctor-{secrets.token_hex(8)}'
    try:
        path.write_text('written by pretrax doctor\n')
    except OSError:  # `disk.run_directory` reports that
        yield None
        return
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def shared_directory(context: Context, path: str | None) -> Iterator[Finding]:
    """Whether this node sees the file of process 0 where it has its own run directory."""
    if path is None or context.config is None or context.processes == 1 or not isinstance(context.config.run_dir, Path):
        return
    mine = existing_parent(context.config.run_dir)
    until = time.monotonic() + _SEEN
    while not (mine / Path(path).name).exists():
        if time.monotonic() > until:
            text = f'{context.config.run_dir} is another directory than on the first node'
            yield failure(
                'shared directory', text, 'use a path on a disk that all nodes mount, or a bucket: run_dir=gs://...'
            )
            return
        time.sleep(0.1)
    yield Finding('shared directory', f'{context.config.run_dir} is the same on all nodes')
