"""Search for the best values of configuration keys.

Optuna chooses the values, and each trial is an ordinary run. The same command continues a search that was stopped or
killed. The exit code is 1 if no trial was trained to its end, and 130 after Ctrl-C.
"""

import functools

from pretrax.option import argument, option


def search(
    search: str = argument('A YAML file, such as configs/search.yaml.', metavar='SEARCH'),
    out: str | None = option('Directory for the trials. [default: searches/NAME]', '-o', metavar='DIR'),
    show: bool = option('Run nothing; write the report of the trials so far.', default=False),
) -> int:
    import pathlib

    from pretrax.errors import UserError
    from pretrax.experiments.search import JOURNAL, Searcher
    from pretrax.experiments.search_file import Range, read_search
    from pretrax.storage import BucketPath, locate
    from pretrax.view.search.report import summary, table_text, write_report

    file = locate(search)
    directory = locate(out or f'searches/{file.stem}')
    if isinstance(directory, BucketPath):
        raise UserError(f'--out {out}: a search needs a directory on a disk, which all machines of its trials share')
    assert isinstance(directory, pathlib.Path)
    say = functools.partial(print, flush=True)
    space = read_search(file)
    if show and not (directory / JOURNAL).is_file():
        raise UserError(f'{directory} has no trials: run the command without --show')
    command = f'pretrax search {search}' + (f' --out {out}' if out else '')
    metric, given = space.search.metric, space.search.parameters
    logarithmic = {key: isinstance(one, Range) and one.log for key, one in given.items()}
    with Searcher(space, directory, say) as searcher:
        is_done = show or searcher.run()
        trials = searcher.trials()
        write_report(
            directory=directory,
            name=file.stem,
            command=command,
            metric=metric,
            steps=space.base.steps,
            parameters=logarithmic,
            trials=trials,
            importances=searcher.importances(),
        )
        best = searcher.write_best()
    say('\n' + '\n'.join([*table_text(trials, metric, list(given)), '', *summary(trials, metric, space.base.steps)]))
    say(f'wrote {directory}/report.html, trials.md and trials.csv' + (f'; pretrax train {best}' if best else ''))
    if not is_done:
        say('stopped; the same command continues')
        return 130
    return int(best is None and not show)
