"""The data component `tokenizer`: a tokenizer without text, used by runs that hold imported weights.

`pretrax generate` needs no more. Training raises an error.
"""

from typing import Annotated

from pydantic import Field

from pretrax.data.batches.source import DataRequest, HostBatch, Source
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import named_begin
from pretrax.errors import UserError

FILE = 'tokenizer.json'


class TokenizerOnly(Source):
    """A tokenizer without text, of a run that `pretrax import` wrote: it generates, and cannot train.

    `tokenizer` is None if the imported checkpoint had no tokenizer.json.
    """

    documents_per_row = 1
    largest_token = -1  # it has no tokens to train on

    def __init__(
        self,
        request: DataRequest,
        *,
        vocab_size: Annotated[int | None, Field(description='number of token ids, if there is no tokenizer')] = None,
        begin_of_text: Annotated[
            bool | str | None,
            Field(
                description="what begins a text: null: the tokens that tokenizer.json adds; true, false, or a token's "
                'name'
            ),
        ] = None,
        end_of_text: Annotated[
            int | None, Field(description='id that ends a text; null: that of a token with one of the usual names')
        ] = None,
    ):
        self._directory = request.directory
        path = request.directory / FILE
        self.tokenizer = Tokenizer(path.read_bytes(), str(path), end_of_text) if path.is_file() else None
        if self.tokenizer is not None:
            self.tokenizer.before_text = named_begin(request.directory, self.tokenizer.token_id)
            self.tokenizer.begin_with(begin_of_text)
            self.vocab_size = self.tokenizer.vocab_size
        elif vocab_size is not None:
            self.vocab_size = vocab_size
        else:
            raise UserError(f'{path}: no such file, and data.vocab_size is not given\n  set data.vocab_size')

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        raise UserError(
            f'{self._directory.parent} has weights and a tokenizer, but no text to train on\n'
            f'to train these weights, use another run with init_from: {self._directory.parent}'
        )
