"""Command lines that may be shown to others."""

import os
import re
from collections.abc import Sequence

_SECRET = re.compile(r'(?i)(^|[._-])(token|secret|password|passwd|api_?key|key|credentials?|notify|webhook)($|[._-])')


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line without passwords in URLs, variables of `--env`, and values of keys that are likely secrets."""
    shown = []
    for before, argument in zip(['', *arguments], arguments, strict=False):
        key, equals, _ = argument.removeprefix('--env=').partition('=')
        if equals and (_SECRET.search(key) or before == '--env' or argument.startswith('--env=')):
            shown.append(f'{argument.partition(key)[0]}{key}=***')
        else:
            shown.append(re.sub(r'://[^/@\s]*@', '://***@', argument))
    return [os.fsencode(text).decode(errors='replace') for text in shown]
