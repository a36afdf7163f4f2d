"""Run the teacher once over the data of a run, and store its most likely tokens.

CONFIG has distill.teacher. The directory has, for each token that the run will see, the --top-k most likely next
tokens, their log probabilities, and the probability of all others together. Train with distill.teacher=null
distill.cache=DIR. The same command continues after an interruption, and with larger steps= it adds what is missing.
"""

from typing import Annotated

import typer

from pretrax.cli._arguments import ConfigFile, Overrides


def prepare(
    config: ConfigFile,
    overrides: Overrides = (),
    *,
    out: Annotated[
        str,
        typer.Option(
            '--out', '-o', metavar='DIR', help='Directory to write, also gs://BUCKET/PATH or s3://BUCKET/PATH.'
        ),
    ],
    top_k: Annotated[int, typer.Option(min=1, metavar='K', help='Tokens to keep of each distribution.')] = 64,
) -> None:
    from pretrax.config import load
    from pretrax.distill.preparation import prepare_cache
    from pretrax.storage import locate

    found = prepare_cache(load(config, overrides), locate(out), top_k, print)
    if found is None:  # process 0 writes the directory, and prints the result
        return
    if found.new_rows:
        print(
            f'{out}: {found.new_rows:,} new rows at {found.tokens_per_second:,.0f} tokens/s; the {top_k} most likely '
            f'tokens have {1 - found.tail:.1%} of the probability'
        )
    print(f'{out}: {found.rows:,} rows, {found.bytes_per_token:,.0f} bytes per token')
    print(f'to train with it: distill.teacher=null distill.cache={out}')
