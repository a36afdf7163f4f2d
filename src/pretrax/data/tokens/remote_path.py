"""Remote directories of token files (gs://, s3://, http(s)://), read with TensorStore.

Only reading is supported: write to a local disk and copy the directory.
"""

from pathlib import Path

import tensorstore as ts

from pretrax.errors import UserError

# Shared, so that connections are reused and memory:// is one store. The default of 32 retries takes minutes.
CONTEXT = ts.Context({'http_request_retries': {'max_retries': 3, 'max_delay': '2s'}})


class RemotePath:
    """A URL with the methods of `Path` that readers of flat-tokens use."""

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
        """The content. Raises FileNotFoundError if there is none, and UserError for any other error of the storage."""
        try:
            store = ts.KvStore.open(f'{self.parent.url}/', context=CONTEXT).result()
            found = store.read(self.name).result()
        except Exception as error:  # storage backends share no base class
            raise UserError(f'{self}: {" ".join(str(error).split(" [")[0].split())[:300]}') from error
        if found.state != 'value':
            raise FileNotFoundError(f'{self}: no such file')
        return bytes(found.value)

    def is_file(self) -> bool:
        try:
            self.read_bytes()
        except FileNotFoundError:
            return False
        return True


def token_path(spec: str) -> Path | RemotePath:
    """The path or URL that `data.tokens` names."""
    if spec.startswith('file://'):
        return Path(spec.removeprefix('file://'))
    return RemotePath(spec) if '://' in spec else Path(spec).expanduser()
