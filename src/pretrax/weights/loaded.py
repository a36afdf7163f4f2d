"""A trained model that a verb loads to write text, from the command line or behind a server.

What needs JAX is imported when a model is loaded, so that a verb reports mistakes before.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretrax.errors import UserError
from pretrax.storage import AnyPath

if TYPE_CHECKING:
    from pretrax.data.chat.templates import ChatTemplate
    from pretrax.infer.answers import Asked
    from pretrax.infer.request import Serving

MOST_SLOTS = 8  # unless --slots says otherwise


class LoadedModel:
    """A trained model, loaded to write text.

    Args:
        template: a file with a chat template, instead of the model's own.
        dtype, mesh: as in `open_trained`.

    Attributes:
        tokenizer: of the model.
        max_length: the most tokens that it can read, or None.
        length: the most tokens of a text unless the user says otherwise; of an import its own length.
        end: tokens that end a text.
        compute: dtype of activations and matrix products.
        name: of the run, and the step.
    """

    def __init__(
        self,
        path: str,
        template: AnyPath | None = None,
        dtype: str | None = None,
        mesh: Mapping[str, int] | None = None,
    ):
        from pretrax.infer.sample import check_can_sample
        from pretrax.weights.trained import open_trained

        self.trained = open_trained(path, mesh, dtype)
        run = self.trained.run
        self.model = run.recipe.model
        check_can_sample(self.model, run.source)
        self.tokenizer: Any = run.source.tokenizer
        self.max_length: int | None = self.model.max_length
        self.length: int = self.max_length or self.trained.length
        self.end = self.trained.end_tokens
        self.compute = run.compute
        self._template = template
        self.name = f'{self.trained.run_dir}, step {self.trained.step}'

    def template(self) -> 'ChatTemplate | None':
        """The chat template; None: it is a base model."""
        from pretrax.data.chat.templates import read_chat_template

        return read_chat_template(self.trained.kept, self.tokenizer, self._template)

    def chat_template(self) -> 'ChatTemplate':
        """The chat template. Raises UserError if the model has none."""
        template = self.template()
        if template is None:
            raise UserError(
                f'{self.trained.run_dir}: a base model, which continues text: it has no chat template\n'
                'use --prompt, or give --chat-template FILE'
            )
        return template

    def engine(self, max_length: int, slots: int) -> 'Serving':
        """An engine for texts of at most `max_length` tokens."""
        from pretrax.infer.generate import open_engine

        weights, step = self.trained.weights(), self.trained.step
        return open_engine(self.model, weights, max_length=max_length, slots=slots, weights_step=step)

    def longest(self, slots: int) -> int:
        """The most tokens of a text by default: as many as the model reads and the cache has room for."""
        from pretrax.infer.programs import EngineOptions, fitting_length

        return fitting_length(self.model, self.trained.run.mesh, EngineOptions(max_length=self.length, slots=slots))

    def engine_for(self, asked: Sequence['Asked'], slots: int | None) -> 'Serving':
        """An engine with room for the longest of the answers."""
        longest = max((len(one.request.prompt) + one.request.max_tokens for one in asked), default=1)
        return self.engine(longest, slots or min(1 << (len(asked) - 1).bit_length(), MOST_SLOTS))

    def answer_length(self, prompt: Sequence[int], tokens: int | None) -> int:
        """See `infer.request.answer_length`."""
        from pretrax.infer.request import answer_length

        return answer_length(len(prompt), tokens, self.max_length)
