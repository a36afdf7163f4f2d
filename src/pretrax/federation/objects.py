"""The objects by which islands agree, as JSON with a format number and a digest, and their keys in the bucket.

federation.json                      what all islands have in common, and the share of each
islands/NAME/lock, state.json        who runs as this island, and the round that it trains for
islands/NAME/config.yaml, configs/   its newest configuration, and all by their digests
rounds/N/NAME.json                   a contribution: what an island has learned for round N
rounds/N/NAME/ATTEMPT/PROCESS/...    its numbers
rounds/N/closed.json                 a closing: the contributions that make round N
anchors/N/...                        weights and momentum after round N
"""

import errno
import json
import math
import re
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
import xxhash

from pretrax.storage.bucket_path import Versioned
from pretrax.storage.locate import LONGEST_NAME, plain_name
from pretrax.storage.shared_path import ConditionalPath
from pretrax.system.json_file import parse_json

FORMAT = 1
ISLANDS = 'federation.islands'  # the term that says how many shares there are
TABLE = 'federation.json'
LARGEST_TABLE = 4096  # islands
_KEY = re.compile('([A-Za-z0-9_-][A-Za-z0-9._-]*/)*[A-Za-z0-9_-][A-Za-z0-9._-]*')

Count = Annotated[int, pydantic.Field(ge=0, le=1 << 60)]
Digest = Annotated[str, pydantic.Field(pattern='^[0-9a-f]{32}$')]
Text = Annotated[str, pydantic.Field(max_length=500)]
Seconds = Annotated[float, pydantic.Field(ge=0, le=1e12)]
type Term = bool | int | float | Annotated[str, pydantic.Field(max_length=4096)] | None


class ObjectError(OSError):
    """An object in the bucket is not what its key says: damaged, foreign, or of a newer format."""

    def __init__(self, path: ConditionalPath, reason: str):
        super().__init__(errno.EBADMSG, reason[:300], str(path))

    def __str__(self) -> str:
        return f'{self.filename}: {self.strerror}'


def checked_name(name: str) -> str:
    """The name of an island, which is a part of keys. Raises ValueError if it cannot be one."""
    if not name or name != plain_name(name):
        expected = f'up to {LONGEST_NAME} letters, digits, ., _ and -'
        raise ValueError(f'{name[:LONGEST_NAME]!r} cannot name an island: expected {expected}')
    if name.casefold() == 'closed' or name.casefold().endswith('.json'):
        raise ValueError(f'{name!r} cannot name an island: other objects of a round have such names')
    return name


Name = Annotated[str, pydantic.AfterValidator(checked_name)]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# A number to show; None if it is not finite.
Shown = Annotated[float | None, pydantic.BeforeValidator(_finite)]


class Stored(pydantic.BaseModel):
    """An object in the bucket. `largest`: bytes of its JSON."""

    model_config = pydantic.ConfigDict(extra='forbid', frozen=True, allow_inf_nan=False)
    largest: ClassVar[int] = 1 << 20

    format: Literal[1] = FORMAT

    def content(self) -> bytes:
        """The JSON, with its digest."""
        fields = self.model_dump(mode='json')
        return json.dumps(fields | {'xxh3': _digest(fields)}, indent=1).encode()

    @classmethod
    def parse(cls, content: bytes, path: ConditionalPath) -> Self:
        """The object in a content. Raises ObjectError if it is damaged, foreign or of a newer format."""
        try:
            fields = parse_json(content)
            if not isinstance(fields, dict):
                raise ValueError('it is not a JSON object')
            written = fields.get('format')
            if isinstance(written, int) and written > FORMAT:
                raise ValueError(f'it has format {written}; update pretrax, which reads format {FORMAT} here')
            digest = fields.pop('xxh3', None)
            parsed = cls.model_validate(fields)
            if digest != _digest(fields):
                raise ValueError('its digest does not match its content')
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = '.'.join(map(str, first['loc']))[:100]
            raise ObjectError(path, f'{key}: {first["msg"]}') from None
        except ValueError as error:
            raise ObjectError(path, str(error)) from None
        return parsed

    @classmethod
    def read(cls, path: ConditionalPath) -> Self | None:
        """The object at a path; None if there is none. Raises OSError, or ObjectError as `parse`."""
        content, _ = cls.read_version(path)
        return None if content is None else cls.parse(content, path)

    @classmethod
    def read_version(cls, path: ConditionalPath) -> Versioned:
        """The content of a path, which is not read if it is too large. Raises OSError, or ObjectError."""
        try:
            return path.read_version(cls.largest)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise ObjectError(path, error.strerror or '') from None
            raise


