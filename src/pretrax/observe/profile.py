"""Traces of a few steps (`log.profile`, `log.profile_on_slow`): what the device and the host did in each microsecond.

Traces are for `pretrax trace`, Perfetto and XProf. Beside each one, `steps.json` says which steps it has, why they were
traced, and what was in the memory of a device when it began. `memory.prof` has that memory by allocation, for pprof.
"""

import contextlib
import json
import pathlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pretrax.errors import Report
from pretrax.observe.device_memory import memory_by_owner, memory_in_use

if TYPE_CHECKING:
    from pretrax.config.schema import Log
    from pretrax.run.clock import Clock
    from pretrax.run.step_metrics import StepMetrics

STEPS_FILE = 'steps.json'
MOST_SLOW, APART = 3, 100  # traces that slow steps may start, and steps from the end of one to the next
_AFTER_SLOW = 3  # steps that such a trace has, unless `log.profile` says otherwise
SETTLING = 3  # first steps, which do not count: they allocate memory and fill the prefetch queue
_WINDOW, _FEWEST = 51, 8  # steps whose median is the usual time, at most and at least
_UNEVEN = 3  # calls after an interruption at which the steps that have ended may have waited for other work


class SlowSteps:
    """Compares the time of the steps that ended since the last call with the median of the latest ones.

    Args:
        factor: a step is slow if it takes this many times the median.

    Attributes:
        usual: the median, in seconds; 0 before it is known.
        latest: seconds of the newest step.
    """

    def __init__(self, factor: float, clock: 'Clock'):
        self.usual = self.latest = 0.0
        self._factor, self._clock = factor, clock
        self._interruptions, self._uneven = clock.interruptions, 0  # so far, and calls that still do not count
        self._newest: tuple[int, float] | None = None  # the steps that were done at the last call, and their seconds
        self._calls, self._times = 0, deque[float](maxlen=_WINDOW)

    def begin(self) -> bool:
        """Call it when a step begins. Returns whether a step was slow that has ended since the last call."""
        newest, (done, now) = self._newest, (self._clock.done, self._clock.seconds_of_done())
        self._newest, self._calls = (done, now), self._calls + 1
        if self._clock.interruptions != self._interruptions:
            self._interruptions, self._uneven = self._clock.interruptions, _UNEVEN
        if self._uneven:  # the device had other work
            self._uneven -= 1
            return False
        if newest is None or self._calls <= SETTLING + 1:
            return False
        steps, seconds = done - newest[0], now - newest[1]
        if steps <= 0 or seconds <= 0:  # no step has ended, or a rollback has set the clock back
            return False
        self.latest = seconds / steps
        self.usual = statistics.median(self._times) if len(self._times) >= _FEWEST else 0.0
        self._times.append(self.latest)
        return 0 < self.usual * self._factor <= self.latest


@contextlib.contextmanager
def profiled[**P, T](
    step: Callable[P, T], log: 'Log', directory: pathlib.Path, say: Report, metrics: 'StepMetrics'
) -> Iterator[Callable[P, T]]:
    """Traces calls of the step, in process 0: `log.profile` from the fourth on, and some after slow ones.

    Args:
        step: the compiled training step; its first argument is the state.
        log: how many calls, and which are slow.
        directory: directory of the run; traces are written to `profile/` in it, and older ones stay.
        metrics: measures the steps. Its clock stops while a trace is started or written.
    """
    import jax

    if not (log.profile or log.profile_on_slow) or jax.process_index():
        yield step
        return
    slow = SlowSteps(log.profile_on_slow, metrics.clock) if log.profile_on_slow else None
    tracer = _Tracer(log.profile, directory / 'profile', say, metrics, slow)

    def traced(*arguments: P.args, **named: P.kwargs) -> T:
        tracer.before(arguments)
        results = step(*arguments, **named)
        tracer.after(results)
        return results

    try:
        yield traced
    finally:
        tracer.close()


