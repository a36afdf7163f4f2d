"""An island of a federation: a run that trains alone between rounds, and averages with the others in each of them.

After `federation.every / fragments` steps it contributes what it has learned, waits or trains on for `delay` steps, and
takes the average. All processes of the island call every method at the same step.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pretrax.amounts import size
from pretrax.checkpoint.agreement import decide
from pretrax.checkpoint.manifest import named_leaves
from pretrax.config.schema import Federation
from pretrax.errors import Report, UnavailableError, UserError, first_line
from pretrax.federation import anchors
from pretrax.federation.anchors import Newest
from pretrax.federation.cleaning import Cleaner
from pretrax.federation.course import Course
from pretrax.federation.differences import DamagedPiecesError
from pretrax.federation.encoding import keeps_residual
from pretrax.federation.exchange import Average, Exchange
from pretrax.federation.fragments import Fragment
from pretrax.federation.host_weights import HostWeights, mapped, select, to_devices, to_host, zeros_like
from pretrax.federation.island_state import FIELD, IslandState, Position, Sent, arrays_of, in_host_memory
from pretrax.federation.link import Author, Link, StoppedError
from pretrax.federation.objects import Taken
from pretrax.federation.outer import mix
from pretrax.storage.shared_path import ConditionalPath
from pretrax.train.step import TrainState

_LOOK = 0.05  # seconds between two looks at a round that an island waits for
_LOOK_TOGETHER = 0.5  # if several processes have to agree
_OFTEN = 20  # steps between two looks at a round of a bucket that was out of reach


class Island:
    """This run in its federation.

    Args:
        fragments: of the weights.
        steps: of the run.
        weights: shapes and shardings of the weights.
        course: what this process has to repeat; None outside of a replay.

    Attributes:
        metrics: lines about rounds that are not written yet.
    """

    def __init__(
        self,
        place: ConditionalPath,
        section: Federation,
        author: Author,
        fragments: list[Fragment],
        steps: int,
        weights: Any,
        report: Report,
        course: Course | None = None,
    ):
        self._course, devices = course, f'{jax.device_count()} {jax.devices()[0].device_kind}'
        self._setup = f'{author.config} {devices} {jax.process_count()}'
        self.position, self.metrics = Position(), list[dict[str, Any]]()
        self._place, self._section, self._author, self._report = place, section, author, report
        self._fragments, self._steps, self._like = fragments, steps, weights
        self._state = IslandState({}, {})
        self._exchange: Exchange | None = None
        self._is_late = False  # whether the island went on without the round
        self._averaged_at = -1  # the step at which all weights are the average
        self._writer: Link | None = None  # of an anchor, in the background
        self._writing = threading.Thread()
        self._cleaner: Cleaner | None = None
        if author.rounds is not None and author.rounds.may_delete:
            self._cleaner = Cleaner(place, author.name, author.rounds, section.keep, report)

    # The state

    def arrays(self) -> IslandState:
        """The arrays that checkpoints have besides the state of the training."""
        return arrays_of(self._state, self._like)

    def description(self) -> dict[str, Any]:
        """The part of a checkpoint's description that `begin` needs."""
        return {FIELD: dataclasses.asdict(dataclasses.replace(self.position, setup=self._setup))}

    def evaluated(self, number: int, val_loss: float | None) -> None:
        """Keeps the loss of the weights of the newest round, to be shown to the other islands."""
        if number == self._averaged_at and self.position.took is not None:
            self.position.took |= {'val_loss': val_loss}

    def averaged(self, number: int, state: TrainState) -> TrainState:
        """The state after a step with the global weights of the newest round instead of the island's own."""
        if number == self._averaged_at:
            return state
        return state._replace(weights=to_devices(self._state.anchor, self._like))

    def begin(self, state: TrainState, stored: IslandState | None, description: dict[str, Any]) -> TrainState:
        """The state to train from: as restored, or that of the newest round if the island is new, or was left out.

        Args:
            stored: what the checkpoint has of the island; None: there is no checkpoint.

        Raises:
            UserError: the federation is another one than that of the checkpoint. UnavailableError: the island is new,
                and no weights can be read.
        """
        if self._course is not None and self._course.batch is not None:
            state = state._replace(batch=jax.device_put(np.int32(self._course.batch), state.batch.sharding))
            return self._begin(state, stored, description, is_rollback=True)
        return self._begin(state, stored, description)

    def _begin(
        self, state: TrainState, stored: IslandState | None, description: dict[str, Any], is_rollback: bool = False
    ) -> TrainState:
        link, position = self._link('federation'), Position.described(description)
        counts = {'tokens': description.get('tokens', 0), 'seconds': description.get('productive_seconds', 0.0)}
        self.position = position = Position(round=0) if stored is None or position is None else position
        kinds = {'rolled back': is_rollback, 'changed': position.setup not in ('', self._setup)}
        position.events += [
            _event(kind, position.round, state, int(state.step)) for kind, is_so in kinds.items() if is_so
        ]
        if stored is None or position.round == 0:
            return self._enter(link, state, counts)
        self._state = in_host_memory(stored)
        link.from_process_0(lambda: self._check_taken(link))
        if position.sent is None and link.from_process_0(lambda: link.rounds.is_left_out(position.round)):
            try:
                return self._take_newest(self._newest(link), state, counts)
            except DamagedPiecesError as error:
                self._report(f'WARNING: federation: {first_line(error)}. Training continues with the own weights')
        self._announce(link, int(state.step))
        if position.sent is not None:
            self._start()  # its thread agrees on the topic that this one has used until now
        return state

    def roll_back(self, state: TrainState, stored: IslandState | None, description: dict[str, Any]) -> TrainState:
        """As `begin`, after the run has returned to an earlier state. The island contributes to its round again."""
        if self._exchange is not None:
            self._exchange.stop()
            self._exchange = None
        attempt, _, rollbacks = self._author.attempt.partition('-')
        self._author = self._author._replace(attempt=f'{attempt}-{int(rollbacks or 0) + 1}')  # writes beside the old
        return self._begin(state, stored, description, is_rollback=True)

    # Rounds

    def is_due(self, number: int) -> bool:
        """Whether there is something to do after a step."""
        position, sent = self.position, self.position.sent
        if sent is None:
            is_end = number == self._steps and position.at_end < len(self._fragments)
            return is_end or number - position.step >= self._section.rounds_apart
        if number == self._steps:
            return True
        if self._course is not None:
            return number >= self._course.late.get(position.round, sent.step + self._section.delay)
        return number % _OFTEN == 0 if self._is_late else number >= sent.step + self._section.delay

    def take_part(
        self, number: int, state: TrainState, counts: dict[str, Any], asked: Callable[[TrainState], bool]
    ) -> TrainState:
        """Contributes and takes rounds, as far as they are due after a step. Returns the state to train on from.

        Args:
            counts: `tokens` and `seconds` of all steps so far, and the `loss` of the newest one.
            asked: whether to stop waiting, given the state so far; the same answer in all processes.
        """
        while self.is_due(number):
            if self.position.sent is None:
                self._send(number, state, counts)
            if not self.is_due(number):
                return state
            if not self._wait(number, lambda state=state: asked(state)):
                return state
            state = self._take(number, state, counts)
            number = int(state.step)
        return state

    def finish(self, is_done: bool) -> None:
        """Says that the island has ended. Raises UnavailableError if its last round could not be taken."""
        if self._exchange is not None:
            problem = self._exchange.problem
            self._exchange.stop()
            if is_done:
                raise UnavailableError(
                    f'round {self.position.round} of the federation is not taken: {problem or "it is open"}\n'
                    'the state is saved; run the same command again, or see "Damaged objects" in docs/federation.md'
                )
        with contextlib.suppress(OSError):  # others wait for it until their patience ends
            self._say('finished' if is_done else 'stopped')
        self._finish_anchor(self._section.patience)
        if self._cleaner is not None:
            self._cleaner.finish()

    def _finish_anchor(self, seconds: float | None = None) -> None:
        """Waits until the anchor is written, before the state changes. `seconds`: after which it is given up."""
        if self._writer is not None:
            self._writing.join(seconds)
            self._writer.stopped.set()
            self._writing.join()
            self._writer = None

    def _send(self, number: int, state: TrainState, counts: dict[str, Any]) -> None:
        """Starts to contribute the weights after a step."""
        self._state = self._state._replace(sent=to_host(state.weights))
        events = len(self.position.events)
        self.position.sent = Sent(number, int(state.batch), counts['tokens'], counts['loss'], counts['seconds'], events)
        self._start()

    def _start(self) -> None:
        position, sent = self.position, self.position.sent
        assert sent is not None
        facts = {
            'round': position.round,
            'step': sent.step,
            'first_batch': position.batch,
            'last_batch': sent.batch,
            'tokens': max(1, sent.tokens - position.tokens),  # none in further rounds after the last step
            'seconds': max(0.0, sent.seconds - position.seconds),
            'loss': sent.loss,
            'time': time.time(),
            'events': position.events[: sent.events],
            'took': position.took and Taken.model_validate(position.took),
            'devices': jax.device_count(),
            'device': jax.devices()[0].device_kind,
            'config': self._author.config,
        }
        fragment = self._fragments[(position.round - 1) % len(self._fragments)]
        self._exchange = Exchange(self._link('federation'), facts, fragment, self._state, self._newest)

    def _wait(self, number: int, asked: Callable[[], bool]) -> bool:
        """Waits until the round is closed; in all processes. Returns whether it is.

        After the last step, it waits as long for a bucket that is out of reach as for islands that are late.
        """
        exchange = self._exchange
        assert exchange is not None
        is_end, began = number == self._steps, time.monotonic()
        while True:
            look = _LOOK if jax.process_count() == 1 else _LOOK_TOGETHER
            exchange.wait(0 if self._is_late and not is_end else look)
            is_patient = self._course is not None or (is_end and time.monotonic() - began < self._section.patience)
            problem = exchange.problem if exchange.is_out_of_reach and not is_patient else ''
            are_done, problem = decide('island', [exchange.is_done, problem], _are_done)
            if are_done or (self._is_late and not is_end) or asked():
                return are_done
            if problem:
                if not self._is_late:
                    self._report(
                        f'WARNING: federation: round {self.position.round}: {problem}. Training continues with the own '
                        'weights, and takes this round or a later one when it can'
                    )
                self._is_late = True
                return False

    def _take(self, number: int, state: TrainState, counts: dict[str, Any]) -> TrainState:
        """Takes the round that is closed."""
        exchange, self._exchange, sent = self._exchange, None, self.position.sent
        assert exchange is not None
        assert sent is not None
        taken = exchange.result()
        self._is_late, is_told = False, self._is_late
        if isinstance(taken, Newest):
            self._report(
                f'WARNING: federation: round {self.position.round} {taken.why}: the island continues with the weights '
                f'of round {taken.round}, and drops what it has learned since round {self.position.round - 1}'
            )
            return self._take_newest(taken, state, counts)
        if is_told:
            self._report(f'round {taken.round} of the federation is reached again at step {number}')
        was_late = number > sent.step + self._section.delay
        fragment = self._fragments[(taken.round - 1) % len(self._fragments)]
        weights = self._mixed(taken, fragment, state.weights, number, was_late)
        self._finish_anchor()
        for whole, part in zip(self._state[:3], (taken.weights, taken.momentum, taken.residual), strict=True):
            if part is not None:
                _assign(select(whole, fragment), part)
        self._state = self._state._replace(sent=None)
        events = [*self.position.events[sent.events :], *([_event('took', taken.round, state, number)] * was_late)]
        found = taken.metrics
        took = {'round': taken.round, 'norm': found['outer_norm'], 'bytes': found['bytes_down']}
        took |= {'seconds': found['seconds_up'] + found['seconds_wait'] + found['seconds_down']}
        self.position = Position(
            round=taken.round + 1,
            step=number if was_late else sent.step,
            batch=sent.batch,
            tokens=sent.tokens,
            seconds=sent.seconds,
            at_end=self.position.at_end + 1 if taken.closing.is_after(self._steps) else 0,
            events=events,
            took=took,
        )
        self._after(taken, number)
        self._report(
            f'round {taken.round}: islands {found["members"]}, tokens {found["tokens"]:,}; '
            f'{size(found["bytes_up"])} up, {size(found["bytes_down"])} down; waited {found["seconds_wait"]:.3g} s'
        )
        if self._has_closed(taken) and taken.round % self._section.keep == 0:
            self._write_anchor(taken.round)
        return state._replace(weights=weights)

    def _mixed(self, taken: Average, fragment: Fragment, weights: Any, number: int, was_late: bool) -> Any:
        """The weights of the island after a round: of a fragment the average, or a mixture with its own.

        Stacked layers are copied to the host and back whole, not only those of the fragment: `sent` is a copy of all
        weights in any case, and replacing rows on devices would need a program for each sharding and kind of memory.
        """
        leaves = dict(named_leaves(weights))
        whole = to_host({name: leaves[name] for name in fragment})
        own, sent, theta = select(whole, fragment), select(self._state.sent, fragment), taken.weights
        assert self.position.sent is not None
        is_now = number == self.position.sent.step
        if is_now:
            values = theta
        elif was_late:
            values = mapped(lambda w, theta, sent: theta + (w - sent), own, theta, sent)
        else:
            values = mapped(lambda w, theta: mix(w, theta, self._section.kept_share) or w, own, theta)
        _assign(own, values)
        placed = to_devices(whole, {name: leaves[name] for name in fragment})
        self._averaged_at = number if is_now and len(self._fragments) == 1 else -1
        return jax.tree.unflatten(
            jax.tree.structure(weights), [placed.get(name, leaf) for name, leaf in leaves.items()]
        )

    def _take_newest(self, taken: Newest, state: TrainState, counts: dict[str, Any]) -> TrainState:
        """Takes all weights of a round. What the island has learned since its last contribution is dropped."""
        own, waited = int(state.step), self.position.round if self.position.sent is not None else 0
        step, batch = max(own, taken.step), max(int(state.batch), taken.step, taken.batch)
        placed = {
            key: jax.device_put(np.int32(n), getattr(state, key).sharding)
            for key, n in {'step': step, 'batch': batch}.items()
        }
        state = state._replace(weights=to_devices(taken.weights, self._like), **placed)
        self._finish_anchor()
        residual = zeros_like(taken.weights) if keeps_residual(self._section.encoding) else None
        self._state = IslandState(taken.weights, taken.momentum, self._state.residual or residual)
        self.position = Position(
            round=taken.round + 1,
            step=step,
            batch=batch,
            tokens=counts['tokens'],
            seconds=counts['seconds'],
            at_end=taken.at_end,
            events=[
                *self.position.events,
                *([_event('entered', taken.round, state, own, waited)] if taken.round or batch else []),
            ],
        )
        self._averaged_at = step
        self._after(taken, step)
        return state

    def _after(self, taken: Average | Newest, step: int) -> None:
        if taken.metrics:
            self.metrics.append({'step': step} | {f'round/{key}': value for key, value in taken.metrics.items()})
        self._announce(self._link('federation'), step)
        if self._cleaner is not None:
            self._cleaner.start(taken.round, isinstance(taken, Average) and self._has_closed(taken))

    def _has_closed(self, taken: Average) -> bool:
        return taken.closing.by == self._author.name

    def _write_anchor(self, number: int) -> None:
        """Writes the weights after a round, for islands that come later; in the background."""
        link, weights, momentum = self._link('anchor'), self._state.anchor, self._state.momentum

        def write() -> None:
            with contextlib.suppress(StoppedError):
                anchors.write(link, number, weights, momentum)

        self._writer, self._writing = link, threading.Thread(target=write, name='anchor', daemon=True)
        self._writing.start()

    # Coming in

    def _enter(self, link: Link, state: TrainState, counts: dict[str, Any]) -> TrainState:
        """Enters the federation without a state of its own. Raises UnavailableError if no weights can be read."""
        weights = to_host(state.weights)
        anchors.write_first(link, weights)
        self._state = IslandState(weights, zeros_like(weights))
        try:
            taken = self._newest(link)
        except DamagedPiecesError as error:
            raise UnavailableError(f'no weights of the federation can be read: {error}\nrestore this object') from error
        state = self._take_newest(taken, state, counts)
        return state._replace(ema=None if state.ema is None else to_devices(self._state.anchor, state.ema))

    def _check_taken(self, link: Link) -> None:
        """Raises UserError if the newest round that the island has taken is not in the bucket."""
        number = self.position.round - 1
        if number and not link.rounds.is_closed(number):
            raise UserError(
                f'federation.bucket {self._place}: it has no round {number}, which this run has taken, so it is '
                'another federation\nuse the bucket in which the run has begun, or begin another run with init_from'
            )

    def _newest(self, link: Link, only_anchors: bool = False) -> Newest:
        """As `anchors.newest`, after the newest round that the island has taken."""
        known = self.position.round - 1  # -1: none, and its weights are not those of a round
        return anchors.newest(link, self._fragments, self._steps, known, self._state, only_anchors)

    def _announce(self, link: Link, step: int) -> None:
        is_done = step >= self._steps and self.position.sent is None and self.position.at_end >= len(self._fragments)

        def announce() -> None:
            with contextlib.suppress(OSError):  # others then wait for it until their patience ends
                self._say('finished' if is_done else 'training')

        link.from_process_0(announce)

    def _say(self, state: str) -> None:
        if self._author.rounds is not None:
            took = self.position.took
            took = None if took is None else Taken.model_validate(took)
            self._author.rounds.announce(self.position.round, state, took)

    def _link(self, topic: str) -> Link:
        return Link(self._place, self._section, topic, self._author, self._report)


def _event(kind: str, number: int, state: TrainState, own: int, waited: int = 0) -> dict[str, Any]:
    """A `federation.objects.Event` that leads to a state."""
    facts = {'kind': kind, 'round': number, 'step': int(state.step), 'batch': int(state.batch)}
    return facts | {'own': own, 'waited': waited}


def _are_done(processes: list[tuple[bool, str]]) -> tuple[bool, str]:
    """Whether the exchange of each process is done, and the first problem."""
    return all(is_done for is_done, _ in processes), next((problem for _, problem in processes if problem), '')


def _assign(target: HostWeights, values: HostWeights) -> None:
    """Writes values into the parts of other weights."""

    def write(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        old[...] = new
        return old

    mapped(write, target, values)