class Table(Stored):
    """federation.json. Attributes: `terms` are the same in all islands; `islands` {name: share}."""

    founder: Name
    terms: Annotated[dict[Annotated[str, pydantic.Field(max_length=200)], Term], pydantic.Field(max_length=200)]
    islands: Annotated[dict[Name, Count], pydantic.Field(max_length=LARGEST_TABLE)]

    @property
    def shares(self) -> int:
        """How many islands there can be."""
        shares = self.terms.get(ISLANDS)
        return shares if isinstance(shares, int) else 0

    @pydantic.model_validator(mode='after')
    def _check(self) -> Self:
        taken = set(self.islands.values())
        if len(taken) < len(self.islands) or not taken <= set(range(min(self.shares, LARGEST_TABLE))):
            raise ValueError(f'the shares {sorted(taken)[:20]} of {len(self.islands)} islands, of {self.shares}')
        return self


class Taken(pydantic.BaseModel):
    """What an island found when it took a round, to be shown.

    Attributes:
        norm: of the mean difference.
        val_loss: of the weights after the round, if they were evaluated.
        seconds, bytes: from the island's contribution until it had taken the round; read.
    """

    model_config = pydantic.ConfigDict(extra='forbid', frozen=True)

    round: Count
    norm: Shown = None
    val_loss: Shown = None
    seconds: Seconds = 0.0
    bytes: Count = 0


class State(Stored):
    """islands/NAME/state.json. Attributes: the round that the island trains for; what it does; the newest it took."""

    round: Annotated[int, pydantic.Field(ge=1, le=1 << 40)]
    state: Literal['training', 'stopped', 'finished']
    took: Taken | None = None


class Piece(pydantic.BaseModel):
    """Numbers of a difference. Attributes: key below the place of the federation; bytes; XXH3 digest (128 bits)."""

    model_config = pydantic.ConfigDict(extra='forbid', frozen=True)

    object: Annotated[str, pydantic.Field(max_length=400, pattern=r'^(rounds|anchors)(/[\w-][\w.-]*)+$')]
    size: Count
    xxh3: Digest


class Event(pydantic.BaseModel):
    """A change of an island since its last contribution, and the step and the batch after it.

    Attributes:
        kind: 'took' a round later than usual, and kept what it had learned meanwhile; 'entered': replaced its weights
            by those after a round; 'rolled back' to an earlier state; 'changed' its configuration or its devices.
        own: the step of its own state before, whose inner optimizer goes on; 0: a new one, also after a loss.
        waited: the round that it had contributed to, and entered another one instead; 0: none.
    """

    model_config = pydantic.ConfigDict(extra='forbid', frozen=True)

    kind: Literal['took', 'entered', 'rolled back', 'changed']
    round: Count
    step: Count
    batch: Count
    own: Count
    waited: Count = 0


class Contribution(Stored):
    """rounds/N/NAME.json: an island has a difference for a round.

    Attributes:
        round, name, attempt: `attempt` is the token of the lease under which it was written.
        base: the round that the difference begins at, `round - 1`.
        step: of the island, after its last step for this round.
        first_batch, last_batch: half-open range of the batches of the share that the island has trained.
        tokens: trained in this round; the weight of the difference.
        anchor: digest of the weights after round `base`, which does not depend on the mesh.
        encoding: of the numbers.
        pieces: the numbers, per process; none of a process whose numbers are not finite.
        norm, loss: of the difference; mean over the steps; None if not finite.
        seconds, bytes: of training since round `base`, and sent.
        time: when it was made, in seconds since 1970 by the clock of the island; only shown.
        events: since the island's last contribution.
        took: the newest round that the island took before.
        devices, device: how many the island has, and their kind.
        config: digest of its configuration, which is islands/NAME/configs/DIGEST.yaml.
    """

    largest: ClassVar[int] = 64 << 20

    round: Annotated[int, pydantic.Field(ge=1, le=1 << 40)]
    name: Name
    attempt: Annotated[str, pydantic.Field(pattern='^[A-Za-z0-9_-]{1,64}$')]
    base: Count
    step: Count
    first_batch: Count
    last_batch: Count
    tokens: Annotated[int, pydantic.Field(ge=1, le=1 << 60)]
    anchor: Digest
    encoding: Annotated[str, pydantic.Field(max_length=20)]
    pieces: Annotated[
        dict[
            Annotated[str, pydantic.Field(pattern=r'^\d{1,6}$')],
            Annotated[list[Piece], pydantic.Field(max_length=65536)],
        ],
        pydantic.Field(max_length=65536),
    ]
    norm: Shown = None
    loss: Shown = None
    seconds: Seconds = 0.0
    bytes: Count = 0
    time: Seconds = 0.0
    events: Annotated[list[Event], pydantic.Field(max_length=10_000)] = []
    took: Taken | None = None
    devices: Annotated[int, pydantic.Field(ge=1, le=1 << 30)] = 1
    device: Annotated[str, pydantic.Field(max_length=100)] = ''
    config: Digest | None = None

    @pydantic.model_validator(mode='after')
    def _check(self) -> Self:
        own = f'rounds/{self.round}/{self.name}/'
        for piece in self.all_pieces():
            if not piece.object.startswith(own) or not _KEY.fullmatch(piece.object):
                raise ValueError(f'the piece {piece.object[:80]!r} is not below {own}')
        if self.base != self.round - 1 or self.first_batch > self.last_batch:
            raise ValueError(f'base {self.base}, batches {self.first_batch} to {self.last_batch}')
        return self

    @property
    def is_finite(self) -> bool:
        """Whether all processes of the island had finite numbers, and so have written them."""
        return all(self.pieces.values())

    def all_pieces(self) -> list[Piece]:
        """The pieces of all processes, in the order of the processes."""
        return [piece for process in sorted(self.pieces, key=int) for piece in self.pieces[process]]

    def learned(self) -> str:
        """Digest of what the island has learned: equal if an island that was killed computes the same again."""
        pieces = {process: [(piece.size, piece.xxh3) for piece in pieces] for process, pieces in self.pieces.items()}
        numbers = [self.round, self.base, self.step, self.first_batch, self.last_batch, self.tokens]
        return _digest([*numbers, self.name, self.anchor, self.encoding, pieces])


