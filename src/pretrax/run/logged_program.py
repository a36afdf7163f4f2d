"""A program of its own that runs before the steps that are logged, and is read after them."""

import time
from collections.abc import Callable
from typing import Any

import jax

from pretrax.errors import Report
from pretrax.model.loss import Batch
from pretrax.run.clock import Clock
from pretrax.run.out_of_memory import explaining_full_memory
from pretrax.run.program_cache import compile_or_load
from pretrax.run.setup import Run
from pretrax.train.step import TrainState


class LoggedProgram:
    """Runs a program before every N-th step, the first and the last. N is a key of `log:`; if it is 0, before none.

    Args:
        name: what the program computes, for messages, such as 'the layer statistics'.
        key: that key, such as `layers`.
        make: the jitted program of the run: state, batch and more arguments -> arrays.
        arguments: the number of a batch -> the arguments besides the state and the batch.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        key: str,
        make: Callable[[], Any],
        arguments: Callable[[int], tuple[jax.Array, ...]],
        clock: Clock,
        report: Report,
    ):
        self._run, self._name, self._make, self._arguments = run, name, make, arguments
        self._every: int = getattr(run.log, key)
        self._clock, self._report = clock, report
        self._doing = f'computing {name} (log.{key})'  # when the memory of a device is full
        self._pending: dict[int, Any] = {}  # by step; a step is read after the next one has begun
        self._program: jax.stages.Compiled | None = None

    def compute(self, number: int, index: int, state: TrainState, batch: Batch) -> None:
        """Starts the program before a step, if it is due; `index` is the number of the batch."""
        if not self._every:
            return
        is_due = number % self._every == 0 or number in (1, self._run.steps)
        if not is_due and self._program is not None:
            return
        arguments = state, batch, *self._arguments(index)
        with explaining_full_memory(self._run, self._doing):
            if self._program is None:  # compiled at the first step, so that no later step is slow
                with self._clock.paused('compile', number):
                    self._program = self._compile(*arguments)
            if is_due:
                self._clock.interruptions += 1
                self._pending[number] = self._program(*arguments)

    def read(self, number: int) -> Any:
        """The result for a step that has ended; None: it was not due."""
        with explaining_full_memory(self._run, self._doing):
            return jax.device_get(self._pending.pop(number, None))

    def forget(self) -> None:
        """Forgets the steps that have not been read."""
        self._pending = {}

    def _compile(self, *arguments: Any) -> jax.stages.Compiled:
        began = time.perf_counter()
        compiled, cache = compile_or_load(self._make().lower(*arguments))
        how = f'loaded {self._name} from {cache}' if cache else f'compiled {self._name}'
        self._report(f'{how} in {time.perf_counter() - began:.1f} s')
        return compiled
