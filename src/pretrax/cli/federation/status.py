"""Show the islands and the newest rounds of a federation, and what it waits for."""

from pretrax.option import argument, option


def status(
    bucket: str = argument('The value of federation.bucket.', metavar='BUCKET'),
    rounds: int = option('Show the newest N rounds.', '-n', default=10, min=1, metavar='N'),
    silent: bool = option('First watch for half a minute which islands still renew their leases.', default=False),
    as_json: bool = option('Print JSON.', '--json', default=False),
) -> None:
    import json
    import time

    from pretrax.errors import UserError, system_errors
    from pretrax.storage import locate
    from pretrax.view.federation.read import Silence, read_federation
    from pretrax.view.federation.tables import status_lines, status_record

    place, silence = locate(bucket), Silence()
    with system_errors(f'{place} cannot be read'):
        federation = read_federation(place, detailed=rounds, silence=silence)
        if silent:
            time.sleep(silence.wait)
            federation = read_federation(place, detailed=rounds, silence=silence)
    if as_json:
        print(json.dumps(status_record(federation, rounds), indent=1))
    else:
        print('\n'.join(status_lines(federation, rounds)))
    if problems := federation.problems:
        raise UserError('\n'.join(['these objects are damaged or foreign', *problems]))
