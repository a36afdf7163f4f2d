"""Write the report of a run: one HTML file, to open without a network."""

from pretrax.option import argument, option


def report(
    run: str = argument('Directory of the run, also in a bucket.', metavar='RUN'),
    out: str | None = option('An .html file. [default: RUN/report.html]', '-o', metavar='FILE'),
) -> None:
    import pathlib

    from pretrax.errors import UserError
    from pretrax.storage import locate
    from pretrax.view.report import write_report

    path = None if out is None else locate(out)
    if path is not None and path.suffix.lower() not in ('.html', '.htm'):
        raise UserError(f'cannot write {out}: a report is an HTML file\nwrite a name that ends in .html')
    if isinstance(path, pathlib.Path) and path.is_dir():
        raise UserError(f'cannot write {out}: it is a directory')
    print(f'wrote {write_report(run, path)}')
