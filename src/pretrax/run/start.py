"""The state that training starts from: restored from the newest checkpoint, warm from other weights, or fresh."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pretrax.checkpoint import PiecedState, restore_newest
from pretrax.config import feature
from pretrax.errors import Report
from pretrax.federation.island_state import IslandState, like_island, split_state, stored_state
from pretrax.run.resume import check_same_data
from pretrax.run.setup import Run
from pretrax.storage import AnyPath
from pretrax.storage.locate import working_directory
from pretrax.system.line_files import parse_lines
from pretrax.train.state import at_owners, by_weight, init_state
from pretrax.train.step import TrainState

if TYPE_CHECKING:
    from pretrax.federation.island import Island

_TAIL = 1 << 16  # bytes of metrics


@dataclasses.dataclass(frozen=True)
class Start:
    """A state to train from, and the checkpoint that it was restored from."""

    state: TrainState
    step: int = 0  # of the checkpoint; 0: none
    description: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the checkpoint; {}: none
    island: IslandState | None = None  # of a federation, from the checkpoint; None: there is none


def restore_or_start(
    run: Run, checkpoints: AnyPath, memory: Sequence[PiecedState], allow_changes: bool, report: Report
) -> Start:
    """Restores the newest readable checkpoint of a run, or starts it. The mesh of the run must be set.

    Args:
        memory: the states in memory.

    Raises:
        UserError: checkpoints exist, but none is readable; the data has changed; or `init_from`, the teacher or
            `distill.cache` does not fit the run.
    """

    def check(description: dict[str, Any]) -> None:
        check_same_data(run.run_dir, description, run.source.fingerprint, allow_changes)
        if run.teaching and not allow_changes:
            run.teaching.check_same(description, run.run_dir)

    constants = run.teaching.begin(run, report) if run.teaching else None
    start = restore(run, checkpoints, report, check, memory=memory)
    if start is None:
        return Start(initial_state(run, report)._replace(constants=constants))
    where = start.description.get('where') or f'checkpoint {checkpoints / str(start.step)}'
    report(f'resuming from step {start.step}, {where}{_lost(run, start.step)}')
    return dataclasses.replace(start, state=start.state._replace(constants=constants))


def restore(run: Run, checkpoints: AnyPath, report: Report, *check: Any, **how: Any) -> Start | None:
    """Restores the newest readable state of a run, without the constants of its loss.

    Returns None if there is none. The other arguments and errors are those of `restore_newest`.
    """
    like = run.like._replace(constants=None)

    def stored(description: dict[str, Any]) -> Any:
        return stored_state(by_weight(like), like_island(run.like.weights, run.federation, description))

    restored = restore_newest(checkpoints, stored, report, *check, **how)
    if restored is None:
        return None
    step, state, description = restored
    state, island = split_state(state)
    return Start(at_owners(state, like), step, description, island)


def entered(island: 'Island | None', start: Start, again: bool = False) -> Start:
    """The start as the federation lets the island go on. `again`: after a rollback."""
    if island is None:
        return start
    begin = island.roll_back if again else island.begin
    return dataclasses.replace(start, state=begin(start.state, start.island, start.description), island=None)


def _lost(run: Run, step: int) -> str:
    """How many steps after this one were trained before, as far as `metrics.jsonl` tells; '': none."""
    path = working_directory(run.run_dir) / 'metrics.jsonl'
    if not path.is_file():
        return ''
    with path.open('rb') as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        records = parse_lines(file.read().rpartition(b'\n')[0])
    steps = [record['step'] for record in records if isinstance(record, dict) and type(record.get('step')) is int]
    lost = max(steps, default=step) - step
    return f'; {lost} later step{"s are" if lost > 1 else " is"} lost' if lost > 0 else ''


def initial_state(run: Run, report: Report) -> TrainState:
    """The state of a run before its first step, without the constants of its loss."""
    if run.init_from:
        return feature('init_from')(run.init_from, run, report)
    return init_state(run.recipe, run.recipe.seed)
