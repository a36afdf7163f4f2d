"""MLflow: a run in the experiment 'pretrax'."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from pretrax.observe.trackers.base import Line, Shown, Table, Tracker, flat, markdown_table, needs, remember

_AT_ONCE = 1000  # metrics that a server takes in one request
_PARAMETERS_AT_ONCE = 100
_EXPERIMENT = 'pretrax'
# No telemetry to MLflow's makers; and a server that does not answer delays the start by a minute, not by a quarter of
# an hour.
_ENVIRONMENT = {
    'MLFLOW_DISABLE_TELEMETRY': 'true',
    'MLFLOW_HTTP_REQUEST_TIMEOUT': '10',
    'MLFLOW_HTTP_REQUEST_MAX_RETRIES': '3',
}


class MLflow(Tracker):
    """An MLflow run. MLflow cannot remove points: steps that are trained again keep their first values.

    Args:
        uri: of the tracking server or its database; True: the database `./mlflow.db`, with files in `./mlartifacts`.
        directory: directory of the run; it keeps the id of the MLflow run.
        config: becomes the parameters of the MLflow run.
    """

    name, package = 'MLflow', 'mlflow'

    def __init__(self, uri: str | bool, directory: pathlib.Path, name: str, config: Mapping[str, Any]):
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        mlflow = needs(self.package, 'mlflow')
        self._metric = mlflow.entities.Metric
        # MLflow 3 refuses a plain directory (`./mlruns`) for new runs.
        here = pathlib.Path.cwd()
        address = f'sqlite:///{here / "mlflow.db"}' if uri is True else str(uri)
        self._client = mlflow.MlflowClient(address)
        file = directory / 'mlflow-run-id'
        if file.exists():
            self._run_id = file.read_text().strip()
            self._client.update_run(self._run_id, status='RUNNING')
        else:
            self._run_id = self._new_run(name, (here / 'mlartifacts').as_uri() if uri is True else None)
            # MLflow accepts parameters only once, and of limited length.
            parameters = [mlflow.entities.Param(key, str(value)[:500]) for key, value in flat(config).items()]
            for first in range(0, len(parameters), _PARAMETERS_AT_ONCE):
                self._client.log_batch(self._run_id, params=parameters[first : first + _PARAMETERS_AT_ONCE])
            remember(file, lambda: self._run_id)
        self.where = f'mlflow ui --backend-store-uri {address}   (run {self._run_id})'

    def _new_run(self, name: str, artifacts: str | None) -> str:
        experiment = self._client.get_experiment_by_name(_EXPERIMENT)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(_EXPERIMENT, artifacts)
        return self._client.create_run(identity, run_name=name).info.run_id

    def resume(self, step: int) -> Mapping[str, int]:
        del step
        newest: dict[str, int] = {}
        # The newest point of each metric; the public property has its value only.
        for metric in self._client.get_run(self._run_id).data._metric_objs:
            newest[metric.key] = max(metric.step, newest.get(metric.key, -1))
        return newest

    def log(self, lines: Sequence[Line]) -> None:
        metrics = [
            self._metric(key, value, int(when * 1000), step)
            for step, numbers, when in lines
            for key, value in numbers.items()
        ]
        for first in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _AT_ONCE])

    def show(self, step: int, key: str, content: Shown) -> None:
        place = f'{key}/step-{step:09d}'
        if isinstance(content, pathlib.Path):
            self._client.log_artifact(self._run_id, str(content), place)
        elif isinstance(content, Table):
            self._client.log_text(self._run_id, markdown_table(content), f'{place}.md')
        else:
            self._client.log_text(self._run_id, content, f'{place}.txt')

    def file(self, path: pathlib.Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def close(self, succeeded: bool) -> None:
        self._client.set_terminated(self._run_id, 'FINISHED' if succeeded else 'FAILED')
