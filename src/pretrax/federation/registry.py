"""Islands join a federation: the first one makes it, and each has a share of the data for as long as it exists."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping

from pretrax.errors import Report, UnavailableError, UserError
from pretrax.federation.objects import ObjectError, Table, Term, checked_name, island_path, table_path
from pretrax.storage.connection import kind_of_error
from pretrax.storage.lease import FILE, HeldError, Lease
from pretrax.storage.locate import AnyPath
from pretrax.storage.shared_path import ConditionalPath, shared

_MOST_NAMED = 5  # terms that differ


@dataclasses.dataclass(frozen=True)
class Membership:
    """This process group is an island of a federation.

    Attributes:
        name, share, shares: the island has the rows k * shares + share of the global order.
        attempt: another one for each process group that runs as this island.
        is_founder: whether the island has made the federation.
    """

    place: ConditionalPath
    name: str
    share: int
    shares: int
    is_founder: bool
    lease: Lease

    @property
    def attempt(self) -> str:
        return self.lease.token


@contextlib.contextmanager
def join(
    place: ConditionalPath, name: str, terms: Mapping[str, Term], lease_seconds: float, report: Report
) -> Iterator[Membership]:
    """Makes this process group an island until the end of the block. Process 0 of an island calls it.

    Args:
        place: of the federation.
        terms: what all islands must have in common, by the names that a user knows; `ISLANDS` among them.
        lease_seconds: after which another process may run as this island, if this one says nothing.

    Raises:
        UserError: the island does not fit, all shares are taken, another process is this island, or the bucket cannot
            be reached.
    """
    try:
        checked_name(name)
    except ValueError as error:
        raise UserError(f'federation.name: {error}') from None
    with _user_errors(place), contextlib.ExitStack() as stack:
        registered(place, name, terms)  # a run that does not fit waits for nobody
        lease = stack.enter_context(Lease(island_path(place, name) / FILE, lease_seconds, report).held())
        table = registered(place, name, terms)
        membership = Membership(place, name, table.islands[name], table.shares, table.founder == name, lease)
        stack = stack.pop_all()
    with stack:
        yield membership


def registered(place: ConditionalPath, name: str, terms: Mapping[str, Term]) -> Table:
    """The table of the federation, with a share for this island.

    An island keeps its share for ever. What is asked again, because an answer was lost, changes nothing.

    Raises:
        UserError: the terms differ, all shares are taken, or the name or the place can be taken for another one.
        OSError: the table cannot be read or written.
    """
    path = table_path(place)
    while True:
        content, version = Table.read_version(path)
        if content is None:
            _check_outside(place)
            table = Table(founder=name, terms=dict(terms), islands={name: 0})
            path.write_version(table.content(), version)
            continue
        table = Table.parse(content, path)
        _check_terms(place, table, terms)
        if name in table.islands:
            return table
        if (twin := next((one for one in table.islands if one.casefold() == name.casefold()), None)) is not None:
            raise UserError(
                f'federation.name: {name} differs only by case from island {twin}, and some file systems see no '
                f'difference\nuse {twin} to continue that island, or another name'
            )
        free = sorted(set(range(table.shares)) - set(table.islands.values()))
        if not free:
            raise _full(place, table, name)
        table = table.model_copy(update={'islands': table.islands | {name: free[0]}})
        path.write_version(table.content(), version)


def read_table(place: ConditionalPath) -> Table:
    """The table of a federation. Raises OSError, or UserError if there is none."""
    path = table_path(place)
    try:
        table = Table.read(path)
    except ObjectError as error:
        raise UserError(f'the table of the federation cannot be read\n{error}') from error
    if table is None:
        raise UserError(f'{place} is not a federation: it has no {path.name}\nname the value of federation.bucket')
    return table


def is_federation(path: AnyPath) -> bool:
    """Whether a directory has the table of a federation, also a damaged one or of another format. Raises OSError."""
    content = table_path(shared(path)).read_version().content or b''
    return b'"founder"' in content and b'"islands"' in content


def _check_outside(place: ConditionalPath) -> None:
    """Raises UserError if a new federation would lie inside another one, whose keys may be the same."""
    below, above = place, place.parent
    while above != below:
        with contextlib.suppress(PermissionError):  # who may write here need not see what is above
            if is_federation(above):
                fix = f'use {above} to join it, or a bucket or a directory outside it for another one'
                raise UserError(f'federation.bucket: {place} is inside the federation {above}\n{fix}')
        below, above = above, above.parent


def _check_terms(place: ConditionalPath, table: Table, terms: Mapping[str, Term]) -> None:
    names = [name for name in {**table.terms, **terms} if table.terms.get(name) != terms.get(name)]
    if names:
        lines = [
            f'{name}: {_shown(terms.get(name))} here, {_shown(table.terms.get(name))} in the federation'
            for name in names[:_MOST_NAMED]
        ]
        if len(names) > _MOST_NAMED:
            lines.append(f'and {len(names) - _MOST_NAMED} more')
        title = f'this run does not fit the federation {place}, which island {table.founder} has made'
        fix = 'use the same values, or another name and another federation.bucket for another federation'
        raise UserError('\n'.join([title, *lines, fix]))


def _full(place: ConditionalPath, table: Table, name: str) -> UserError:
    names = ', '.join(sorted(table.islands))
    return UserError(
        f'all {len(table.islands)} shares of the federation {place} are taken; there is none for island {name}\n'
        f'the islands are {names[:400]}\n'
        'to continue one of them that has ended, use its name as federation.name'
    )


def _shown(value: Term) -> str:
    return json.dumps(value)[:100]


@contextlib.contextmanager
def _user_errors(place: ConditionalPath) -> Iterator[None]:
    try:
        yield
    except HeldError as error:
        raise UserError(
            f'federation.name: {error}\nuse another federation.name, or wait until that process has ended'
        ) from error
    except ObjectError as error:
        raise UserError(f'the federation cannot be joined\n{error}\nuse another federation.bucket') from error
    except OSError as error:
        kind = kind_of_error(error)
        fix = 'run the same command again' if kind is UnavailableError else 'name a bucket or directory to write to'
        raise kind(f'federation.bucket {place}: {error.strerror}\n{fix}') from error
