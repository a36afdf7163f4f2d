"""The options of the data component `text`.

data: {text: stdlib}                               # the standard library's sources
data: {text: 'books/*.txt', validation: 0.01}      # files, directories, globs, or a list of them
data: {tokens: runs/mine/data/tokens-0a1b2c3d4e5f} # tokenised before
data: {tokens: train.bin}                          # by another tool: nanoGPT, Modalities, Megatron, seqax
data: {tokenizer: t.json, mixture: [{name: books, weight: 3, text: 'books/*.txt'}, {name: code, weight: 1, text: stdlib}]}
"""

import itertools
import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pretrax.data.corpus.selection import Filter
from pretrax.errors import UserError

STDLIB = 'stdlib'
PREFIX = 'hf:'  # of a data set of Hugging Face
_OF_TEXT = (  # keys that mean nothing without text
    'text', 'field', 'prompt_field', 'answer_field', 'filters', 'deduplicate', 'min_characters', 'max_characters',
    'on_error', 'hugging_face', 'validation', 'engine', 'workers',
)  # fmt: skip
_OF_ALL = {'packing', 'name', 'weight'}  # keys that mean something to text and tokens alike
_OF_TOKENS = ('validation_tokens', 'end_of_text')  # keys that mean nothing without `tokens`


class HuggingFaceOptions(BaseModel):
    """Which rows of a data set, and how they come."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    configuration: str | None = Field(
        None, description='which of the configurations of the data set; null: its default'
    )
    split: str = Field('train', description='which split; train[:10%] is a slice, unless streaming')
    streaming: bool = Field(False, description='true: read over the network while tokenising, keep nothing on the disk')
    revision: str | None = Field(None, description='a commit, tag or branch on the hub; null: the newest')


class TextOptions(BaseModel):
    """Text to train on, or tokens made of it before. null means: not given."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    text: str | list[str] | None = Field(
        STDLIB,
        description="'stdlib' (the Python standard library's sources), a file, a directory, a glob or a URL of these, "
        "'hf:NAME_OR_DIRECTORY', or a list",
    )
    tokens: str | None = Field(
        None, description='a prepared flat-tokens directory, or the token file of another tool, instead of text'
    )
    validation_tokens: str | None = Field(None, description='tokens to hold out, where those of `tokens` come without')
    end_of_text: int | None = Field(None, ge=0, description='the id that ends a document in a nanoGPT .bin')
    field: str | None = Field('text', description='the field of a row that holds the text; a.b is a field within one')
    prompt_field: str | None = Field(None, description='instead of field: the text before the answer, not learnt')
    answer_field: str | None = Field(None, description='the text that follows the prompt and is learnt')
    filters: list[Filter] | None = Field(None, description='conditions that a row has to meet, all of them')
    deduplicate: bool | None = Field(False, description='leave out documents whose text was there before')
    min_characters: int | None = Field(None, ge=1, description='leave out shorter documents')
    max_characters: int | None = Field(None, ge=1, description='leave out longer documents')
    on_error: Literal['fail', 'skip'] | None = Field('fail', description='what to do about a row that cannot be read')
    hugging_face: HuggingFaceOptions | None = Field(None, description='which rows of the data sets that text names')
    tokenizer: str | None = Field(
        None,
        description="a tokenizer.json, a directory that holds one, 'tiktoken:NAME' or 'bytes'; null trains a "
        'byte-level BPE on the text',
    )
    vocab_size: int | None = Field(
        4096, ge=257, description='tokens of the tokenizer to train; of a given tokenizer: what it must have'
    )
    validation: float | None = Field(0.05, ge=0, lt=1, description='fraction of the documents to hold out; 0: none')
    engine: Literal['local', 'ray'] | None = Field(
        'local', description="what tokenises: 'local' processes or a 'ray' cluster"
    )
    workers: int | None = Field(None, ge=1, description='processes that tokenise; null: one for each core')
    packing: Literal['concatenate', 'whole', 'best_fit'] = Field(
        'concatenate',
        description='rows: windows of all the text; whole documents in order, with padding; or fitted best into rows',
    )
    mixture: 'tuple[MixtureItem, ...] | None' = Field(
        None,
        min_length=1,
        description='several sources, instead of text or tokens; each has name, weight and keys as here',
    )
    exhausted: Literal['repeat', 'stop', 'drop'] | None = Field(
        None, description='a source of the mixture that is used up: begins again (default), ends the run, or drops out'
    )

    @model_validator(mode='before')
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Defaults depend on what is given: prepared tokens have no text, and a given tokenizer has its own size."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        if isinstance(given.get('mixture'), list | tuple):
            return _shared_by_mixture(cls, given)
        if 'tokens' in given:
            return dict.fromkeys(cls.model_fields.keys() - _OF_ALL) | given
        if 'prompt_field' in given or 'answer_field' in given:
            given = {'field': None} | given
        return {'vocab_size': None} | given if 'tokenizer' in given else given

    @model_validator(mode='after')
    def _exclusive(self) -> Self:
        if self.mixture is not None:
            return self._check_mixture()
        if self.exhausted is not None:
            raise ValueError('data.exhausted says what the sources of data.mixture do, and there is no mixture')
        ignored = [name for name in _OF_TEXT if getattr(self, name) is not None]
        if self.tokens is not None and ignored:
            raise ValueError(
                f'data.tokens is already tokenised text, and {", ".join(ignored)} would change nothing; '
                + ' '.join(f'data.{name}=null' for name in ignored)
                + ' removes what the configuration says'
            )
        if self.tokens is None and (given := [name for name in _OF_TOKENS if getattr(self, name) is not None]):
            raise ValueError(f'{", ".join(given)} is of token files, and data.tokens names none')
        if (self.prompt_field is None) != (self.answer_field is None):
            raise ValueError('prompt_field and answer_field belong together, and one of them is missing')
        if self.prompt_field is not None and self.field is not None:
            raise ValueError('prompt_field and answer_field stand in place of field; leave one or the other out')
        if (self.min_characters or 0) > (self.max_characters or float('inf')):
            raise ValueError(f'min_characters {self.min_characters:,} is more than max_characters')
        if self.hugging_face is not None and not any(spec.startswith(PREFIX) for spec in self.specs):
            raise ValueError(f"hugging_face is of data sets, and text names none; expected text: '{PREFIX}...'")
        if self.text is not None and not (self.text and all([self.text] if isinstance(self.text, str) else self.text)):
            raise ValueError("text names nothing; expected 'stdlib', a path, or a list of paths")
        return self

    @property
    def specs(self) -> list[str]:
        """What `text` names, as a list."""
        return [self.text] if isinstance(self.text, str) else self.text or []

    def _check_mixture(self) -> Self:
        for name in ('text', 'tokens', 'validation_tokens'):
            if getattr(self, name) is not None:
                raise ValueError(f'data.mixture has sources of its own; data.{name}=null removes the other one')
        assert self.mixture is not None
        names = [item.name for item in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f'mixture: names have to differ; given: {", ".join(names)}')
        if any(item.text is not None and item.tokenizer is None for item in self.mixture):
            raise ValueError(
                'a mixture of texts needs one tokenizer for all of them: data.tokenizer=path/tokenizer.json'
            )
        return self


