"""The report of a run: one HTML file that needs no network.

`page.html` is its template. The numbers, and Plotly, are in it as compressed text, which `page.js` decodes: every point
of every curve exactly, so that the page can zoom to single steps.
"""

import base64
import json
import pathlib
from typing import Any

from pretrax.amounts import duration
from pretrax.errors import system_errors
from pretrax.storage import AnyPath
from pretrax.storage.locate import write_whole
from pretrax.view.charts.page import compressed_plotly, in_script
from pretrax.view.definitions import FIGURES
from pretrax.view.federation.tables import ISLANDS, ROUNDS, island_rows, open_text, round_rows
from pretrax.view.record.causes import shares_text
from pretrax.view.record.run_record import RunRecord, read_run
from pretrax.view.report import facts
from pretrax.view.report.charts import charts_of, curves_data, layer_charts, layers_data
from pretrax.view.report.encoding import Arrays
from pretrax.view.template import template

FILE = 'report.html'
_ROUNDS = 200  # the newest ones


def write_report(run: str | AnyPath, out: AnyPath | None = None, files: pathlib.Path | None = None) -> AnyPath:
    """Writes the report of a run, and returns its file.

    Args:
        out: the HTML file; None: `report.html` in the run directory.
        files: a directory with newer copies of the files of a run in a bucket.

    Raises:
        UserError: there is no run, it has nothing to show, or the report cannot be written.
    """
    record = read_run(run, files)
    out = record.path / FILE if out is None else out
    text = render(record, files or record.path)
    with system_errors(f'cannot write {out}'):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, text.encode())
    return out


def render(record: RunRecord, directory: AnyPath) -> str:
    """The report as HTML. `directory`: where the layer statistics of the run are."""
    arrays, charts = Arrays(), charts_of(record)
    curves = curves_data(record, charts, arrays)
    layers = layers_data(directory, arrays)
    data = {
        'curves': curves,
        'layers': layers,
        'samples': record.samples,
        'memory': facts.memory_data(record),
        'time': facts.time_data(record, facts.traced_phases(directory, record.warnings)),
        'mesh': facts.mesh_data(record),
        'numbers': arrays.page(),
    }
    tiles = facts.tiles(record)
    memory_rows = facts.memory_rows(data['memory']) if data['memory'] else []
    measured = data['time'] and data['time']['measured']
    finite = json.loads(json.dumps(data), parse_constant=lambda name: None)  # JSON has no NaN and no infinity
    return template('report/page.html').render(
        plotly=base64.b64encode(compressed_plotly()).decode(),
        record=record,
        data=in_script(finite),
        charts=charts,
        layers=layer_charts(layers),
        tiles=tiles,
        more_figures=' · '.join(f'{definition.name} {value}' for definition, value in tiles[5:]),
        **_federation(record),
        attempts=facts.attempt_rows(record),
        causes=facts.time_rows(record),
        causes_hint=shares_text(record.seconds),
        checkpoints=facts.checkpoint_rows(record),
        hardware=facts.hardware_rows(record),
        versions=record.section('versions'),
        repeat=facts.repeat_lines(record),
        memory=data['memory'],
        time=data['time'],
        mesh=data['mesh'],
        startup=record.startup,
        facts_line=facts.one_line(record),
        figure=FIGURES,
        memory_rows=memory_rows,
        memory_hint=' · '.join(f'{name} {amount.partition(":")[0]}' for name, amount in memory_rows),
        time_hint=f'{duration(measured)}, measured' if measured else '',
    )


def _federation(record: RunRecord) -> dict[str, Any]:
    """The tables of a federation; empty ones of another run."""
    found = record.federation
    return {
        'islands': island_rows(found) if found is not None else [],
        'rounds': round_rows(found, _ROUNDS) if found is not None else [],
        'open_round': open_text(found) if found is not None else '',
        'island_head': ISLANDS,
        'round_head': ROUNDS,
    }
