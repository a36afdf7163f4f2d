"""Runs tasks, and shows their results as a table, as JSON and as metrics of a run."""

import dataclasses
import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from pretrax.errors import Report, UserError, first_line
from pretrax.evaluate.language_model import LanguageModel
from pretrax.evaluate.task import Document, Metric, Settings, Task, aggregate
from pretrax.evaluate.text_tasks import MADE_TASKS, TEXT_TASKS

TASKS: Mapping[str, Task] = {task.name: task for task in (*TEXT_TASKS, *MADE_TASKS)}


@dataclasses.dataclass(frozen=True)
class Results:
    """The metrics of each task, or why it failed."""

    metrics: dict[str, dict[str, Metric]]
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """`task/NAME/METRIC` and `task_stderr/NAME/METRIC`, for metrics.jsonl."""
        values = {}
        for name, metrics in self.metrics.items():
            for metric, found in metrics.items():
                values[f'task/{name}/{metric}'] = found.value
                if not math.isnan(found.stderr):
                    values[f'task_stderr/{name}/{metric}'] = found.stderr
        return values


def run_tasks(model: LanguageModel, tasks: Sequence[Task], settings: Settings, report: Report) -> Results:
    """Runs tasks one after another. A task that fails is reported, and the others run."""
    results = Results({})
    for task in tasks:
        try:
            results.metrics[task.name] = run_task(model, task, settings, report)
        except Exception as error:  # an evaluation may never stop a run
            results.failed[task.name] = first_line(error) or repr(error)
            report(f'task {task.name} failed: {error if isinstance(error, UserError) else repr(error)}')
    return results


def run_task(model: LanguageModel, task: Task, settings: Settings, report: Report) -> dict[str, Metric]:
    """The metrics of a task. Raises UserError if a text is longer than the positions of the model."""
    documents = task.documents(settings)
    if settings.lengths is None:
        documents = _fitting(model, task, documents, report)
    answers = iter(model.answer([request for document in documents for request in document.requests]))
    return aggregate([document.measure([next(answers) for _ in document.requests]) for document in documents])


def _fitting(model: LanguageModel, task: Task, documents: list[Document], report: Report) -> list[Document]:
    """Leaves out the lengths at which some text has more tokens than the model has positions."""
    long = {
        document.length
        for document in documents
        if document.length is not None
        and any(model.tokens(request) > model.max_length for request in document.requests)
    }
    for length in sorted(long):
        report(f'{task.name}: length {length} exceeds the {model.max_length} positions of the model; left out')
    return [document for document in documents if document.length not in long]


def table_rows(by_model: Mapping[str, Results]) -> list[list[str]]:
    """Headings and a row for each metric, with a column for each model: values with their standard errors."""
    rows = [['task', 'metric', 'documents', *by_model]]
    for task in dict.fromkeys(name for one in by_model.values() for name in (*one.metrics, *one.failed)):
        metrics = dict.fromkeys(metric for one in by_model.values() for metric in one.metrics.get(task, {}))
        for metric in metrics or ['failed']:
            found = [one.metrics.get(task, {}).get(metric) for one in by_model.values()]
            count = max((one.documents for one in found if one), default=0)
            rows.append([task, metric, str(count), *map(_cell, found)])
    return rows


def _cell(metric: Metric | None) -> str:
    if metric is None:
        return '-'
    return f'{metric.value:.4f}' if math.isnan(metric.stderr) else f'{metric.value:.4f} ± {metric.stderr:.4f}'


def as_json(by_model: Mapping[str, Results], settings: Settings) -> str:
    """The results as JSON, with all digits and the settings that they depend on."""

    def one(results: Results) -> dict[str, Any]:
        tasks: dict[str, dict[str, Any]] = {}
        for name, metrics in results.metrics.items():
            tasks[name] = {}
            for metric, found in metrics.items():
                stderr = None if math.isnan(found.stderr) else found.stderr
                tasks[name][metric] = {'value': found.value, 'stderr': stderr, 'documents': found.documents}
        return {'tasks': tasks, 'failed': results.failed}

    found = {'python': platform.python_version(), 'settings': dataclasses.asdict(settings)}
    return json.dumps(found | {'results': {name: one(results) for name, results in by_model.items()}}, indent=2)
