"""The options of the data component `text`.

data: {text: stdlib}                               # the standard library's sources
data: {text: 'books/*.txt', validation: 0.01}      # files, directories, globs, or a list of them
data: {tokens: runs/mine/data/tokens-0a1b2c3d4e5f} # already tokenized
data: {tokens: train.bin}                          # from another tool: nanoGPT, Modalities, Megatron, seqax
data: {tokenizer: t.json, mixture: [{name: books, weight: 3, text: b.txt}, {name: code, weight: 1, text: stdlib}]}
"""

import itertools
import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pretrax.data.corpus.selection import Filter, NearDuplicates
from pretrax.errors import UserError
from pretrax.storage import locate

STDLIB = 'stdlib'
PREFIX = 'hf:'  # of a Hugging Face dataset
_OF_TEXT = (  # keys that apply only to text
    'text', 'field', 'prompt_field', 'answer_field', 'messages_field', 'chat_template', 'filters', 'deduplicate', 'near_duplicates', 'min_characters', 'max_characters',
    'on_error', 'hugging_face', 'validation', 'engine', 'workers', 'streaming', 'shuffle_buffer', 'begin_of_text',
    'validation_documents', 'validation_split',
)  # fmt: skip
SMALLEST = 257  # tokens of a tokenizer that can be trained
# While streaming, these have no effect, or need the whole text.
_NOT_STREAMED = ('validation', 'engine', 'workers', 'deduplicate', 'near_duplicates')
_STREAMED = {'shuffle_buffer': 4096, 'validation_documents': 256}  # and their defaults
_OF_ALL = {'packing', 'cache_gib', 'name', 'weight'}  # keys that apply to text and tokens
DEFAULT_CACHE_GIB = 16.0
_OF_TOKENS = ('validation_tokens', 'end_of_text', 'dtype')  # keys that apply only to `tokens`