class MixtureItem(TextOptions):
    """A source of a mixture. Keys that stand beside `mixture` hold for every source that does not say otherwise."""

    name: str = Field(
        pattern=r'^[A-Za-z0-9][\w.-]*$', max_length=60, description='in messages and metrics: val_loss/NAME'
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
        if not {'text', 'tokens'} & self.model_fields_set:
            raise ValueError(f'source {self.name!r} names neither text nor tokens')
        steps, weights = zip(*self.schedule, strict=True) if self.schedule else ((), ())
        if not steps or min(steps) < 0 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise ValueError('a weight over steps is [[step, weight], ...] with steps from 0 on that increase')
        if not all(0 <= weight < math.inf for weight in weights):
            raise ValueError('weights are 0 or more')
        return self


TextOptions.model_rebuild()


def _shared_by_mixture(options: type[TextOptions], given: dict[str, Any]) -> dict[str, Any]:
    """What stands beside `mixture` as the defaults of its sources, as far as it means something to each."""
    own_keys = ('mixture', 'exhausted', 'text', 'tokens')
    shared = {key: value for key, value in given.items() if key not in own_keys}
    of_text = {key: value for key, value in shared.items() if key not in _OF_TOKENS}
    of_tokens = {key: value for key, value in shared.items() if key in ('packing', 'end_of_text')}

    def item(own: Any) -> Any:
        if not isinstance(own, dict):
            return own
        own = {key: value for key, value in own.items() if value is not None}
        if isinstance(weight := own.get('weight'), list):  # strict checks want tuples, and YAML has lists
            own['weight'] = tuple(tuple(knot) if isinstance(knot, list) else knot for knot in weight)
        return (of_tokens if 'tokens' in own else of_text) | own

    return (
        dict.fromkeys(options.model_fields.keys() - _OF_ALL)
        | given
        | {'mixture': tuple(item(own) for own in given['mixture'])}
    )


def keys_of_text(options: TextOptions) -> list[str]:
    """The keys that were given and that would mean nothing beside `tokens`."""
    return [name for name in _OF_TEXT if name in options.model_fields_set and getattr(options, name) is not None]


def options_of_text(name: str, options: object) -> TextOptions:
    """The options of the data component `name`. Raises UserError if it does not read text."""
    if not isinstance(options, TextOptions):
        raise UserError(f'data.name: {name} makes batches without text\n  expected data.name=text')
    if options.tokens is not None:
        raise UserError(
            f'data.tokens: {options.tokens} is already tokenised\n  data.tokens=null data.text=... reads text'
        )
    return options
