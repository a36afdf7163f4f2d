"""The models that `pretrax eval` evaluates, one after another."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretrax.errors import UserError, printable
from pretrax.evaluate.language_model import LanguageModel
from pretrax.evaluate.results import Results, run_task, run_tasks
from pretrax.evaluate.task import Settings, Task


def evaluate_models(
    paths: Sequence[str], tasks: Sequence[Task], settings: Settings, *, batch_tokens: int, all_checkpoints: bool
) -> dict[str, Results]:
    """{model: its results}.

    Raises:
        UserError: there is no such model, it has no tokenizer, or its only task cannot run on it.
    """
    found: dict[str, Results] = {}
    for path in paths:
        for name, model in models_at(path, batch_tokens, all_checkpoints):
            print(f'{name}: {", ".join(task.name for task in tasks)}', file=sys.stderr, flush=True)
            if len(tasks) == 1:  # the error is that of the command
                found[name] = Results({tasks[0].name: run_task(model, tasks[0], settings, _report)})
            else:
                found[name] = run_tasks(model, tasks, settings, _report)
    return found


def models_at(path: str, batch_tokens: int, all_checkpoints: bool) -> Iterator[tuple[str, LanguageModel]]:
    """(name, model) of a run, a checkpoint or a Hugging Face directory, or of all checkpoints of a run."""
    from pretrax.checkpoint import is_checkpoint, steps_in
    from pretrax.run.trained import open_trained
    from pretrax.storage import locate

    with _imported(path) as run_path:
        trained = open_trained(run_path)
        run = trained.run
        run_name = Path(path).name if run_path != path else trained.directory.parent.name
        steps = [trained.step]
        if all_checkpoints:
            if is_checkpoint(locate(run_path)):
                raise UserError(f'--all-checkpoints: {path} is one checkpoint\n  give its run')
            steps = steps_in(trained.directory)
        model = None
        for step in steps:
            weights = trained.at(step).weights()
            if model is None:
                model = LanguageModel(
                    run.recipe.model,
                    weights,
                    getattr(run.source, 'tokenizer', None),
                    length=run.size.sequence_length,
                    end=trained.end_tokens,
                    batch_tokens=batch_tokens,
                )
            else:
                model.use(weights)
            yield (run_name if run_path != path else f'{run_name}@{step}'), model


@contextlib.contextmanager
def _imported(path: str) -> Iterator[str]:
    """The run of a path: itself, or for a Hugging Face directory a run beside nothing, for this command alone."""
    place = Path(path)
    if not (place / 'config.json').is_file() or (place / 'checkpoints').exists():
        yield path
        return
    from pretrax.run.imported import import_checkpoint

    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        import_checkpoint(path, f'{directory}/{place.name or "model"}')
        yield f'{directory}/{place.name or "model"}'


def _report(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
