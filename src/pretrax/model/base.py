"""The base class of every model: what training, planning and generation ask of a model, with a default for each.

A model of your own derives from `Model` and defines `Weights`, `init` and `loss`; everything else has a default.
`examples/my_model.py` is one in 20 lines.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture
from pretrax.model.dropout import token_seeds
from pretrax.model.loss import Batch, LossTerms
from pretrax.model.plan import ExecutionPlan
from pretrax.shardlib import f32, i32, make_shardings, num

type MatrixAxes = tuple[tuple[int, ...], tuple[int, ...]]  # of the inputs of a matrix, and of its outputs


class Model:
    """A model whose code runs per device, inside `typed_shard_map`, with its collectives written out."""

    Weights: Any
    """The type of the weights: a `pytree_dataclass` of array types, which give shardings and checkpoints."""

    Constants: Any = None
    """The type of arrays that `loss` needs in training,
    that no step changes and no checkpoint has. None: it needs none.
    """

    uninherited: tuple[str, ...] = ()
    """Names of weights that a run draws although it starts from another checkpoint, which has none for this model."""

    arch: Architecture | None = None
    """The sizes of a decoder. Without them memory and running time are not estimated."""

    teacher_arch: Architecture | None = None
    """The sizes of a teacher that runs forward in each step of training. None: there is none."""

    kept_states: int = 0
    """Layers of the teacher whose hidden states are kept until the loss."""

    plan: ExecutionPlan = ExecutionPlan()
    """How the model runs. The default is a model without a pipeline that keeps every activation."""

    choices: Mapping[str, str] = {}
    """What was chosen for this run and why, by topic: lines of the start-up report."""

    flops_per_token: float | None = None
    """Training FLOPs per token, for MFU. None: computed from `arch`, and without `arch` there is no MFU."""

    max_length: int | None = None
    """The longest sequence that the model can read. None: any length."""

    vocab_size: int | None = None
    """The columns of the logits that are tokens; generation ignores the rest. None: all of them."""

    column_order: np.ndarray | None = None
    """The order in which the columns of a batch are sharded over the mesh axis c. None: as they are."""

    draws: bool = False
    """Whether the model draws random numbers in training. If so, `loss` gets a `key`, except in an evaluation."""

    survey: Callable[[Any, Batch], Any] | None = None
    """weights, batch -> sums that `loss` needs of the whole step. None: `loss` needs only its own micro-batch.

    If a step has several micro-batches, the sums of all of them are the third argument of `loss`.
    """

    gradient: Callable[[Any, Batch, dict[str, Any]], tuple[Any, LossTerms]] | None = None
    """weights, batch, {term: denominator of the whole step} -> gradient of the loss, terms of `loss`. Runs per device.

    For a model that computes its gradient in an order of its own. None: JAX differentiates `loss`.
    """

    def init(self, key: jax.Array) -> Any:
        """Initial weights, f32. Runs under `jit`; use keys that depend only on a weight's name, not on the mesh."""
        raise NotImplementedError(f'{type(self).__name__}.init')

    def shardings(self, like: Any) -> Any:
        """The sharding of each weight on the current mesh, from `Weights`; `like` has their shapes."""
        del like
        return make_shardings(self.Weights)

    def loss(self, weights: Any, batch: Batch) -> LossTerms:
        """{name: (numerator, denominator)}: this device's partial sums over `axes.TOKENS`. Runs per device.

        The loss is the sum of the quotients of the totals. A step whose denominators are all 0 has nothing to learn,
        and changes nothing; a term whose denominator is 0 is left out. A denominator of None marks a table of sums,
        f32['rows columns'], for `summarize`.
        """
        raise NotImplementedError(f'{type(self).__name__}.loss')

    def abstract_constants(self) -> Any:
        """Shapes, dtypes and shardings of the constants, on the current mesh. None: `loss` needs none.

        Otherwise `loss` gets them as `constants=` in training, and without them it is that of an evaluation.
        """
        return None

    def with_seeds(self, batch: Batch, key: jax.Array | None = None) -> Batch:
        """The batch of a step with random words per token, if a decoder has dropout. Under `jit`, on whole arrays."""
        if key is None or batch.seeds is not None or self.arch is None or not self.arch.drops:
            return batch
        return dataclasses.replace(batch, seeds=token_seeds(key, batch.tokens.shape, self.column_order))

    def denominators(self, batch: Batch) -> dict[str, f32['']]:
        """The denominators of `loss`, computed from the batch. By default, that of a loss of one term, 'nll'."""
        return {'nll': jnp.sum(batch.mask)}

    def summarize(self, tables: dict[str, f32['rows columns']]) -> dict[str, f32['']]:
        """Metrics from the tables of `loss`, summed over a step."""
        del tables
        return {}

    def adjust(self, weights: Any, tables: dict[str, f32['rows columns']]) -> Any:
        """The weights after a step, with what no gradient moves; `tables` are those of `loss`, summed over the step."""
        del tables
        return weights

    def matrix_dimensions(self, weights: Any, tables: bool = False) -> Any:
        """The input and output dimensions of each matrix, a `MatrixAxes`, for optimizers such as Muon and SOAP.

        The remaining dimensions count matrices. None for other weights, which get Adam's update: the default of all,
        since neither the name nor the rank of a weight says what the model does with it.

        Args:
            weights: or a gradient; any of them may be absent.
            tables: whether embeddings and the projection to the vocabulary are matrices too.
        """
        del tables
        return jax.tree.map(lambda _: None, weights)

    def logits(self, weights: Any, tokens: i32['B/r/d/e L/c']) -> num['B/r/d/e L/c V/t']:
        """The logits of whole sequences, one document per row. Runs per device. A model with them can generate text.

        The logits of a token may not depend on the tokens after it. Columns past the vocabulary are ignored.
        """
        raise self._no_logits()

    @property
    def can_generate(self) -> bool:
        """Whether the model defines `logits`."""
        return type(self).logits not in (Model.logits, AutomaticModel.logits)

    def _no_logits(self) -> UserError:
        return UserError(
            f'{type(self).__name__} cannot generate text: it has no logits\ndefine the method logits(weights, tokens)'
        )


