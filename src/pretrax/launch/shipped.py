"""The configuration of a run as files for a machine that has none of this machine's files."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jinja2

from pretrax.config import RunConfig, resolved_yaml
from pretrax.errors import Report, UserError, system_errors
from pretrax.launch.record import FILE, RUNS, LaunchRecord, write_record
from pretrax.storage import AnyPath, BucketPath

CONFIG = 'config.yaml'
STOPPED = (
    143  # exit code of `launch node --until-done` that was asked to stop; a lost process makes the others exit with 75
)
LARGEST = 900_000  # bytes of all files; a ConfigMap of Kubernetes holds 1 MiB

_TEMPLATES = Path(__file__).with_name('templates')
_REQUIRED = re.compile(r'\$\{oc\.env: *([A-Za-z_]\w*) *\}')


def shipped(config: RunConfig) -> dict[str, str]:
    """{name: text} of the resolved configuration, config.yaml, and of its plugins, which lie beside it.

    A value from the environment stays a reference: a secret is in no file.

    Raises:
        UserError: the plugins are large, or two of them have the same name.
    """
    files: dict[str, str] = {}
    plugins = []
    for plugin in config.plugins:
        path = Path(plugin)
        if not path.is_absolute():  # a module, which the other machine has to have
            plugins.append(plugin)
            continue
        if path.name in files:
            raise UserError(f'plugins: two files are named {path.name}\nrename one of them')
        with system_errors(f'plugins: {path} cannot be sent to another machine', '\nsave it as UTF-8'):
            files[path.name] = path.read_text(encoding='utf-8')
        plugins.append(path.name)
    text = resolved_yaml(config.model_copy(update={'plugins': tuple(plugins)}))
    files = {CONFIG: text} | files
    size = sum(len(text.encode()) for text in files.values())
    if size > LARGEST:
        raise UserError(
            f'plugins: {size:,} bytes with the configuration; expected at most {LARGEST:,}\n'
            'put them into the image as a module, and name the module in plugins'
        )
    return files


def fill_template(name: str, /, **values: Any) -> str:
    """The text of a file of `launch/templates`, with values in the places that it names."""
    made = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    made.policies['json.dumps_kwargs'] = {}  # the order of the keys stays
    return made.from_string(_TEMPLATES.joinpath(name).read_text()).render(values)


def check_variables(files: dict[str, str], given: Collection[str], how: str) -> None:
    """Raises UserError if the configuration needs a variable that the other machine will not have."""
    needed = dict.fromkeys(_REQUIRED.findall(files[CONFIG]))
    if missing := [name for name in needed if name not in given]:
        raise UserError(f'the configuration reads {", ".join(missing)} from the environment\n{how}')


def record_directory(config: RunConfig, say: Report) -> AnyPath:
    """Where the launch.json of a run on other machines is: the RUN that `pretrax launch status` takes.

    It is in the run directory if that is a bucket, or a directory that exists here, as of a search whose machine mounts
    the volume. A machine that does not see the volume, or may not write to the bucket, has it in runs/NAME.

    Raises:
        UserError: the bucket does not exist.
    """
    if isinstance(config.run_dir, BucketPath):
        try:
            probe = config.run_dir / f'{FILE}.test'
            probe.write_bytes(b'test')  # some services list a bucket that does not exist
            probe.unlink(missing_ok=True)
            return config.run_dir
        except FileNotFoundError as error:
            raise UserError(
                f'run_dir: {config.run_dir}: {error.strerror}\ncreate the bucket, or give another run_dir'
            ) from error
        except OSError as error:
            say(f'launch: {config.run_dir} cannot be written from here: {error.strerror}; its machines have to')
    elif config.run_dir.is_dir():
        return config.run_dir
    return RUNS / config.name


def keep_record(directory: AnyPath, record: LaunchRecord, say: Report) -> None:
    """Writes the launch.json of a run that was submitted. If that fails, it is a warning: the run goes on."""
    try:
        write_record(directory, record)
    except OSError as error:
        say(f'WARNING: launch: {directory} cannot be written: {error.strerror}. There is no launch.json')