class HuggingFaceOptions(BaseModel):
    """Which rows of a Hugging Face dataset to read, and how."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    configuration: str | None = Field(None, description='configuration of the dataset; null: its default')
    split: str = Field('train', description='split; a slice such as train[:10%] requires streaming=false')
    streaming: bool = Field(False, description='true: read over the network during tokenization, store nothing on disk')
    revision: str | None = Field(None, description='a commit, tag or branch on the hub; null: the newest')


class TextOptions(BaseModel):
    """Text to train on, or prepared tokens. null means: not given."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    text: str | list[str] | None = Field(
        STDLIB,
        description="'stdlib' (the Python standard library's sources), a file, a directory, a glob or a URL of these, "
        "'hf:NAME_OR_DIRECTORY', or a list",
    )
    tokens: str | None = Field(
        None, description='a flat-tokens directory, or a token file of another tool, instead of text'
    )
    validation_tokens: str | None = Field(
        None, description='tokens for validation, if `tokens` has no validation split'
    )
    end_of_text: int | None = Field(None, ge=0, description='the id that ends a document in a nanoGPT .bin')
    dtype: Literal['uint16', 'uint32'] | None = Field(
        None, description='the type of the ids in a nanoGPT .bin; null: uint16'
    )
    field: str | None = Field('text', description='the field with the text; a.b is a nested field')
    prompt_field: str | None = Field(
        None, description='instead of field: the text before the answer, which does not count in the loss'
    )
    answer_field: str | None = Field(None, description='the text after the prompt, which counts in the loss')
    messages_field: str | None = Field(
        None,
        description='instead of field: a list of messages with role and content; only the answers count in the loss',
    )
    chat_template: str | None = Field(
        None,
        description='a Jinja file, or a tokenizer_config.json, with the chat template; null: that of the tokenizer',
    )
    filters: list[Filter] | None = Field(None, description='conditions on the rows; all must hold')
    deduplicate: bool | None = Field(False, description='skip documents that repeat an earlier text')
    near_duplicates: NearDuplicates | None = Field(None, description='skip documents that nearly repeat an earlier one')
    min_characters: int | None = Field(None, ge=1, description='skip shorter documents')
    max_characters: int | None = Field(None, ge=1, description='skip longer documents')
    on_error: Literal['fail', 'skip'] | None = Field('fail', description='what to do with a row that cannot be read')
    hugging_face: HuggingFaceOptions | None = Field(None, description='how to read the datasets that text names')
    tokenizer: str | None = Field(
        None,
        description="a tokenizer.json, a directory with one, 'tiktoken:NAME' or 'bytes'; null trains a "
        'byte-level BPE on the text',
    )
    begin_of_text: bool | str | None = Field(
        None,
        description='what begins each document, and each text that the model reads: null: the tokens that tokenizer.json '
        'adds; true: these, or the bos_token of tokenizer_config.json; false: nothing; or the name of a token',
    )
    vocab_size: int | None = Field(
        4096,
        ge=2,
        description='number of tokens of the tokenizer to train (at least 257); a given tokenizer must have this size',
    )
    validation: float | None = Field(
        0.05, ge=0, lt=1, description='fraction of the documents to hold out; 0: no validation'
    )
    engine: Literal['local', 'ray'] | None = Field(
        'local', description="where to tokenize: 'local' processes or a 'ray' cluster"
    )
    workers: int | None = Field(None, ge=1, description='processes that tokenize; null: one per core')
    packing: Literal['concatenate', 'whole', 'best_fit'] = Field(
        'concatenate',
        description='how rows are filled: windows of the token stream, or whole documents in order or by best fit',
    )
    cache_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description='tokens in a bucket: GiB of them to keep on this machine once they are read (16); 0: none'
    )
    streaming: bool | None = Field(
        False, description='read and tokenize the text while the run trains, and store no tokens; needs a tokenizer'
    )
    shuffle_buffer: int | None = Field(
        None, ge=1, description='while streaming: documents that are shuffled together (4096); 1: keep their order'
    )
    validation_documents: int | None = Field(
        None, ge=0, description='while streaming: documents to hold out, the first ones (256); 0: no validation'
    )
    validation_split: str | None = Field(
        None, description='while streaming a Hugging Face dataset: take the held-out documents from this split'
    )
    mixture: 'tuple[MixtureItem, ...] | None' = Field(
        None,
        min_length=1,
        description='several sources instead of text or tokens; each has a name, a weight and the keys of this table',
    )
    exhausted: Literal['repeat', 'stop', 'drop'] | None = Field(
        None,
        description='when a source of the mixture is used up: repeat it (default), stop the run, or drop it',
    )

    @model_validator(mode='before')
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Sets defaults that depend on other keys: tokens have no text options, a given tokenizer has its own size."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        if isinstance(given.get('mixture'), list | tuple):
            return _shared_by_mixture(cls, given)
        if 'tokens' in given:
            return dict.fromkeys(cls.model_fields.keys() - _OF_ALL) | given
        if given.get('streaming') is True:
            none_held_out = {'validation_documents': 0} if given.get('validation') == 0 else {}
            given = dict.fromkeys(_NOT_STREAMED) | _STREAMED | none_held_out | {'vocab_size': None} | given
        if 'prompt_field' in given or 'answer_field' in given:
            given = {'field': None} | given
        if 'messages_field' in given:
            given = {'field': None, 'packing': 'best_fit'} | given
        return {'vocab_size': None} | given if 'tokenizer' in given else given

    @model_validator(mode='after')
    def _exclusive(self) -> Self:
        if self.mixture is not None:
            return self._check_mixture()
        if self.exhausted is not None:
            raise ValueError('data.exhausted applies to data.mixture, which is not given')
        ignored = [name for name in _OF_TEXT if getattr(self, name) is not None]
        if self.tokens is not None and ignored:
            raise ValueError(
                f'data.tokens is already tokenized, so {", ".join(ignored)} would have no effect; '
                + ' '.join(f'data.{name}=null' for name in ignored)
                + ' removes them'
            )
        if self.tokens is None and (given := [name for name in _OF_TOKENS if getattr(self, name) is not None]):
            raise ValueError(f'{", ".join(given)} applies to data.tokens, which is not given')
        if not self.streaming:
            only = [name for name in (*_STREAMED, 'validation_split') if getattr(self, name) is not None]
            if only:
                raise ValueError(f'{only[0]} applies to streaming; set data.streaming=true, or data.{only[0]}=null')
        else:
            self._check_streaming()
        trains = self.tokens is None and self.tokenizer is None
        if trains and self.vocab_size is not None and self.vocab_size < SMALLEST:
            raise ValueError(
                f'vocab_size {self.vocab_size} is too small to train a tokenizer; expected at least {SMALLEST}: '
                '256 bytes and the end of a text'
            )
        if (self.prompt_field is None) != (self.answer_field is None):
            raise ValueError('prompt_field and answer_field must be given together')
        if self.prompt_field is not None and self.field is not None:
            raise ValueError('prompt_field and answer_field replace field; remove one or the other')
        self._check_messages()
        if (self.min_characters or 0) > (self.max_characters or float('inf')):
            raise ValueError(f'min_characters {self.min_characters:,} is more than max_characters')
        if self.hugging_face is not None and not any(spec.startswith(PREFIX) for spec in self.specs):
            raise ValueError(f"hugging_face applies to datasets, but text names none; expected text: '{PREFIX}...'")
        if self.text is not None and not (self.text and all([self.text] if isinstance(self.text, str) else self.text)):
            raise ValueError("text names nothing; expected 'stdlib', a path, or a list of paths")
        return self

    @field_validator('tokens', 'validation_tokens')
    @classmethod
    def _known_scheme(cls, given: str | None) -> str | None:
        if given is not None:
            locate(given)
        return given

    @property
    def specs(self) -> list[str]:
        """`text` as a list."""
        return [self.text] if isinstance(self.text, str) else self.text or []

    def _check_messages(self) -> None:
        if self.messages_field is None:
            if self.chat_template is not None:
                raise ValueError('chat_template applies to messages_field, which is not given')
            return
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

    def _check_streaming(self) -> None:
        if self.tokenizer is None:
            raise ValueError(
                'streaming needs a tokenizer: data.tokenizer=FILE; '
                'pretrax data train-tokenizer TEXT --out FILE trains one on a part of the text'
            )
        if given := [name for name in _NOT_STREAMED if getattr(self, name) not in (None, False)]:
            instead = ', use validation_documents=N' if 'validation' in given else ''
            raise ValueError(
                f'{", ".join(given)} cannot be used while streaming{instead}; data.{given[0]}=null removes it'
            )
        if self.messages_field is not None:
            raise ValueError('messages_field cannot be used while streaming; set data.streaming=false')
        if self.packing != 'concatenate':
            raise ValueError(f'packing={self.packing} needs tokens on a disk; while streaming, use packing=concatenate')
        if self.validation_split is not None and not any(spec.startswith(PREFIX) for spec in self.specs):
            raise ValueError(f"validation_split applies to datasets, but text names none; expected text: '{PREFIX}...'")

    def _check_mixture(self) -> Self:
        for name in ('text', 'tokens', 'validation_tokens'):
            if getattr(self, name) is not None:
                raise ValueError(f'data.mixture replaces data.{name}; data.{name}=null removes it')
        assert self.mixture is not None
        names = [item.name for item in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f'mixture: names must differ; given: {", ".join(names)}')
        if any(item.text is not None and item.tokenizer is None for item in self.mixture):
            raise ValueError(
                'a mixture of texts needs one tokenizer for all of them: data.tokenizer=path/tokenizer.json'
            )
        return self


