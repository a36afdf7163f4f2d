"""Write the names of today into files of pretrax 0.1, whose section `model:` was flat.

The files may be configurations, sweeps, searches or fits of scaling laws. Comments, order and layout stay.
"""

from pretrax.errors import UserError
from pretrax.option import argument, option


def upgrade(
    files: tuple[str, ...] = argument('YAML files.', metavar='FILE...'),
    out: str | None = option('Write the text here, and leave the file as it is.', metavar='FILE'),
) -> None:
    from pretrax.config import upgrade_file
    from pretrax.storage import locate

    if out is not None and len(files) > 1:
        raise UserError('--out: expected one file to upgrade')
    for file in files:
        changes = upgrade_file(locate(file), locate(out) if out else None)
        for change in changes:
            print(f'{file}: {change}')
        if not changes:
            print(f'{file}: nothing to change')
