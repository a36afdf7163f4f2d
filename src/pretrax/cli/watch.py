"""Watch runs while they train: a live page, or --terminal.

A directory of runs is watched as a whole: runs that appear in it are added. Ctrl-C ends watching, never the runs.
"""

import asyncio
import pathlib

from pretrax.errors import UserError, warn
from pretrax.option import argument, option


def watch(
    runs: tuple[str, ...] = argument(
        'Runs, or directories of runs, on a disk or in a bucket. [default: runs]', default=(), metavar='[RUN]...'
    ),
    terminal: bool = option('Show the runs in the terminal; in a pipe, print lines.', default=False),
    host: str = option('Address to listen on; others than 127.0.0.1 need --api-key-file.', default='127.0.0.1'),
    port: int = option('Port to listen on; 0: any free port.', default=8100, min=0, max=65535),
    api_key_file: pathlib.Path | None = option(
        'File with API keys, one on each line. The page asks for a key.', metavar='FILE'
    ),
    insecure: bool = option('Let anyone who reaches --host watch.', default=False),
) -> None:
    from pretrax.view.live.runs import Places

    runs = runs or ('runs',)
    if terminal:
        from pretrax.view.live.terminal import watch_in_terminal

        watch_in_terminal(Places(runs))
        return
    from pretrax.serve.access import LOOPBACK, read_keys
    from pretrax.serve.listen import bind
    from pretrax.view.live.server import address, watch_in_browser

    if host not in LOOPBACK and api_key_file is None and not insecure:
        raise UserError(
            f'--host {host}: anyone who reaches this machine could watch\n'
            '  stay with 127.0.0.1 and reach it through ssh -L, as `pretrax watch` prints\n'
            '  or give --api-key-file FILE with keys, one on each line; or --insecure if something else protects it'
        )
    keys = None if api_key_file is None else read_keys(api_key_file)
    places = Places(runs)
    with bind(host, port) as opened:
        local = host in LOOPBACK

        def listening() -> None:
            print(address(host, opened.getsockname()[1], local), flush=True)

        asyncio.run(watch_in_browser(places, opened, keys=keys, local=local, report=warn, listening=listening))