class MixtureItem(TextOptions):
    """A source of a mixture. Keys next to `mixture` are defaults for all its sources."""

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
    def _sensible(self) -> Self:
        if self.mixture is not None:
            raise ValueError('a source of a mixture cannot be a mixture; list its sources instead')
        if self.streaming:
            raise ValueError(f'source {self.name!r} of the mixture cannot be streamed; tokenize it: streaming=false')
        if not {'text', 'tokens'} & self.model_fields_set:
            raise ValueError(f'source {self.name!r} has neither text nor tokens')
        steps, weights = zip(*self.schedule, strict=True) if self.schedule else ((), ())
        if not steps or min(steps) < 0 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise ValueError('a weight schedule is [[step, weight], ...] with increasing steps >= 0')
        if not all(0 <= weight < math.inf for weight in weights):
            raise ValueError('weights must be finite and >= 0')
        return self


TextOptions.model_rebuild()


def _shared_by_mixture(options: type[TextOptions], given: dict[str, Any]) -> dict[str, Any]:
    """Passes the keys next to `mixture` to its sources, as far as they apply to each source."""
    own_keys = ('mixture', 'exhausted', 'text', 'tokens')
    shared = {key: value for key, value in given.items() if key not in own_keys}
    of_text = {key: value for key, value in shared.items() if key not in _OF_TOKENS}
    of_tokens = {key: value for key, value in shared.items() if key in ('packing', 'cache_gib', 'end_of_text', 'dtype')}

    def item(own: Any) -> Any:
        if not isinstance(own, dict):
            return own
        own = {key: value for key, value in own.items() if value is not None}
        if isinstance(weight := own.get('weight'), list):  # strict validation needs tuples, YAML gives lists
            own['weight'] = tuple(tuple(knot) if isinstance(knot, list) else knot for knot in weight)
        return (of_tokens if 'tokens' in own else of_text) | own

    return (
        dict.fromkeys(options.model_fields.keys() - _OF_ALL)
        | given
        | {'mixture': tuple(item(own) for own in given['mixture'])}
    )


def keys_of_text(options: TextOptions) -> list[str]:
    """The given keys that do not apply to `tokens`."""
    return [name for name in _OF_TEXT if name in options.model_fields_set and getattr(options, name) is not None]


def options_of_text(name: str, options: object) -> TextOptions:
    """The options of the data component `name`. Raises UserError if it does not read text."""
    if not isinstance(options, TextOptions):
        raise UserError(f'data.name: {name} makes batches without text\n  expected data.name=text')
    if options.tokens is not None:
        raise UserError(
            f'data.tokens: {options.tokens} is already tokenized\n  to tokenize text, set data.tokens=null data.text=...'
        )
    return options
