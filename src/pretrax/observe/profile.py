"""A trace of a few steps (`log.profile`): what the device and the host did in each microsecond, for Perfetto and XProf."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator

SETTLING = 3  # first steps, which are not traced: they allocate memory and fill the prefetch queue


@contextlib.contextmanager
def profiled[**P, T](
    step: Callable[P, T], count: int, directory: pathlib.Path, say: Callable[[str], None]
) -> Iterator[Callable[P, T]]:
    """Traces `count` calls of the step, starting at the fourth, in process 0. Traces nothing if `count` is 0.

    Args:
        step: the compiled training step.
        count: number of calls to trace.
        directory: for the trace; older traces in it stay.
        say: receives the path of the trace.
    """
    import jax

    if not count or jax.process_index():
        yield step
        return
    calls, tracing = 0, False

    def end(last: int) -> None:
        nonlocal tracing
        tracing = False
        jax.profiler.stop_trace()
        traces = sorted(directory.rglob('perfetto_trace.json.gz'), key=lambda path: path.stat().st_mtime)
        say(
            f'profile: calls {SETTLING + 1} to {last} of the step are in {traces[-1]}; open it at https://ui.perfetto.dev'
        )

    def traced(*arguments: P.args, **named: P.kwargs) -> T:
        nonlocal calls, tracing
        calls += 1
        if calls == SETTLING + 1:
            jax.block_until_ready(arguments)  # earlier work is not in the trace
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python calls would fill most of the file
            jax.profiler.start_trace(directory, create_perfetto_trace=True, profiler_options=options)
            tracing = True
        results = step(*arguments, **named)
        if calls == SETTLING + count:
            jax.block_until_ready(results)
            end(calls)
        return results

    try:
        yield traced
    finally:
        if tracing:  # the run ended earlier
            end(calls)
        elif calls <= SETTLING:
            say(f'profile: nothing was traced, because the run ended within its first {SETTLING} steps')
