"""Trackers that receive the metrics: TensorBoard, Weights & Biases, MLflow and Trackio, each with a configuration key.

Their packages are extras, imported when a tracker starts. A resumed run continues the same W&B, MLflow or Trackio run,
whose id is in the run's directory.
"""

import pathlib
import socket
import urllib.parse
from collections.abc import Collection, Mapping
from typing import Any

from pretrax.errors import Report, UserError
from pretrax.observe.trackers.base import Tracker as Tracker
from pretrax.observe.trackers.base import needs
from pretrax.observe.trackers.mlflow import MLflow
from pretrax.observe.trackers.tensorboard import TensorBoard
from pretrax.observe.trackers.trackio import Trackio
from pretrax.observe.trackers.wandb import WeightsAndBiases, has_credentials

_PATIENCE = 5.0  # seconds for a service when a dry run looks for it
# The tracker of each key of `log:`.
_TRACKERS = {'tensorboard': TensorBoard, 'wandb': WeightsAndBiases, 'mlflow': MLflow, 'trackio': Trackio}


def open_trackers(
    choices: Mapping[str, str | bool],
    *,
    directory: pathlib.Path,
    name: str,
    config: Mapping[str, Any],
    resumed_step: int = 0,
    say: Report = print,
) -> list[Tracker]:
    """Starts the trackers that the `log:` section names.

    Args:
        choices: 'tensorboard': True, for `<directory>/tb`; 'wandb': a project; 'mlflow': a tracking URI, or True for
            the database `./mlflow.db`; 'trackio': a project.
        config: the resolved configuration, which trackers show.
        resumed_step: 0 for a new run.
        say: receives the URL or command of each tracker.

    Raises:
        UserError: a package is missing, or a tracker of a new run does not start. If a tracker of a resumed run does
            not start, for instance because its service is down, the run continues without it and reports that.
    """
    trackers: list[Tracker] = []
    for key, choice in choices.items():
        try:
            tracker = _TRACKERS[key](choice, directory, name, config)
        except UserError:
            raise
        except Exception as error:  # foreign code that uses a network: see TrackerThread
            reason = f'{type(error).__name__}: {str(error).strip()[:300]}'
            if resumed_step == 0:
                for started in trackers:
                    started.close(False)
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


def check_trackers(choices: Mapping[str, str | bool]) -> list[str]:
    """The names of the trackers that `open_trackers` would start, without starting them.

    Raises:
        UserError: a package or a key is missing, or there is no MLflow server at the URI. What W&B's server would say
            is not known.
    """
    for key, choice in choices.items():
        needs(_TRACKERS[key].package, key)
        if key == 'mlflow' and isinstance(choice, str):
            _check_server(choice)
    check_credentials(choices)
    return list(choices)


def check_credentials(choices: Mapping[str, str | bool], variables: Collection[str] | None = None) -> None:
    """Raises UserError if W&B is on, and has neither a key nor the permission to work offline.

    Args:
        variables: names of those of other machines, which have no files of this user; None: this machine.
    """
    if 'wandb' in choices and not has_credentials(variables):
        fix = 'run wandb login, or set' if variables is None else 'give the Secret that has it: --secret NAME, or --env'
        raise UserError(
            f'log.wandb needs a key, and there is no WANDB_API_KEY\n{fix} WANDB_API_KEY, or WANDB_MODE=offline\n'
            'or train without it: log.wandb=null'
        )


def _check_server(uri: str) -> None:
    """Raises UserError if nothing listens at the address of an http URI."""
    url = urllib.parse.urlsplit(uri)
    if url.scheme not in ('http', 'https'):
        return
    try:
        port = url.port or {'http': 80, 'https': 443}[url.scheme]
        socket.create_connection((url.hostname or '', port), _PATIENCE).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f'log.mlflow: no server answers at {uri}: {error}\ntrain without it: log.mlflow=null'
        ) from error
