"""What `pretrax eval --harness` runs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrax.cli._evaluated import Reading, models_at
from pretrax.errors import UserError, install_extra


def evaluate_with_harness(
    paths: Sequence[str], tasks: str, *, directory: str | None, limit: int, seed: int, reading: Reading,
    all_checkpoints: bool,
) -> dict[str, Any]:  # fmt: skip
    """Evaluates models on tasks of lm-evaluation-harness, and prints a table for each.

    Returns:
        {model: what the harness returns}.

    Raises:
        UserError: the extra is not installed, there is no such model or task, or its data cannot be loaded.
    """
    try:
        from pretrax.evaluate.harness import evaluate, open_tasks
    except ImportError:
        raise UserError(f'--harness needs lm-evaluation-harness\n  {install_extra("harness")}') from None
    from lm_eval.utils import make_table

    if directory is not None and not Path(directory).is_dir():
        raise UserError(f'--harness-tasks {directory}: there is no such directory')
    names = [name.strip() for name in tasks.split(',')]
    manager = open_tasks(names, directory)
    found = {}
    for path in paths:
        for name, model in models_at(path, reading, all_checkpoints):
            print(f'{name}: {", ".join(names)}', file=sys.stderr, flush=True)
            found[name] = evaluate(model, names, manager, limit=limit, seed=seed)
            print(f'{name}\n\n{make_table(found[name])}', flush=True)
    return found


def as_json(found: dict[str, Any]) -> str:
    """The results with all digits."""
    return json.dumps({'results': found}, indent=1, default=str)
