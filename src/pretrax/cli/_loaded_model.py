"""A trained model that a command loads to write text, and how the text is shown."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pretrax.cli._arguments import load_plugins
from pretrax.errors import UserError, unfiltered_output

if TYPE_CHECKING:
    from pretrax.chat.templates import ChatTemplate
    from pretrax.infer.answers import Asked
    from pretrax.infer.request import Serving
    from pretrax.run.trained import Trained

MOST_SLOTS = 8  # unless --slots says otherwise


class LoadedModel:
    """A trained model, loaded to write text.

    Attributes:
        tokenizer: of the model.
        max_length: the most tokens that it can read, or None.
        length: tokens of an import's own length, or of a sequence in training.
        end: tokens that end a text.
        compute: dtype of activations and matrix products.
    """

    def __init__(self, path: str, plugins: Sequence[str], template: str | None = None, dtype: str | None = None):
        from pretrax.infer.sample import check_can_sample
        from pretrax.run.trained import open_trained

        load_plugins(plugins)
        self._trained: Trained = open_trained(path, dtype=dtype)
        run = self._trained.run
        check_can_sample(run.recipe.model, run.source)
        self.tokenizer: Any = run.source.tokenizer
        self.max_length: int | None = run.recipe.model.max_length
        self.length: int = self._trained.length
        self.end = self._trained.end_tokens
        self.compute = run.compute
        self._template = template
        self.name = f'{self._trained.directory.parent}, step {self._trained.step}'

    def template(self) -> 'ChatTemplate':
        """The chat template. Raises UserError if the model has none."""
        from pretrax.chat.templates import read_chat_template
        from pretrax.huggingface.model import KEPT
        from pretrax.storage import locate

        run_dir = self._trained.directory.parent
        file = None if self._template is None else locate(self._template)
        template = read_chat_template(run_dir / KEPT, self.tokenizer, file)
        if template is None:
            raise UserError(
                f'{run_dir}: a base model, which continues text: it has no chat template\n'
                'use --prompt, or give --chat-template FILE'
            )
        return template

    def engine(self, max_length: int, slots: int) -> 'Serving':
        """An engine for texts of at most `max_length` tokens."""
        from pretrax.infer.generate import open_engine

        model, weights = self._trained.run.recipe.model, self._trained.weights()
        return open_engine(model, weights, max_length=max_length, slots=slots, weights_step=self._trained.step)

    def longest(self, slots: int) -> int:
        """The most tokens of a text, unless the user says otherwise: as many as the model reads and the cache has room for."""
        from pretrax.infer.programs import EngineOptions, fitting_length

        model, mesh = self._trained.run.recipe.model, self._trained.run.mesh
        return fitting_length(model, mesh, EngineOptions(max_length=self.max_length or self.length, slots=slots))

    def engine_for(self, asked: Sequence['Asked'], slots: int | None) -> 'Serving':
        """An engine with room for the longest of the answers."""
        longest = max((len(one.request.prompt) + one.request.max_tokens for one in asked), default=1)
        return self.engine(longest, slots or min(1 << (len(asked) - 1).bit_length(), MOST_SLOTS))

    def check_length(self, prompt: Sequence[int], tokens: int) -> None:
        """Raises UserError if a prompt and its answer are longer than the model can read."""
        from pretrax.infer.request import check_positions

        check_positions(len(prompt), tokens, self.max_length)


class Speed:
    """Counts the tokens of a model, and prints how many a second there were."""

    def __init__(self, model: LoadedModel):
        self._compute = model.compute
        self._began = time.perf_counter()
        self.prompt_tokens = self.tokens = 0

    def report(self) -> None:
        seconds = max(time.perf_counter() - self._began, 1e-9)
        print(
            f'{self.tokens:,} tokens in {seconds:.1f} s, compilation included, computed in {self._compute}: {self.tokens / seconds:,.1f} tokens/s, '
            f'{self.prompt_tokens / seconds:,.1f} prompt tokens/s',
            file=sys.stderr,
        )


def show(text: str, end: str = '') -> None:
    """Prints text of a model at once: to a terminal without control characters, elsewhere as it is."""
    print(text, end=end, flush=True, file=None if sys.stdout.isatty() else unfiltered_output())
