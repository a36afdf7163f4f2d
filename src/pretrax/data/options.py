"""The options of the data component `text`: text to tokenize, text to stream, tokens, or a mixture of text and tokens.

data: {text: stdlib}                               # the standard library's sources
data: {text: 'books/*.txt', validation: 0.01}      # files, directories, globs, or a list of them
data: {text: 'hf:NAME', streaming: true, tokenizer: bytes}
data: {tokens: runs/mine/data/tokens-0a1b2c3d4e5f} # already tokenized
data: {tokens: train.bin}                          # from another tool: nanoGPT, Modalities, Megatron, seqax
data: {tokenizer: t.json, mixture: [{name: books, weight: 3, text: b.txt}, {name: code, weight: 1, text: stdlib}]}

Each of the four has a class with its keys, and nothing else can be written beside them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model, field_validator, model_validator

from pretrax.data.corpus.selection import Filter, NearDuplicates
from pretrax.errors import UserError
from pretrax.storage import locate

STDLIB = 'stdlib'
PREFIX = 'hf:'  # of a Hugging Face dataset
SMALLEST = 257  # tokens of a tokenizer that can be trained
_VocabSize = Annotated[
    int | None,
    Field(
        ge=2,
        description='number of tokens of the tokenizer to train (at least 257); a given tokenizer must have this size',
    ),
]


class HuggingFaceOptions(BaseModel):
    """Which rows of a Hugging Face dataset to read, and how."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    configuration: str | None = Field(None, description='configuration of the dataset; null: its default')
    split: str = Field('train', description='split; a slice such as train[:10%] requires streaming=false')
    streaming: bool = Field(False, description='true: read over the network during tokenization, store nothing on disk')
    revision: str | None = Field(None, description='a commit, tag or branch on the hub; null: the newest')


class _Options(BaseModel):
    """The keys of text and of tokens. null means: not given."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    tokenizer: str | None = Field(
        None,
        description="a tokenizer.json, a directory with one, 'tiktoken:NAME' or 'bytes'; null trains a "
        'byte-level BPE on the text',
    )
    vocab_size: _VocabSize = None
    packing: Literal['concatenate', 'whole', 'best_fit'] = Field(
        'concatenate',
        description='how rows are filled: windows of the token stream, or whole documents in order or by best fit',
    )
    cache_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        16.0, description='tokens in a bucket: GiB of them to keep on this machine once they are read; 0: none'
    )

    @model_validator(mode='before')
    @classmethod
    def _only_own_keys(cls, given: Any) -> Any:
        """Applies the defaults that depend on other keys, and refuses the keys of other kinds of data."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        if 'tokenizer' in given:
            given = {'vocab_size': None} | given
        if {'prompt_field', 'answer_field'} & given.keys():
            given = {'field': None} | given
        if 'messages_field' in given:
            given = {'field': None, 'packing': 'best_fit'} | given
        if issubclass(cls, StreamOptions):
            given = ({'validation_documents': 0} if given.get('validation') == 0 else {}) | given
            given = {name: value for name, value in given.items() if value or name not in ('validation', 'deduplicate')}
        others = [name for name in _KEYS if name not in cls.model_fields and given.get(name) is not None]
        if others:
            raise ValueError(_refusal(cls, others))
        return given


class TokenOptions(_Options):
    """Tokens that exist already."""

    tokens: str = Field(description='a flat-tokens directory, or a token file of another tool, instead of text')
    validation_tokens: str | None = Field(
        None, description='tokens for validation, if `tokens` has no validation split'
    )
    end_of_text: int | None = Field(None, ge=0, description='the id that ends a document in a nanoGPT .bin')
    dtype: Literal['uint16', 'uint32'] | None = Field(
        None, description='the type of the ids in a nanoGPT .bin; null: uint16'
    )

    @field_validator('tokens', 'validation_tokens')
    @classmethod
    def _known_scheme(cls, given: str | None) -> str | None:
        if given is not None:
            locate(given)
        return given


