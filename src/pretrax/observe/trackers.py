"""Copies of the metrics elsewhere: TensorBoard, Weights & Biases, MLflow, one key of the configuration each.

Their packages are extras, imported when a tracker is opened. A run that continues goes on in the same W&B or MLflow
run: its identity is kept beside the checkpoints.
"""

import json
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pretrax.errors import UserError
from pretrax.machine.atomic import write_file


class Tracker(Protocol):
    """What a tracker does. `log` and `close` may raise: `MetricsLog` then goes on without it."""

    name: str
    where: str  # where a person looks at it

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of one step. Must not wait for a network."""
        ...

    def close(self) -> None:
        """Send what is still to be sent."""
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
    """The trackers that the `log:` section asks for, started.

    Args:
        tensorboard: write `<directory>/tb`.
        wandb: the project, or None. `WANDB_MODE=offline` keeps everything in `<directory>/wandb`.
        mlflow: a tracking URI, True for MLflow's own default, the local database `./mlflow.db`, or None.
        directory: of the run.
        config: the resolved configuration, shown beside the curves.
        resumed_step: 0 for a new run.
        say: told where to look.

    Raises:
        UserError: a package is missing, or a new run's tracker does not start. In a run that continues a tracker that
            does not start (a service that is down) is left out and said, as if it had failed later.
    """
    openers: list[tuple[str, Callable[[], Tracker]]] = []
    if tensorboard:
        openers.append(('tensorboard', lambda: TensorBoard(directory / 'tb', config, resumed_step)))
    if wandb is not None:
        openers.append(('wandb', lambda: WeightsAndBiases(wandb, directory, name, config)))
    if mlflow is not None and mlflow is not False:
        # MLflow 3 refuses a plain directory (`./mlruns`) as the place of new runs.
        uri = f'sqlite:///{pathlib.Path("mlflow.db").resolve()}' if mlflow is True else mlflow
        openers.append(('mlflow', lambda: MLflow(uri, directory, name, config)))
    trackers: list[Tracker] = []
    for key, opener in openers:
        try:
            tracker = opener()
        except UserError:
            raise
        except Exception as error:  # other people's code that talks to a network: see MetricsLog._try
            reason = f'{type(error).__name__}: {str(error).strip()[:300]}'
            if resumed_step == 0:
                for started in trackers:
                    started.close()
                raise UserError(
                    f'log.{key} did not start: {reason}\n'
                    f'train without it: log.{key}={"false" if key == "tensorboard" else "null"}'
                    + ('; or without a network: WANDB_MODE=offline' if key == 'wandb' else '')
                ) from error
            say(f'WARNING: log.{key} did not start ({reason}). This run goes on without it; see metrics.jsonl.')
        else:
            trackers.append(tracker)
            say(f'{tracker.name}: {tracker.where}')
    return trackers


class TensorBoard:
    """Event files in the run's directory, written by a thread of tensorboardX."""

    name = 'TensorBoard'

    def __init__(self, directory: pathlib.Path, config: Mapping[str, Any], resumed_step: int):
        tensorboardX = _needs('tensorboardX', 'tensorboard')
        # purge_step hides what the process that died had logged after its last checkpoint.
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
    """A W&B run; its own process sends. Steps below the last one sent are ignored there: they were equal anyway."""

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
            # W&B would take over the terminal that the progress display draws on.
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
            # Parameters are written once, by MLflow's rule. Longer ones than it takes are cut.
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
        if error.name != module:  # it is installed, and misses something of its own
            raise
        raise UserError(
            f'log.{extra} needs the package {module}, which is not installed\n'
            f"install it with: uv sync --extra {extra}   (or: pip install 'pretrax[{extra}]')\n"
            f'or train without it: log.{extra}={"false" if extra == "tensorboard" else "null"}'
        ) from None


def _remember(file: pathlib.Path, make: Callable[[], str]) -> str:
    """The text in the file; made and written there if there is none."""
    if not file.exists():
        write_file(file, make().encode())
    return file.read_text().strip()


def _flat(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}"""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f'{prefix}{key}.') if isinstance(value, Mapping) else {f'{prefix}{key}': value}
    return flat
