"""A trained model that writes, scores and reads text: behind `pretrax.load`, `pretrax generate` and a server.

What needs JAX is imported when a model is loaded, so that a verb reports mistakes before.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from pretrax.errors import UserError
from pretrax.infer.sampling_settings import FIELDS, SETTINGS, WRITING, Sampling
from pretrax.storage import AnyPath

if TYPE_CHECKING:
    import jax
    import numpy as np

    from pretrax.config import RunConfig
    from pretrax.data.chat.templates import ChatTemplate
    from pretrax.data.tokenizers.tokenizer import Tokenizer
    from pretrax.evaluate.language_model import LanguageModel
    from pretrax.infer.answers import Asked
    from pretrax.infer.engine import Engine

DTYPES = ('f32', 'bf16', 'fp16')
MOST_SLOTS = 8  # unless --slots says otherwise


class LoadedModel:
    """A trained model on the devices of this machine. It prints in four lines.

    Args:
        path: a run, one of its checkpoints, or a Hugging Face checkpoint, which is imported for as long as the model
            is used.
        template: a file with a chat template, instead of the model's own.
        dtype, mesh: as in `open_trained`.

    Attributes:
        max_length: the most tokens that it can read; None: any number.
        length: the most tokens of a text unless the user says otherwise; of an import its own length.
        compute: dtype of activations and matrix products.
        name: of the run, and the step.
        place: the path of the run or checkpoint; of an import that of a temporary run.
    """

    def __init__(
        self,
        path: str,
        template: AnyPath | None = None,
        dtype: str | None = None,
        mesh: Mapping[str, int] | None = None,
    ):
        from pretrax.weights.imported import run_of
        from pretrax.weights.trained import open_trained

        with contextlib.ExitStack() as stack:
            self.place = stack.enter_context(run_of(path))
            self.trained = open_trained(self.place, mesh, dtype)
            weakref.finalize(self, stack.pop_all().close)
        run = self.trained.run
        self.model = run.recipe.model
        self.max_length: int | None = self.model.max_length
        self.length: int = self.max_length or self.trained.length
        self.compute = run.compute
        self._template = template
        self.name = path if self.place != path else f'{self.trained.run_dir}, step {self.trained.step}'

    @functools.cached_property
    def tokenizer(self) -> 'Tokenizer':
        """The tokenizer: `encode(text)` gives ids, and `decode(ids)` text.

        Raises UserError if the model cannot write text, or has no tokenizer.
        """
        from pretrax.infer.sample import check_can_sample

        source: Any = self.trained.run.source
        check_can_sample(self.model, source)
        return source.tokenizer

    @functools.cached_property
    def config(self) -> 'RunConfig':
        """The configuration that the model was trained with."""
        from pretrax.config import from_manifest

        return from_manifest(self.trained.description['config'])

    @functools.cached_property
    def weights(self) -> Any:
        """The weights on the devices, f32; `model.Weights` is their type."""
        return self.trained.weights()

    @property
    def end(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return self.trained.end_tokens

    @overload
    def generate(
        self,
        prompts: str = '',
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        **sampling: float | None,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompts: list[str] | tuple[str, ...],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        **sampling: float | None,
    ) -> list[str]: ...

    def generate(
        self,
        prompts: str | list[str] | tuple[str, ...] = '',
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        **sampling: float | None,
    ) -> str | list[str]:
        """The text after a prompt, or after each of several, as `pretrax generate` writes it.

        Args:
            prompts: texts to continue. The same prompt twice gets two different texts.
            max_tokens: most tokens of each text; None: 128, or as many as fit.
            stop: strings that end a text, which does not contain them.
            sampling: the settings of `pretrax generate`, with the same defaults: `temperature` (0.8), `top_k`, `top_p`,
                `min_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty` and `seed` (0).

        Raises:
            UserError: a setting is out of its range, or a prompt is longer than the model can read.
        """
        from pretrax.infer.answers import write

        asked = self._asked_for(_texts(prompts, 'prompts'), max_tokens, stop, sampling)
        texts = [''] * len(asked)
        for news in write(self.engine_for(asked, None), self.tokenizer, asked) if asked else ():
            texts[news.answer] += news.text
        return texts[0] if isinstance(prompts, str) else texts

    def stream(
        self,
        prompt: str = '',
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        **sampling: float | None,
    ) -> Iterator[str]:
        """The text of `generate` in pieces, as soon as they are written. Arguments and errors are those of `generate`.

        If the iterator is closed, the rest is not written.
        """
        from pretrax.infer.answers import write

        asked = self._asked_for(_texts(prompt, 'prompt'), max_tokens, stop, sampling)
        return (news.text for news in write(self.engine_for(asked, None), self.tokenizer, asked) if news.text)

    def _asked_for(
        self, prompts: Sequence[str], max_tokens: Any, stop: Any, sampling: Mapping[str, Any]
    ) -> 'list[Asked]':
        """The answers that `generate` is asked for. Raises UserError."""
        sampling = {name: _plain(value) for name, value in sampling.items() if value is not None}
        if unknown := [name for name in sampling if name not in SETTINGS]:
            near = difflib.get_close_matches(unknown[0], ['max_tokens', 'stop', *SETTINGS], 1, 0.6)
            hint = f'; did you mean {near[0]}?' if near else ''
            raise UserError(f'{unknown[0]} is not a setting{hint}\nsettings: max_tokens, stop, {", ".join(SETTINGS)}')
        stops = list(stop) if isinstance(stop, list | tuple) else [stop]
        given = {'stop': stops, **sampling} | ({} if max_tokens is None else {'max_tokens': _plain(max_tokens)})
        for name, value in given.items():
            expected, is_right = FIELDS[name]
            if not is_right(value):
                raise UserError(f'{name} is {value!r}'[:100] + f'; expected {expected}')
        how = dataclasses.replace(WRITING, **sampling)
        return self.asked(prompts, given.get('max_tokens'), how, tuple(stops))

    def asked(
        self, prompts: Sequence[str], max_tokens: int | None, sampling: Sampling, stop: tuple[str, ...], n: int = 1
    ) -> 'list[Asked]':
        """`n` answers to each prompt. Raises UserError if one is longer than the model can read."""
        from pretrax.infer.answers import Asked, encode_prompt
        from pretrax.infer.request import Request

        asked = []
        for prompt in prompts:
            ids = tuple(encode_prompt(self.tokenizer, prompt))
            tokens = self.answer_length(ids, max_tokens)
            for _ in range(n):
                request = Request(
                    prompt=ids, max_tokens=tokens, sampling=sampling, choice=len(asked), stop_ids=self.end
                )
                asked.append(Asked(request, stop))
        return asked

    def logits(self, tokens: 'np.typing.ArrayLike') -> 'jax.Array':
        """The logits of the token after each token: f32 [B, L, V], the same whole array on each device.

        The decoder computes as in an evaluation: in the dtype `compute`, and without the capacity of experts. All
        logits exist at once, 4 B L V bytes on each device.

        Args:
            tokens: integers [B, L], such as `[model.tokenizer.encode(text)]`; each row is a text from its first token.

        Raises:
            UserError: an id is not in the vocabulary, the shape is another, or L is more than the model can read.
        """
        import numpy as np

        try:
            ids = np.asarray(tokens)
        except ValueError:
            raise UserError('tokens has rows of different lengths\nread them one by one') from None
        if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise UserError(
                f'tokens is {ids.dtype} {list(ids.shape)}; expected integers [B, L]\nfor one text write logits([ids])'
            )
        if self.max_length is not None and ids.shape[1] > self.max_length:
            raise UserError(f'tokens has texts of {ids.shape[1]} tokens, but the model reads at most {self.max_length}')
        scorer, weights = self._scorer
        return scorer.logits(weights, ids)

    def evaluate(self, text: str | Sequence[str] | None = None, *, limit: int = 50, seed: int = 0) -> dict[str, float]:
        """`loss` in nats per token, and `bits_per_byte` of text, which does not depend on the tokenizer.

        Without a text: of the held-out text of the run, as its training measures `val_loss`, and `loss/NAME` of each
        part of a mixture. With a text: of excerpts of it, as `pretrax eval --text` measures a file.

        Args:
            text: a text, or several. They are read in excerpts of 2,000 characters.
            limit, seed: how many of them, and the seed of their choice.

        Raises:
            UserError: the run has no held-out text, or there is no text.
        """
        from pretrax.evaluate.results import run_task
        from pretrax.evaluate.task import Settings
        from pretrax.evaluate.text_tasks import own_text

        if text is None:
            return self._validation()
        task = own_text('text', _texts(text, 'text'), 'the text')
        found = run_task(self._language_model, task, Settings(limit=limit, seed=seed), print)
        return {name: metric.value for name, metric in found.items()}

    def _validation(self) -> dict[str, float]:
        import jax

        from pretrax.run.validation import Evaluation

        run = self.trained.run
        if not run.source.validation_parts:
            raise UserError(f'{self.name}: its data has no held-out text\ngive a text: evaluate(text)')
        batches = math.ceil(run.eval.batches * self.config.batch.largest.sequences / run.rows)
        with jax.set_mesh(run.mesh):
            losses = Evaluation(run).losses(self.weights, batches)
        return {key.removeprefix('val_'): value for key, value in losses.items()}

    @functools.cached_property
    def _scorer(self) -> Any:
        from pretrax.evaluate.scorer import Scorer

        scorer = Scorer(self.model, self.trained.run.mesh, min(self.length, self.trained.length))
        return scorer, scorer.prepare(self.weights)

    @functools.cached_property
    def _language_model(self) -> 'LanguageModel':
        from pretrax.evaluate.language_model import LanguageModel

        return LanguageModel(self.model, self.weights, self.tokenizer, length=self.trained.length, end=self.end)

    def __repr__(self) -> str:
        run = self.trained.run
        devices = f'{run.mesh.devices.size} x {run.mesh.devices.flat[0].platform}'
        tokenizer = getattr(run.source, 'tokenizer', None)
        tokens = 'no tokenizer' if tokenizer is None else f'a tokenizer of {tokenizer.vocab_size:,} tokens'
        return '\n'.join(
            [
                f'model: {self.name}',
                f'{self.config.model.name}, {run.n_params:,} parameters, {tokens}',
                f'reads {self.length:,} tokens, computes in {self.compute} on {devices}',
                'next: .generate(prompt), .logits(tokens), .evaluate()',
            ]
        )

    def template(self) -> 'ChatTemplate | None':
        """The chat template; None: it is a base model."""
        from pretrax.data.chat.templates import read_chat_template

        tokenizer: Any = self.tokenizer
        return read_chat_template(self.trained.kept, tokenizer, self._template)

    def chat_template(self) -> 'ChatTemplate':
        """The chat template. Raises UserError if the model has none."""
        template = self.template()
        if template is None:
            raise UserError(
                f'{self.trained.run_dir}: a base model, which continues text: it has no chat template\n'
                'use --prompt, or give --chat-template FILE'
            )
        return template

    def engine(self, max_length: int, slots: int) -> 'Engine':
        """An engine for texts of at most `max_length` tokens."""
        from pretrax.infer.generate import open_engine

        step = self.trained.step
        return open_engine(self.model, self.weights, max_length=max_length, slots=slots, weights_step=step)

    def longest(self, slots: int) -> int:
        """The most tokens of a text by default: as many as the model reads and the cache has room for."""
        from pretrax.infer.programs import EngineOptions, fitting_length

        return fitting_length(self.model, self.trained.run.mesh, EngineOptions(max_length=self.length, slots=slots))

    def engine_for(self, asked: Sequence['Asked'], slots: int | None) -> 'Engine':
        """An engine with room for the longest of the answers."""
        longest = max((len(one.request.prompt) + one.request.max_tokens for one in asked), default=1)
        return self.engine(longest, slots or min(1 << (len(asked) - 1).bit_length(), MOST_SLOTS))

    def answer_length(self, prompt: Sequence[int], tokens: int | None) -> int:
        """See `infer.request.answer_length`."""
        from pretrax.infer.request import answer_length

        return answer_length(len(prompt), tokens, self.max_length)


def _texts(given: Any, name: str) -> list[str]:
    """A text or several, as a list. Raises UserError."""
    texts = list(given) if isinstance(given, list | tuple) else [given]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f'{name} is {given!r}'[:100] + '; expected a text, or a list of texts')
    return texts


def check_dtype(dtype: str | None, name: str = '--dtype') -> None:
    """Raises UserError if the dtype of activations and matrix products is none of its choices."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f'{name} is {dtype}; expected f32, bf16 or fp16')


def _plain(value: Any) -> Any:
    """A number of NumPy or JAX as one of Python."""
    return value.item() if hasattr(value, 'item') and not getattr(value, 'shape', ()) else value
