"""Translate a configuration of nanoGPT, Modalities or MaxText.

The file is read as data: nothing in it is executed. The result names the origin of each value, and lists every key that
has another meaning here, or none.
"""

from pathlib import Path

from pretrax.cli._output import next_command, write_new
from pretrax.errors import UserError
from pretrax.option import argument, option


def import_config(
    tool: str = argument('nanogpt, modalities or maxtext.', metavar='TOOL'),
    file: Path = argument('A configuration of that tool: a Python or YAML file.', metavar='FILE'),
    out: Path | None = option('File to write. [default: print the configuration]', '-o', metavar='OUT.yaml'),
    devices: int | None = option(
        'Devices that the batch is meant for, if the file counts it per device.', min=1, metavar='N'
    ),
) -> None:
    from pretrax.config.problems import nearest
    from pretrax.translate import TOOLS, summary, translate, yaml_text

    if tool not in TOOLS:
        raise UserError(
            f'{tool} is not a tool that can be translated; expected {", ".join(TOOLS)}{nearest(tool, TOOLS)}'
        )
    translation = translate(tool, file, devices)
    text = yaml_text(translation)
    if out is None:
        print(text, end='')
        return
    write_new(out, text.encode())
    print('\n'.join(summary(translation)))
    print('next: ' + next_command(f'pretrax config show {out}'))
