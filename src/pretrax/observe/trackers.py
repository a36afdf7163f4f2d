"""Trackers that receive the metrics: TensorBoard, Weights & Biases and MLflow, each with one configuration key.

Their packages are extras, imported when a tracker starts. A resumed run continues the same W&B or MLflow run, whose id is
in the run's directory.
"""

import json
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pretrax.errors import UserError, install_extra
from pretrax.machine.atomic import write_file


class Tracker(Protocol):
    """A tracker. If `log` or `close` raises, `MetricsLog` continues without it."""

    name: str
    where: str  # URL or command to view it

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the numbers of one step. Must not wait for a network."""
        ...

    def close(self) -> None:
        """Sends the remaining data."""
        ...


def open_trackers(
    *,
    tensorboard: bool,
    wandb: str | None,
    mlflow: str | bool | None,
    directory: pathlib.Path,
    name: str,
    config: Mapping[str, Any],
    resumed_step: int = 0,
    say: Callable[[str], None] = print,
) -> list[Tracker]:
    """Starts the trackers that the `log:` section names.

    Args:
        tensorboard: write `<directory>/tb`.
        wandb: the project, or None. `WANDB_MODE=offline` keeps everything in `<directory>/wandb`.
        mlflow: a tracking URI, True for MLflow's own default, the local database `./mlflow.db`, or None.
        directory: the run's directory.
        config: the resolved configuration, which trackers show.
        resumed_step: 0 for a new run.
        say: receives the URL or command of each tracker.

    Raises:
        UserError: a package is missing, or a tracker of a new run does not start. If a tracker of a resumed run does not
            start, for instance because its service is down, the run continues without it and reports that.
    """
    openers: list[tuple[str, Callable[[], Tracker]]] = []
    if tensorboard:
        openers.append(('tensorboard', lambda: TensorBoard(directory / 'tb', config, resumed_step)))
    if wandb is not None:
        openers.append(('wandb', lambda: WeightsAndBiases(wandb, directory, name, config)))
    if mlflow is not None and mlflow is not False:
        # MLflow 3 refuses a plain directory (`./mlruns`) for new runs.
        uri = f'sqlite:///{pathlib.Path("mlflow.db").resolve()}' if mlflow is True else mlflow
        openers.append(('mlflow', lambda: MLflow(uri, directory, name, config)))
    trackers: list[Tracker] = []
    for key, opener in openers:
        try:
            tracker = opener()
        except UserError:
            raise
        except Exception as error:  # foreign code that uses a network: see MetricsLog._try
            reason = f'{type(error).__name__}: {str(error).strip()[:300]}'
            if resumed_step == 0:
                for started in trackers:
                    started.close()
                raise UserError(
                    f'log.{key} did not start: {reason}\n'
                    f'train without it: log.{key}={"false" if key == "tensorboard" else "null"}'
                    + ('; or without a network: WANDB_MODE=offline' if key == 'wandb' else '')
                ) from error
            say(f'WARNING: log.{key} did not start ({reason}). This run continues without it; see metrics.jsonl.')
        else:
            trackers.append(tracker)
            say(f'{tracker.name}: {tracker.where}')
    return trackers


class TensorBoard:
    """Event files in the run's directory, written by a thread of tensorboardX."""

    name = 'TensorBoard'

    def __init__(self, directory: pathlib.Path, config: Mapping[str, Any], resumed_step: int):
        tensorboardX = _needs('tensorboardX', 'tensorboard')
        # purge_step hides steps that the previous process logged after its last checkpoint.
        purge_step = resumed_step + 1 if resumed_step else None
        self._writer = tensorboardX.SummaryWriter(str(directory), purge_step=purge_step, flush_secs=10)
        self.where = f'tensorboard --logdir {directory}'
        if not resumed_step:
            self._writer.add_text('config', '```json\n' + json.dumps(config, indent=1, default=str) + '\n```', 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run; W&B's own process sends the data. It ignores steps that were sent before, whose numbers are equal."""

    name = 'W&B'

    def __init__(self, project: str, directory: pathlib.Path, name: str, config: Mapping[str, Any]):
        wandb = _needs('wandb', 'wandb')
        directory.mkdir(parents=True, exist_ok=True)
        identity = _remember(directory / 'wandb-run-id', lambda: uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=project,
            name=name,
            id=identity,
            resume='allow',
            dir=str(directory),
            config=dict(config),
            # W&B would take over the terminal of the progress bar.
            settings=wandb.Settings(silent=True, console='off'),
        )
        files = directory / 'wandb'
        self.where = f'offline, send it with: wandb sync {files}/offline-run-*' if self._run.offline else self._run.url

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An MLflow run in the experiment 'pretrax'; metrics are queued and sent by MLflow's thread."""

    name = 'MLflow'

    def __init__(self, uri: str, directory: pathlib.Path, name: str, config: Mapping[str, Any]):
        mlflow = _needs('mlflow', 'mlflow')
        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment('pretrax')
        file = directory / 'mlflow-run-id'
        self._mlflow = mlflow
        if file.exists():
            run = mlflow.start_run(run_id=file.read_text().strip())
        else:
            run = mlflow.start_run(run_name=name)
            # MLflow accepts parameters only once, and of limited length.
            mlflow.log_params({key: str(value)[:500] for key, value in _flat(config).items()})
            directory.mkdir(parents=True, exist_ok=True)
            _remember(file, lambda: run.info.run_id)
        self.where = f'mlflow ui --backend-store-uri {uri}   (run {run.info.run_id})'

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step, synchronous=False)

    def close(self) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run()


def _needs(module: str, extra: str) -> Any:
    try:
        return __import__(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is installed, but one of its own dependencies is missing
            raise
        raise UserError(
            f'log.{extra} needs the package {module}, which is not installed\n'
            f'{install_extra(extra)}\n'
            f'or train without it: log.{extra}={"false" if extra == "tensorboard" else "null"}'
        ) from None


def _remember(file: pathlib.Path, make: Callable[[], str]) -> str:
    """The text in the file, which is created if it does not exist."""
    if not file.exists():
        write_file(file, make().encode())
    return file.read_text().strip()


def _flat(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}"""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f'{prefix}{key}.') if isinstance(value, Mapping) else {f'{prefix}{key}': value}
    return flat
