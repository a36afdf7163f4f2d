"""A trace of a few steps (`log.profile`): what the device and the host did in each microsecond, for Perfetto and XProf."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator

SETTLING = 3  # steps that are not traced: the first ones allocate, and fill what is fetched ahead


@contextlib.contextmanager
def profiled[**P, T](
    step: Callable[P, T], count: int, directory: pathlib.Path, say: Callable[[str], None]
) -> Iterator[Callable[P, T]]:
    """The step; where `count` is not 0, of its calls those from the fourth on are traced, so many, by the first process.

    Args:
        step: the compiled training step.
        count: steps to trace.
        directory: of the trace; older ones in it stay.
        say: told where the trace is.
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
            jax.block_until_ready(arguments)  # what came before is not in the trace
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # each Python call would be a slice, and most of the file
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
        if tracing:  # the run ended before
            end(calls)
        elif calls <= SETTLING:
            say(f'profile: nothing was traced, since the run ended after {calls} of the {SETTLING} steps that settle')
