"""Starts the processes of a run, ends them together when one is lost, and starts them again from the newest checkpoint.

The same rules hold for processes of this machine, over ssh, in a Slurm allocation and on a Ray cluster: what starts the
processes is given as a function.
"""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from pretrax.config import RunConfig
from pretrax.errors import CONFIGURATION, DONE, MISTAKE, TRY_AGAIN, Report, system_errors
from pretrax.launch.crash import Crash, StackFiles, attempt_label, write_crash_report
from pretrax.launch.elastic import Slots
from pretrax.launch.group import Group
from pretrax.launch.host_memory import HostMemory
from pretrax.launch.restarts import Outcome, RestartOptions, Restarts, newest_checkpoint, outcome
from pretrax.observe.attempts import attempts_of, note, quarantined, read_attempts
from pretrax.observe.notices import LaunchNotices
from pretrax.storage import BucketPath
from pretrax.storage.lease import FILE, HeldError, Lease, LostError
from pretrax.storage.locate import working_directory
from pretrax.storage.mirror import Mirror
from pretrax.system.children import PASSED_ON, STOP, handling

_LOOK = 0.05  # seconds between two checks of the processes
_AFTER_KILL = 0.1  # seconds in which others that were killed at the same time may be seen
_AFTER_FAILURE = 0.3  # seconds in which others may end too, so that the cause is among them
_AFTER_END = 5.0  # seconds for the others after an orderly end: they save the same step
_SAME_REQUEST = 1.0  # seconds in which a second request to stop is the first one again
_GROWS = 'trying all processes again'
_MOST_REPORTS = 8  # crash reports per attempt

type Start = Callable[[Sequence[int], str], Group]