class _Tracer:
    """Decides before and after each call whether a trace starts or ends."""

    def __init__(
        self, count: int, directory: pathlib.Path, say: Report, metrics: 'StepMetrics', slow: SlowSteps | None
    ):
        self._count, self._directory, self._say = count, directory, say
        self._metrics, self._slow = metrics, slow
        self._calls = self._left = self._slow_traces = 0  # calls so far, calls still to trace, traces of slow steps
        self._quiet_until = 0  # the call before which slow steps start no other trace
        self._about: dict[str, Any] = {}  # the contents of `steps.json`

    def before(self, arguments: tuple[Any, ...]) -> None:
        self._calls += 1
        is_slow = self._slow is not None and self._slow.begin()
        if self._left:
            return
        if self._count and self._calls == SETTLING + 1:
            self._start(self._count, 'log.profile', arguments)
        elif is_slow and self._slow and self._slow_traces < MOST_SLOW and self._calls >= self._quiet_until:
            self._slow_traces += 1
            times = f'{self._slow.latest:.3g} s, {self._slow.latest / self._slow.usual:.1f} times the usual time'
            self._say(f'profile: call {self._calls - 1} of the step took {times}; the next ones are traced')
            self._start(self._count or _AFTER_SLOW, f'log.profile_on_slow: a step took {times}', arguments)

    def after(self, results: Any) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._end(results)

    def close(self) -> None:
        """Ends a trace that is not complete, because the run ended."""
        if self._left:
            self._left = 0
            self._end(None)
        elif self._count and self._calls <= SETTLING:
            self._say(f'profile: nothing was traced, because the run ended within its first {SETTLING} steps')

    def _start(self, count: int, reason: str, arguments: tuple[Any, ...]) -> None:
        import jax

        self._metrics.read()
        jax.block_until_ready(arguments)  # earlier work is not in the trace
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python calls would fill most of the file
        if hasattr(options, 'session_id'):  # the name of the folder: two traces may begin in one second
            options.session_id = f'{time.strftime("%Y_%m_%d_%H_%M_%S")}_{self._calls:08}'
        state = arguments[0] if arguments else None
        done = getattr(state, 'step', None)
        self._about = {
            'first_step': self._calls if done is None else int(done) + 1,
            'first_call': self._calls,
            'reason': reason,
            'device_kind': jax.local_devices()[0].device_kind,
            'memory': {'by_owner': memory_by_owner(state), **memory_in_use()},
        }
        try:
            with self._metrics.clock.paused('trace', self._about['first_step'] - 1):
                jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
        except (RuntimeError, OSError) as error:
            self._say(f'WARNING: profile: cannot trace: {error}. Training continues')
            return
        self._left = count

    def _end(self, results: Any) -> None:
        import jax

        first = self._about.pop('first_call')
        self._about['last_step'] = self._about['first_step'] + self._calls - first
        try:
            if results is not None:  # the run goes on
                self._metrics.read()
                jax.block_until_ready(results)
            with self._metrics.clock.paused('trace', self._about['last_step']):
                jax.profiler.stop_trace()
                traces = sorted(self._directory.rglob('perfetto_trace.json.gz'), key=lambda path: path.stat().st_mtime)
                self._describe(traces[-1].parent)
        except (RuntimeError, OSError, IndexError) as error:
            self._say(f'WARNING: profile: cannot write the trace: {error}. Training continues')
            return
        finally:
            self._quiet_until = self._calls + APART
        self._say(
            f'profile: calls {first} to {self._calls} of the step are in {traces[-1]}; '
            f'print it: pretrax trace {self._directory.parent}; or open it at https://ui.perfetto.dev'
        )

    def _describe(self, folder: pathlib.Path) -> None:
        import jax

        self._about['memory'] |= {f'{key}_after': n for key, n in memory_in_use().items()}
        (folder / STEPS_FILE).write_text(json.dumps(self._about, indent=1) + '\n')
        (folder / 'memory.prof').write_bytes(jax.profiler.device_memory_profile())