class _Text(_Options):
    """The keys of text, which may be tokenized before training or while it trains."""

    text: str | list[str] = Field(
        STDLIB,
        description="'stdlib' (the Python standard library's sources), a file, a directory, a glob or a URL of these, "
        "'hf:NAME_OR_DIRECTORY', or a list",
    )
    field: str | None = Field('text', description='the field with the text; a.b is a nested field')
    prompt_field: str | None = Field(
        None, description='instead of field: the text before the answer, which does not count in the loss'
    )
    answer_field: str | None = Field(None, description='the text after the prompt, which counts in the loss')
    filters: list[Filter] | None = Field(None, description='conditions on the rows; all must hold')
    min_characters: int | None = Field(None, ge=1, description='skip shorter documents')
    max_characters: int | None = Field(None, ge=1, description='skip longer documents')
    on_error: Literal['fail', 'skip'] = Field('fail', description='what to do with a row that cannot be read')
    hugging_face: HuggingFaceOptions | None = Field(None, description='how to read the datasets that text names')
    begin_of_text: bool | str | None = Field(
        None,
        description='what begins each document, and each text that the model reads: null: the tokens that '
        'tokenizer.json '
        'adds; true: these, or the bos_token of tokenizer_config.json; false: nothing; or the name of a token',
    )
    streaming: bool = Field(
        False, description='read and tokenize the text while the run trains, and store no tokens; needs a tokenizer'
    )

    @model_validator(mode='after')
    def _consistent_rows(self) -> Self:
        if (self.prompt_field is None) != (self.answer_field is None):
            raise ValueError('prompt_field and answer_field must be given together')
        if self.prompt_field is not None and self.field is not None:
            raise ValueError('prompt_field and answer_field replace field; remove one or the other')
        if (self.min_characters or 0) > (self.max_characters or float('inf')):
            raise ValueError(f'min_characters {self.min_characters:,} is more than max_characters')
        if self.hugging_face is not None and not self.datasets:
            raise ValueError(f"hugging_face applies to datasets, but text names none; expected text: '{PREFIX}...'")
        if not self.text or not all(self.specs):
            raise ValueError("text names nothing; expected 'stdlib', a path, or a list of paths")
        return self

    @property
    def specs(self) -> list[str]:
        """`text` as a list."""
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def datasets(self) -> list[str]:
        """The Hugging Face datasets among them."""
        return [spec for spec in self.specs if spec.startswith(PREFIX)]


class StreamOptions(_Text):
    """Text that is read and tokenized while the run trains."""

    shuffle_buffer: int = Field(
        4096, ge=1, description='while streaming: documents that are shuffled together; 1: keep their order'
    )
    validation_documents: int = Field(
        256, ge=0, description='while streaming: documents to hold out, the first ones; 0: no validation'
    )
    validation_split: str | None = Field(
        None, description='while streaming a Hugging Face dataset: take the held-out documents from this split'
    )

    @model_validator(mode='after')
    def _can_be_streamed(self) -> Self:
        if self.tokenizer is None:
            raise ValueError(
                'streaming needs a tokenizer: data.tokenizer=FILE; '
                'pretrax data train-tokenizer TEXT --out FILE trains one on a part of the text'
            )
        if self.packing != 'concatenate':
            raise ValueError(f'packing={self.packing} needs tokens on a disk; while streaming, use packing=concatenate')
        if self.validation_split is not None and not self.datasets:
            raise ValueError(f"validation_split applies to datasets, but text names none; expected text: '{PREFIX}...'")
        return self


