"""What every result says about itself, and its two files."""

import datetime
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import processor

from pretrax.system.cores import usable_cores


def circumstances() -> dict[str, Any]:
    """The date, the command that runs, and the machine."""
    script = f'benchmarks/{Path(sys.argv[0]).name}'
    return {
        'date': datetime.date.today().isoformat(),
        'command': shlex.join(['uv', 'run', 'python', script, *sys.argv[1:]]),
        'processor': processor(),
        'cores': usable_cores(),
    }


def write_result(result: dict[str, Any], table: Callable[[dict[str, Any]], str], directory: Path, name: str) -> None:
    """Writes `<name>-<date>.json` and its table as `.md`, and prints the table.

    Args:
        result: with the `circumstances`.
        table: the result as Markdown.
        directory: is created.
        name: of the benchmark.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f'{name}-{result["date"]}'
    path.with_suffix('.json').write_text(json.dumps(result, indent=1) + '\n')
    path.with_suffix('.md').write_text(table(result))
    print(f'\n{table(result)}\nwritten to {path}.json and .md')