class Member(pydantic.BaseModel):
    """A contribution in a round. Attributes: its share, the digest of its object, `learned()`, tokens and step."""

    model_config = pydantic.ConfigDict(extra='forbid', frozen=True)

    share: Count
    xxh3: Digest
    learned: Digest
    tokens: Count
    step: Count


class Closing(Stored):
    """rounds/N/closed.json: which contributions make a round. It is written once.

    Attributes:
        by: the island that closed it.
        members: {name: contribution}. None: weights and momentum stay as they are.
        rejected: {name: reason} of contributions that are damaged or not finite.
        left_out: islands that were waited for in vain.
        tokens: of the members.
        step: the largest of the members, or of the closing before it.
    """

    largest: ClassVar[int] = 16 << 20

    round: Annotated[int, pydantic.Field(ge=1, le=1 << 40)]
    by: Name
    members: Annotated[dict[Name, Member], pydantic.Field(max_length=LARGEST_TABLE)]
    rejected: Annotated[dict[Name, Text], pydantic.Field(max_length=LARGEST_TABLE)] = {}
    left_out: Annotated[list[Name], pydantic.Field(max_length=LARGEST_TABLE)] = []
    tokens: Count
    step: Count

    def is_after(self, step: int) -> bool:
        """Whether all members had taken a step."""
        return self.step >= step and all(member.step >= step for member in self.members.values())

    def in_order(self) -> list[str]:
        """The names of the members, in the order of their shares."""
        return sorted(self.members, key=lambda name: self.members[name].share)

    def lists(self, contribution: Contribution) -> bool:
        """Whether the round has what this island has learned; if not, the island drops it."""
        member = self.members.get(contribution.name)
        return member is not None and member.learned == contribution.learned()


def table_path(place: ConditionalPath) -> ConditionalPath:
    return place / TABLE


def island_path(place: ConditionalPath, name: str) -> ConditionalPath:
    """The prefix of `lock` and `state.json`."""
    return place / 'islands' / name


def config_path(place: ConditionalPath, name: str, digest: str | None = None) -> ConditionalPath:
    """A configuration of an island; None: the newest one."""
    path = island_path(place, name)
    return path / 'config.yaml' if digest is None else path / 'configs' / f'{digest}.yaml'


def round_path(place: ConditionalPath, number: int) -> ConditionalPath:
    return place / 'rounds' / str(number)


def contribution_path(place: ConditionalPath, number: int, name: str) -> ConditionalPath:
    return round_path(place, number) / f'{name}.json'


def closing_path(place: ConditionalPath, number: int) -> ConditionalPath:
    return round_path(place, number) / 'closed.json'


def anchor_path(place: ConditionalPath, number: int) -> ConditionalPath:
    """The prefix of the weights and the momentum after a round."""
    return place / 'anchors' / str(number)


def read_closing(place: ConditionalPath, number: int) -> Closing | None:
    """The closing of a round; None if it is open. Raises OSError, or ObjectError if it is damaged or foreign."""
    path = closing_path(place, number)
    closing = Closing.read(path)
    if closing is not None and closing.round != number:
        raise ObjectError(path, f'it closes round {closing.round}')
    return closing


def read_contribution(place: ConditionalPath, number: int, name: str) -> tuple[Contribution, str] | None:
    """The contribution of an island, with the digest of its object. None and errors as for `read_closing`."""
    path = contribution_path(place, number, name)
    content, _ = Contribution.read_version(path)
    if content is None:
        return None
    contribution = Contribution.parse(content, path)
    if (contribution.round, contribution.name) != (number, name):
        raise ObjectError(path, f'it says round {contribution.round} of island {contribution.name}')
    return contribution, xxhash.xxh3_128_hexdigest(content)


def _digest(fields: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, separators=(',', ':')).encode())