class TextOptions(_Text):
    """Text that is tokenized before the run trains."""

    vocab_size: _VocabSize = 4096
    messages_field: str | None = Field(
        None,
        description='instead of field: a list of messages with role and content; only the answers count in the loss',
    )
    chat_template: str | None = Field(
        None,
        description='a Jinja file, or a tokenizer_config.json, with the chat template; null: that of the tokenizer',
    )
    deduplicate: bool = Field(False, description='skip documents that repeat an earlier text')
    near_duplicates: NearDuplicates | None = Field(None, description='skip documents that nearly repeat an earlier one')
    validation: float = Field(0.05, ge=0, lt=1, description='fraction of the documents to hold out; 0: no validation')
    engine: Literal['local', 'ray'] = Field(
        'local', description="where to tokenize: 'local' processes or a 'ray' cluster"
    )
    workers: int | None = Field(None, ge=1, description='processes that tokenize; null: one per core')

    @model_validator(mode='after')
    def _consistent(self) -> Self:
        if self.tokenizer is None and self.vocab_size is not None and self.vocab_size < SMALLEST:
            raise ValueError(
                f'vocab_size {self.vocab_size} is too small to train a tokenizer; expected at least {SMALLEST}: '
                '256 bytes and the end of a text'
            )
        if self.messages_field is None:
            if self.chat_template is not None:
                raise ValueError('chat_template applies to messages_field, which is not given')
            return self
        if self.field is not None or self.prompt_field is not None:
            raise ValueError('messages_field replaces field, prompt_field and answer_field; remove one or the other')
        if self.tokenizer is None:
            raise ValueError(
                'messages_field needs a tokenizer with the special tokens of the chat template: data.tokenizer=DIR'
            )
        if self.packing == 'concatenate':
            raise ValueError(
                'packing=concatenate cuts conversations at the end of a row; use packing=best_fit or packing=whole'
            )
        return self


class _Weighted(BaseModel):
    """The keys that every source of a mixture has."""

    name: str = Field(
        pattern=r'^[A-Za-z0-9][\w.-]*$', max_length=60, description='name in messages and metrics: val_loss/NAME'
    )
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | tuple[tuple[int, float], ...] = Field(
        description='share of the tokens, relative to the others; or [[step, weight], ...], linear in between'
    )

    @property
    def schedule(self) -> tuple[tuple[int, float], ...]:
        """(step, weight) pairs, linear in between and constant outside."""
        return self.weight if isinstance(self.weight, tuple) else ((0, self.weight),)

    @model_validator(mode='after')
    def _sensible_weight(self) -> Self:
        steps, weights = zip(*self.schedule, strict=True) if self.schedule else ((), ())
        if not steps or min(steps) < 0 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise ValueError('a weight schedule is [[step, weight], ...] with increasing steps >= 0')
        if not all(0 <= weight < math.inf for weight in weights):
            raise ValueError('weights must be finite and >= 0')
        return self


class WeightedTokens(TokenOptions, _Weighted):
    """A source of a mixture: tokens."""


class WeightedText(TextOptions, _Weighted):
    """A source of a mixture: text that is tokenized before the run trains."""

    @model_validator(mode='after')
    def _is_text(self) -> Self:
        if self.streaming:
            raise ValueError(f'source {self.name!r} of the mixture cannot be streamed; tokenize it: streaming=false')
        if 'text' not in self.model_fields_set:
            raise ValueError(f'source {self.name!r} has neither text nor tokens')
        return self


def _is_tokens(source: Any) -> str:
    own = source.get('tokens') if isinstance(source, dict) else getattr(source, 'tokens', None)
    return 'of text' if own is None else 'of tokens'


_SHARED: dict[str, Any] = {
    # `packing` is not null, as in the configurations that pretrax 0.1 stored.
    name: (
        cast(Any, field.annotation) | None,
        Field(field.default if name == 'packing' else None, description=field.description),
    )
    for name, field in {**TokenOptions.model_fields, **StreamOptions.model_fields, **TextOptions.model_fields}.items()
    if name not in ('text', 'tokens', 'validation_tokens')
}
_Shared = create_model('_Shared', **_SHARED)


