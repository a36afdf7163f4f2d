"""Repeat a federation on this machine, and compare what every island has learned, bit for bit.

The islands train again from their recorded configurations, one process each, on simulated devices. The exit code is 1
if a contribution differs, or could not be compared.
"""

from pretrax.option import REQUIRED, argument, option


def replay(
    bucket: str = argument('The value of federation.bucket.', metavar='BUCKET'),
    out: str = option('A new directory.', '-o', default=REQUIRED, metavar='DIR'),
) -> int:
    from pretrax.errors import system_errors
    from pretrax.federation.replay import replay as replayed
    from pretrax.storage import locate_local
    from pretrax.storage.shared_path import locate_shared

    place, directory = locate_shared(bucket), locate_local(out)
    with system_errors(f'{place} cannot be replayed'):
        problems = replayed(place, directory, lambda text: print(text, flush=True))
    print('\n'.join(problems) or 'every contribution is the recorded one')
    return int(bool(problems))
