"""A directory of token files that is no directory of this machine: gs://, s3://, http(s)://, through TensorStore.

As much of `Path` as reading flat-tokens asks for. Writing goes to this machine's disk; copy the directory afterwards.
"""

from pathlib import Path

import tensorstore as ts

from pretrax.errors import UserError

# One for all, so that memory:// is one memory and connections are shared. The default of 32 attempts takes minutes.
CONTEXT = ts.Context({'http_request_retries': {'max_retries': 3, 'max_delay': '2s'}})


class RemotePath:
    """A place below a URL."""

    def __init__(self, url: str):
        self.url = url.rstrip('/')

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> 'RemotePath':
        return RemotePath(f'{self.url}/{name}')

    @property
    def name(self) -> str:
        return self.url.rpartition('/')[2]

    @property
    def parent(self) -> 'RemotePath':
        return RemotePath(self.url.rpartition('/')[0])

    def read_bytes(self) -> bytes:
        """The content. Raises FileNotFoundError where there is none, UserError where the storage refuses."""
        try:
            store = ts.KvStore.open(f'{self.parent.url}/', context=CONTEXT).result()
            found = store.read(self.name).result()
        except Exception as error:  # each storage has its own
            raise UserError(f'{self}: {" ".join(str(error).split(" [")[0].split())[:300]}') from error
        if found.state != 'value':
            raise FileNotFoundError(f'{self}: nothing is there')
        return bytes(found.value)

    def is_file(self) -> bool:
        try:
            self.read_bytes()
        except FileNotFoundError:
            return False
        return True


def token_path(spec: str) -> Path | RemotePath:
    """Where `data.tokens` points."""
    if spec.startswith('file://'):
        return Path(spec.removeprefix('file://'))
    return RemotePath(spec) if '://' in spec else Path(spec).expanduser()