class MixtureOptions(_Shared):
    """Several sources of text and of tokens. Keys next to `mixture` are defaults for its sources."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    mixture: tuple[
        Annotated[
            Annotated[WeightedTokens, Tag('of tokens')] | Annotated[WeightedText, Tag('of text')],
            Discriminator(_is_tokens),
        ],
        ...,
    ] = Field(
        min_length=1,
        description='several sources instead of text or tokens; each has a name, a weight and the keys of this table',
    )
    exhausted: Literal['repeat', 'stop', 'drop'] = Field(
        'repeat', description='when a source of the mixture is used up: repeat it, stop the run, or drop it'
    )

    @model_validator(mode='before')
    @classmethod
    def _shared_keys(cls, given: Any) -> Any:
        """Passes the keys next to `mixture` to its sources, as far as they apply to each source."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        for name in ('text', 'tokens', 'validation_tokens'):
            if name in given:
                raise ValueError(f'data.mixture replaces data.{name}; data.{name}=null removes it')
        of_text = {key: value for key, value in given.items() if key in _SHARED and key not in ('end_of_text', 'dtype')}
        of_tokens = {key: given[key] for key in ('packing', 'cache_gib', 'end_of_text', 'dtype') if key in given}

        def source(own: Any) -> Any:
            if not isinstance(own, dict):
                return own
            own = {key: value for key, value in own.items() if value is not None}
            if isinstance(weight := own.get('weight'), list):  # strict validation needs tuples, YAML gives lists
                own['weight'] = tuple(tuple(knot) if isinstance(knot, list) else knot for knot in weight)
            return (of_tokens if 'tokens' in own else of_text) | own

        sources = given.get('mixture')
        if isinstance(sources, list | tuple):
            given['mixture'] = tuple(map(source, sources))
        return given

    @model_validator(mode='after')
    def _consistent(self) -> Self:
        names = [source.name for source in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f'mixture: names must differ; given: {", ".join(names)}')
        if any(isinstance(source, WeightedText) and source.tokenizer is None for source in self.mixture):
            raise ValueError(
                'a mixture of texts needs one tokenizer for all of them: data.tokenizer=path/tokenizer.json'
            )
        return self


def _refusal(kind: type[_Options], others: Sequence[str]) -> str:
    """Why keys of other kinds of data cannot be given."""
    names, nulls = ', '.join(others), ' '.join(f'data.{name}=null' for name in others)
    if 'mixture' in others:
        return 'a source of a mixture cannot be a mixture; list its sources instead'
    if 'exhausted' in others:
        return 'data.exhausted applies to data.mixture, which is not given'
    if issubclass(kind, TokenOptions):
        return f'data.tokens is already tokenized, so {names} would have no effect; {nulls} removes them'
    if of_tokens := [name for name in others if name in TokenOptions.model_fields]:
        return f'{", ".join(of_tokens)} applies to data.tokens, which is not given'
    if kind is StreamOptions:
        instead = ', use validation_documents=N' if 'validation' in others else ''
        return f'{names} cannot be used while streaming{instead}; data.{others[0]}=null removes it'
    return f'{others[0]} applies to streaming; set data.streaming=true, or data.{others[0]}=null'


def kind_of(values: Mapping[str, Any]) -> 'type[DataOptions]':
    """The class of the options with these values."""
    if values.get('mixture') is not None:
        return MixtureOptions
    if values.get('tokens') is not None:
        return TokenOptions
    return StreamOptions if values.get('streaming') is True else TextOptions


type DataOptions = TextOptions | StreamOptions | TokenOptions | MixtureOptions
KINDS = (TextOptions, StreamOptions, TokenOptions, MixtureOptions)
OPTIONS = KINDS, kind_of  # as `config.registry` takes them
_KEYS = {name: None for kind in KINDS for name in kind.model_fields}


def keys_of_text(options: TextOptions | StreamOptions) -> list[str]:
    """The given keys that do not apply to `tokens`."""
    own = options.model_fields_set - TokenOptions.model_fields.keys()
    return [name for name in _KEYS if name in own and getattr(options, name) is not None]


def options_of_text(name: str, options: object) -> TextOptions | StreamOptions:
    """The options of the data component `name`. Raises UserError if it does not read text."""
    if isinstance(options, TextOptions | StreamOptions):
        return options
    if isinstance(options, TokenOptions):
        raise UserError(
            f'data.tokens: {options.tokens} is already tokenized\n'
            '  to tokenize text, set data.tokens=null data.text=...'
        )
    if isinstance(options, MixtureOptions):
        raise UserError(
            'data.mixture: the run tokenizes each of its sources\n'
            '  to tokenize one text, set data.mixture=null data.text=...'
        )
    raise UserError(f'data.name: {name} makes batches without text\n  expected data.name=text')
