"""Trackio: a local database, shown by `trackio show`. It needs no account and no network.

Lines are written with Trackio's own storage class, which raises errors, where `trackio.log` prints warnings.
"""

import contextlib
import datetime
import hashlib
import importlib
import pathlib
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pretrax.observe.trackers.base import Line, Shown, Table, Tracker, flat, markdown_code, needs, remember


class Trackio(Tracker):
    """A run in a project of Trackio, whose database is in `TRACKIO_DIR` (default: ~/.cache/huggingface/trackio).

    Args:
        directory: directory of the run; it keeps the id of the Trackio run.
    """

    name, package = 'Trackio', 'trackio'

    def __init__(self, project: str | bool, directory: pathlib.Path, name: str, config: Mapping[str, Any]):
        self._trackio = needs(self.package, 'trackio')
        self._storage: Any = importlib.import_module('trackio.sqlite_storage').SQLiteStorage
        self._project, self._run_name = str(project), name
        self._run_id = remember(directory / 'trackio-run-id', lambda: uuid.uuid4().hex)
        self._config: dict[str, Any] | None = {key: str(value) for key, value in flat(config).items()}
        self._database = self._storage.init_db(self._project)
        self.where = f'trackio show --project {project}'

    def resume(self, step: int) -> Mapping[str, int]:
        self.rewind(step)
        query = (
            'SELECT value.key, MAX(metrics.step) FROM metrics, json_each(metrics.metrics) AS value '
            'WHERE metrics.run_id = ? GROUP BY value.key'
        )
        with contextlib.closing(sqlite3.connect(self._database, timeout=30)) as connection:
            return dict(connection.execute(query, (self._run_id,)).fetchall())

    def rewind(self, step: int) -> bool:
        with contextlib.closing(sqlite3.connect(self._database, timeout=30)) as connection, connection:
            connection.execute('DELETE FROM metrics WHERE run_id = ? AND step > ?', (self._run_id, step))
        return True

    def log(self, lines: Sequence[Line]) -> None:
        self._write([(line.step, dict(line.numbers)) for line in lines], [line.time for line in lines])

    def show(self, step: int, key: str, content: Shown) -> None:
        if isinstance(content, pathlib.Path):
            image = self._trackio.Image(str(content))
            image._save(self._project, self._run_name, step)
            value = image._to_dict()
        elif isinstance(content, Table):
            table = self._trackio.Table(columns=list(content.columns), data=[list(row) for row in content.rows])
            value = table._to_dict(self._project, self._run_name, step)
        else:
            value = self._trackio.Markdown(markdown_code(content))._to_dict()
        self._write([(step, {key: value})])

    def file(self, path: pathlib.Path) -> None:
        if path.suffix == '.html':
            page = self._trackio.Html(path.read_text())
            page._save(self._project, self._run_name, 0)
            self._write([(0, {path.name: page._to_dict()})])

    def _write(self, records: Sequence[tuple[int, dict[str, Any]]], times: Sequence[float] = ()) -> None:
        """Appends rows. The database ignores a row that it already has."""
        names = [f'{self._run_id} {step} {sorted(values)}' for step, values in records]
        moments = [datetime.datetime.fromtimestamp(when, datetime.UTC).isoformat() for when in times]
        self._storage.bulk_log(
            self._project,
            self._run_name,
            [values for _, values in records],
            steps=[step for step, _ in records],
            timestamps=moments or None,
            config=self._config,
            log_ids=[hashlib.sha256(name.encode()).hexdigest()[:32] for name in names],
            run_id=self._run_id,
        )
        self._config = None