class AutomaticModel(Model):
    """A model whose code sees whole arrays and runs under `jit`: XLA shards it and adds the communication."""

    def shardings(self, like: Any) -> Any:
        """The sharding of each weight on the current mesh; `like` has their shapes."""
        raise NotImplementedError(f'{type(self).__name__}.shardings')

    def make_gradients(self, accumulation: int) -> Callable[[Any, Batch], tuple[Any, LossTerms, dict]]:
        """weights, batch -> gradient of the mean loss in `accumulation` passes, the sums of its terms, and tables.

        The gradient of a term whose denominator is 0 has to be 0: divide by `nonzero` of it.
        """
        raise NotImplementedError(f'{type(self).__name__}.make_gradients')

    def make_evaluate(self) -> Callable[[Any, Batch], dict[str, tuple[jax.Array, jax.Array]]]:
        """weights, batch -> numerator and denominator of every term of the loss."""
        raise NotImplementedError(f'{type(self).__name__}.make_evaluate')

    def logits(self, weights: Any, tokens: i32['B L']) -> num['B L V']:
        """The logits of whole sequences, as whole arrays. A model that has them can generate text."""
        raise self._no_logits()


def weight_shardings(model: Model, weights: Any) -> Any:
    """The sharding of every weight on the current mesh, as a tree like `weights`."""
    prefix = model.shardings(weights)
    return jax.tree.map(lambda sharding, part: jax.tree.map(lambda _: sharding, part), prefix, weights)


def check_model(model: object, name: str) -> Model:
    """The model, if it is one. Raises UserError if its class does not derive from `Model`."""
    if isinstance(model, Model):
        return model
    raise UserError(
        f'model.name={name}: {type(model).__name__} is not a model of pretrax\n'
        f'derive it from Model: from pretrax.model.base import Model; class {type(model).__name__}(Model)'
    )
