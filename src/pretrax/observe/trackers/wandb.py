"""Weights & Biases: a run of a project. W&B's own process sends the data, or keeps it in a file without a network."""

import html
import importlib
import os
import pathlib
import re
import urllib.parse
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pretrax.observe.trackers.base import Line, Shown, Table, Tracker, needs, remember

# The file of a run is a log as LevelDB writes it, of protocol buffers: blocks of records that are split over blocks.
_HEAD, _BLOCK, _RECORD_HEAD = 7, 1 << 15, 7
_WHOLE, _LAST = 1, 4  # types of a part of a record


class WeightsAndBiases(Tracker):
    """A W&B run. W&B cannot remove points: steps that are trained again keep their first values.

    Args:
        directory: directory of the run; it keeps the id of the W&B run, and W&B's files.
    """

    name, package = 'W&B', 'wandb'

    def __init__(self, project: str | bool, directory: pathlib.Path, name: str, config: Mapping[str, Any]):
        wandb = needs(self.package, 'wandb')
        directory.mkdir(parents=True, exist_ok=True)
        identity = remember(directory / 'wandb-run-id', lambda: uuid.uuid4().hex[:8])
        # Seconds, not in every version; 15, the default, would outlive a checkpoint.
        interval = 'x_transaction_log_flush_interval'
        has_interval = interval in getattr(wandb.Settings, 'model_fields', {})
        files = directory / 'wandb'
        self._earlier = sorted(files.glob(f'offline-run-*-{identity}/run-{identity}.wandb'))
        self._wandb = wandb
        self._run = wandb.init(
            project=str(project),
            name=name,
            id=identity,
            resume='allow',
            dir=str(directory),
            config=dict(config),
            # W&B would take over the terminal of the progress bar.
            settings=wandb.Settings(silent=True, console='off', **({interval: 1.0} if has_interval else {})),
        )
        self._last = -1  # newest step that W&B has from earlier processes
        self._pending: int | None = None  # step that is not committed yet
        self.where = f'offline, send it with: wandb sync {files}/offline-run-*' if self._run.offline else self._run.url

    def resume(self, step: int) -> Mapping[str, int]:
        del step
        if self._run.offline:
            self._last = max((step for path in self._earlier for step in _steps(path)), default=-1)
        else:
            self._last = self._run.starting_step - 1  # of the server
        return {}

    def log(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._log(line.step, dict(line.numbers))

    def show(self, step: int, key: str, content: Shown) -> None:
        if step <= self._last:
            return
        if isinstance(content, pathlib.Path):
            value = self._wandb.Image(str(content))
        elif isinstance(content, Table):
            value = self._wandb.Table(columns=list(content.columns), data=[list(row) for row in content.rows])
        else:
            value = self._wandb.Html(f'<pre style="white-space: pre-wrap">{html.escape(content)}</pre>')
        self._log(step, {key: value})

    def file(self, path: pathlib.Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy='now')

    def flush(self) -> None:
        # W&B's own process gets a step when the next one begins, or here, and writes it within a second.
        if self._pending is not None:
            self._run.log({}, step=self._pending, commit=True)
            self._pending = None

    def close(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if step > self._last:
            self._run.log(values, step=step)
            self._pending = step


def has_credentials(variables: Collection[str] | None = None) -> bool:
    """Whether W&B finds a key without asking for it, or is not to use its server.

    Args:
        variables: names of the variables of other machines; None: this machine, with the files that `wandb login` and
            `wandb offline` write.
    """
    names = ('WANDB_API_KEY', 'WANDB_IDENTITY_TOKEN_FILE', 'WANDB_MODE')
    if variables is not None:
        return any(name in variables for name in names)
    if any(os.environ.get(name) for name in names[:2]) or os.environ.get('WANDB_MODE', 'online') != 'online':
        return True
    home = pathlib.Path.home()
    config = pathlib.Path(os.environ.get('WANDB_CONFIG_DIR') or home / '.config' / 'wandb')
    logins = [pathlib.Path(os.environ.get('NETRC') or home / '.netrc'), home / '_netrc']
    settings = [config / 'settings', pathlib.Path('wandb', 'settings')]
    host = urllib.parse.urlsplit(os.environ.get('WANDB_BASE_URL', '')).hostname or 'wandb'
    wanted = rf'machine\s+\S*{re.escape(host)}|^\s*(mode|disabled|base_url|api_key)\s*='
    return any(
        file.is_file() and re.search(wanted, file.read_text(errors='replace'), re.MULTILINE)
        for file in (*logins, *settings)
    )


def _steps(path: pathlib.Path) -> Iterator[int]:
    """The steps in a file of W&B. An incomplete end of the file is ignored."""
    types: Any = importlib.import_module('wandb.proto.wandb_internal_pb2')
    for content in _records(path.read_bytes()):
        record = types.Record.FromString(content)
        if record.HasField('history'):
            yield record.history.step.num


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a log as LevelDB writes it."""
    at, record = _HEAD, b''
    while at + _RECORD_HEAD <= len(content):
        if (left := _BLOCK - at % _BLOCK) < _RECORD_HEAD:  # the rest of the block is empty
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], 'little'), content[at + 6]
        part = content[at + _RECORD_HEAD : at + _RECORD_HEAD + length]
        if len(part) < length or not kind:
            return
        at += _RECORD_HEAD + length
        record += part
        if kind in (_WHOLE, _LAST):
            yield record
            record = b''