class Supervisor:
    """A run whose processes are started again when one is lost.

    Args:
        start: starts a process in each of these slots, and returns them in this order. The second argument is the label
            of the attempt, for crash reports. Raises OSError if they cannot be started.
        slots: places for processes: shares of this machine, or machines.
        memory: keeps states of a run on this machine; None: no state is kept on it.
        at_end: receives the exit code, before the history of a run in a bucket is uploaded for the last time.
    """

    def __init__(
        self,
        config: RunConfig,
        start: Start,
        slots: Slots,
        options: RestartOptions,
        *,
        memory: HostMemory | None = None,
        at_end: Callable[[int], None] = lambda code: None,
        say: Report = print,
    ):
        self._config, self._start, self._slots, self._say = config, start, slots, say
        self._at_end, self._memory = at_end, memory
        self._directory = working_directory(config.run_dir)
        self._step = 0  # of the newest checkpoint or state in memory that was seen
        self._options = options
        self._notices = LaunchNotices(config, say)
        self._restarts = Restarts(options.retries, self._newest())
        self._asked: int | None = None  # signal that requested a stop
        self._asked_at = 0.0
        self._noticed = 0.0  # time at which the first process of the newest attempt had ended
        self._waiting: list[int] = []  # signals that were not sent to the processes yet

    def run(self) -> int:
        """Trains until the run is done or no attempt is left. Returns the exit code."""
        with system_errors(f'run_dir: {self._directory} cannot be written', '\ngive another directory: run_dir=PATH'):
            (self._directory / 'output').mkdir(parents=True, exist_ok=True)
        with self._handling_signals(), self._memory or contextlib.nullcontext():
            try:
                code = self._run_attempts()
                self._at_end(code)
                return code
            finally:
                self._notices.close()
                self._upload()

    def _newest(self) -> int:
        """Step of the newest checkpoint or state in memory, as far as this machine knows.

        The memory of another machine is known when an attempt has gone on from there.
        """
        saved = newest_checkpoint(self._config.run_dir, otherwise=self._step)
        began = [attempt.first_step or 0 for attempt in attempts_of(read_attempts(self._directory))[-1:]]
        self._step = max(saved, self._memory.newest() if self._memory else 0, *began)
        return self._step

    def _kept(self, step: int) -> str:
        if not step:
            return 'there is no checkpoint yet'
        is_saved = step == newest_checkpoint(self._config.run_dir, otherwise=step)
        if is_saved:
            return f'checkpoint {step} is complete'
        return f'step {step} is in memory' if self._memory else f'it went on from step {step}'

    def _run_attempts(self) -> int:
        attempt, lost = 1, None
        while True:
            began = self._noticed = time.time()
            try:
                ended = self._attempt({'attempt': attempt} | ({} if lost is None else {'lost': lost}))
            except OSError as error:
                ended = Outcome(1, f'the processes cannot be started: {error}', self._newest())
            lost = self._noticed
            self._note('ended', why=ended.why, code=ended.code, step=ended.step, noticed=lost)
            if ended.code == DONE or self._asked is not None:
                return self._last_code(ended)
            is_mistake = ended.code in (MISTAKE, CONFIGURATION)
            wait = None if is_mistake else self._next(ended)
            leaves = wait is None and self._options.requeued and bool(ended.gone or ended.quarantined)
            self._notices.attempt_ended(self._directory, ended.code, ended.step, ended.why, wait is not None or leaves)
            if is_mistake:
                return self._last_code(ended)
            if leaves:
                self._say(f'launch: {ended.why}; exiting with {TRY_AGAIN}, to be started again on other machines')
                return TRY_AGAIN
            if wait is None:
                failures = f'{self._restarts.failures} attempts in a row without a new checkpoint'
                reason = 'this run needs its host, and is not elastic' if ended.quarantined else failures
                self._say(f'launch: {ended.why}; {reason}: giving up')
                return ended.exit_code
            attempt += 1
            self._say(
                f'launch: {ended.why}, after {lost - began:.0f} s; '
                f'{self._kept(ended.step)}; '
                f'starting again{f" in {wait:.0f} s" if wait else ""}: attempt {attempt}, {len(self._slots.used)} '
                'processes'
            )
            if not self._sleep(wait):
                return TRY_AGAIN if self._options.requeued else 128 + (self._asked or 0)

    def _next(self, ended: Outcome) -> float | None:
        """Seconds until the next attempt; None: no further attempt. If elastic, chooses its number of processes."""
        wait = self._restarts.wait(ended)
        left = ended.quarantined or ended.gone
        if left and self._slots.replace(left):
            self._restarts.reset()
            return 0.0
        if ended.quarantined or (ended.gone and self._options.requeued):
            if not self._options.elastic or not self._slots.forget(left):
                return None
            self._restarts.reset()
            return 0.0
        if not self._options.elastic:
            return wait
        if ended.why == _GROWS:
            self._slots.grow()
            return 0.0
        if (
            self._slots.ended(ended.step)
            or (ended.gone and self._slots.drop(ended.gone, gone=True))
            or (ended.lost and self._restarts.failures >= 2 and self._slots.drop(ended.lost))
        ):
            self._restarts.reset()
            return 0.0
        return wait

    def _attempt(self, facts: dict[str, Any]) -> Outcome:
        self._slots.started(self._newest())
        label, began = attempt_label(), time.monotonic()
        stacks = StackFiles(self._directory, range(len(self._slots.used)))
        with self._start(self._slots.used, label) as group:
            self._note('started', processes=group.processes(), **facts)
            deadline, seen, grows = None, -1, False
            while True:
                self._forward_signals(group)
                group.prepare()
                codes = group.codes()
                now = time.monotonic()
                if codes and deadline is None:
                    self._noticed = time.time()
                if len(codes) != seen and codes:
                    deadline = min(deadline or now + _AFTER_END, now + _patience(codes.values()))
                    seen = len(codes)
                elif (
                    self._options.elastic
                    and not grows
                    and self._asked is None
                    and self._slots.is_time_to_grow(self._newest)
                ):
                    grows = True
                    group.send(signal.SIGTERM)  # they save the same step
                if len(codes) == len(group) or (deadline is not None and now >= deadline):
                    break
                if (
                    self._options.stop_within is not None
                    and self._asked is not None
                    and now - self._asked_at > self._options.stop_within
                ):
                    self._say(
                        f'launch: not all processes have ended within {self._options.stop_within:.0f} s: killing them'
                    )
                    break
                time.sleep(_LOOK)
            hung = tuple(number for number in range(len(group)) if number not in codes)
            group.end()
            ended = outcome(codes, hung, self._newest())
            if grows and self._asked is None and set(codes.values()) <= {DONE, TRY_AGAIN}:
                ended = dataclasses.replace(ended, code=TRY_AGAIN, why=_GROWS, lost=())
            elif ended.code == DONE and self._asked is not None and ended.step < self._config.steps:
                ended = dataclasses.replace(ended, why='stopped on request')
            elif ended.code not in (DONE, MISTAKE, CONFIGURATION) and (gone := tuple(group.gone())):
                names = ' and '.join(f'process {number} on {group.host(number)}' for number in gone)
                ended = dataclasses.replace(ended, gone=gone, why=f'lost: {names}')
            elif ended.code == TRY_AGAIN and (event := quarantined(self._directory)):
                why = f'quarantined: {event.get("device")}, which computes something wrong'
                ended = dataclasses.replace(ended, quarantined=(int(event['process']),), why=why)
            if self._asked is None and ended.why != _GROWS:
                self._report_crashes(group, codes, ended, label, stacks, time.monotonic() - began)
        return ended

    def _report_crashes(
        self, group: Group, codes: dict[int, int], ended: Outcome, label: str, stacks: StackFiles, seconds: float
    ) -> None:
        """Shows the output of the process that caused the end, and writes a report of each process that crashed."""
        culprit = next((number for number, code in codes.items() if code == ended.code), 0)
        if culprit and ended.code not in (DONE, TRY_AGAIN, -signal.SIGKILL):
            self._say('\n'.join(f'process {culprit} | {line}' for line in group.tail(culprit)))
        crashed = [number for number, code in codes.items() if code not in (DONE, TRY_AGAIN, MISTAKE, CONFIGURATION)]
        crashed += ended.lost if ended.code == TRY_AGAIN else ()
        if not crashed and ended.code == TRY_AGAIN:  # a watchdog has written stacks
            crashed = [number for number in codes if stacks.new(number)]
        for number in crashed[:_MOST_REPORTS]:
            crash = Crash(
                process=number,
                host=group.host(number),
                code=codes.get(number),
                seconds=seconds,
                step=ended.step,
                output=group.tail(number),
                stacks=stacks.new(number),
            )
            try:
                path = write_crash_report(self._config.run_dir, label, crash)
            except OSError as error:
                self._say(f'WARNING: launch: no crash report of process {number}: {error.strerror}')
                return
            if number == crashed[0]:
                self._say(f'launch: crash report in {path}')

    def _note(self, event: str, **what: Any) -> None:
        try:
            note(self._directory, event, **what)
        except OSError as error:  # a full disk does not end the training
            self._say(f'WARNING: launch: cannot write to {self._directory}: {error.strerror}. The run continues')

    def _upload(self) -> None:
        """Uploads the history of a run in a bucket and the output of its processes, which process 0 leaves behind."""
        remote = self._config.run_dir
        if not isinstance(remote, BucketPath):
            return
        try:
            with Lease(remote / FILE, self._config.faults.lease_seconds, self._say).held() as lease:
                mirror = Mirror(self._directory, remote, lease, self._say)
                mirror.fetch(lease)
                mirror.upload(names=r'attempts\.jsonl|output/.*')
        except (HeldError, LostError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._say(f'WARNING: launch: the last lines of {self._directory} are not uploaded: {reason}')

    def _last_code(self, ended: Outcome) -> int:
        if self._asked is not None:
            if (
                self._options.requeued
                and ended.code not in (MISTAKE, CONFIGURATION)
                and ended.step < self._config.steps
            ):
                return TRY_AGAIN
            if ended.code not in (DONE, TRY_AGAIN, MISTAKE, CONFIGURATION):
                return 128 + self._asked
        return ended.exit_code

    # The handler records signals, and the loop forwards them. Each process has its own session, so that Ctrl-C reaches
    # it once, from here.

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        numbers = list(PASSED_ON)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by `nohup`
            numbers.remove(signal.SIGHUP)
        with handling(numbers, self._waiting.append):
            yield

    def _forward_signals(self, group: Group) -> None:
        while self._waiting:
            number = self._waiting.pop(0)
            now = time.monotonic()
            if number in STOP:
                if self._asked is None:
                    self._asked, self._asked_at = number, now
                elif now - self._asked_at < _SAME_REQUEST or number == signal.SIGHUP:
                    # `uv run`, `timeout` and Slurm forward signals that the process group has received already
                    continue
                else:
                    self._say('launch: second request to stop: ending all processes immediately')
                    group.end()
                    continue
            group.send(signal.SIGTERM if number == signal.SIGHUP else number)

    def _sleep(self, seconds: float) -> bool:
        """Waits. Returns False if a stop was requested meanwhile."""
        until = time.monotonic() + seconds
        while True:
            for number in self._waiting:
                if number in STOP:
                    self._asked = number
                    return False
            self._waiting.clear()
            if time.monotonic() >= until:
                return True
            time.sleep(_LOOK)


def _patience(codes: Collection[int]) -> float:
    """Seconds for the other processes after some have ended with these codes."""
    if all(code in (DONE, TRY_AGAIN) for code in codes):
        return _AFTER_END
    return _AFTER_KILL if -signal.SIGKILL in codes else _AFTER_FAILURE
