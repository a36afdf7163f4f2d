"""Optimizers by name, from Optax. Each returns a direction; rate, decay and clipping are lines of `step.py`."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from pretrax.errors import UserError
from pretrax.model.weights import matrix_dimensions
from pretrax.train.average import ScheduleFree
from pretrax.train.groups import settings_of, without_frozen
from pretrax.train.muon import Matrices, Polynomials, scale_by_muon, scale_by_neurons
from pretrax.train.skipping import InPlace
from pretrax.train.soap import scale_by_soap
from pretrax.train.step import Recipe

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
B1 = Annotated[Fraction, Field(description='decay of the average of gradients')]
B2 = Annotated[Fraction, Field(description='decay of the average of squared gradients')]
Eps = Annotated[Positive, Field(description='added to the root of the second moment, against a division by zero')]


def adamw(*, b1: B1 = 0.9, b2: B2 = 0.95, eps: Eps = 1e-8) -> optax.GradientTransformation:
    """Adam's direction; with decoupled decay it is AdamW. Loshchilov and Hutter 2019, arXiv:1711.05101."""
    return scale_by_adam_in_place(b1, b2, eps)


def scale_by_adam_in_place(b1: float, b2: float, eps: float) -> InPlace:
    """optax.scale_by_adam, whose new moments replace the old ones before the direction is computed.

    XLA for CPUs would compute the new moments again for the direction, from copies of the old ones: 8 bytes more per
    parameter.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, trains: jax.Array | bool = True, **_: Any
    ) -> tuple[Any, Any]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        new = optax.ScaleByAdamState(count, mu, nu)
        new = jax.tree.map(lambda a, b: jnp.where(trains, a, b), new, state)
        new = jax.lax.platform_dependent(new, cpu=jax.lax.optimization_barrier, default=lambda state: state)
        mean, square = optax.tree.bias_correction(new.mu, b1, count), optax.tree.bias_correction(new.nu, b2, count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mean, square), new

    return InPlace(optax.scale_by_adam(b1, b2, eps).init, update)


def adafactor(
    *,
    decay_rate: Annotated[Fraction, Field(description='step t decays the second moment by 1 - t ** -decay_rate')] = 0.8,
    clip: Annotated[Positive, Field(description='largest root mean square of the update of one weight')] = 1.0,
    eps: Annotated[Positive, Field(description='added to squared gradients, against a division by zero')] = 1e-30,
) -> optax.GradientTransformation:
    """Factored second moments, update clipping. Shazeer and Stern 2018, arXiv:1804.04235."""
    moments = optax.scale_by_factored_rms(decay_rate=decay_rate, epsilon=eps)
    return optax.chain(moments, optax.clip_by_block_rms(clip))


def lion(
    *,
    b1: Annotated[
        Fraction, Field(description='part of the momentum in the direction; the gradient has the rest')
    ] = 0.9,
    b2: Annotated[Fraction, Field(description='decay of the momentum')] = 0.99,
) -> optax.GradientTransformation:
    """The sign of an interpolated momentum. Chen et al. 2023, arXiv:2302.06675."""
    return optax.scale_by_lion(b1=b1, b2=b2)


def sgd(
    *,
    momentum: Annotated[
        Fraction, Field(description='decay of the sum of gradients; 0: only the current gradient')
    ] = 0.0,
    nesterov: Annotated[bool, Field(description="Nesterov's momentum")] = False,
) -> optax.GradientTransformation:
    """The gradient, or its momentum."""
    return optax.trace(decay=momentum, nesterov=nesterov) if momentum else optax.identity()


def muon(
    matrices: Matrices = matrix_dimensions,
    *,
    momentum: Annotated[Fraction, Field(description='decay of the momentum of matrices')] = 0.95,
    iterations: Annotated[Count, Field(description='Newton-Schulz iterations')] = 5,
    polynomials: Annotated[Polynomials, Field(description='coefficients of the iterations')] = 'jordan',
    precision: Annotated[
        Literal['f32', 'bf16'], Field(description='dtype in which matrices are exchanged and multiplied')
    ] = 'f32',
    neuron_b2: Annotated[
        Fraction | None,
        Field(description="NorMuon's decay of the mean square of the update of each output; none: Muon"),
    ] = None,
    qk_clip: Annotated[
        Positive | None,
        Field(description='attention logit above which queries and keys of a head are scaled down; none: they are not'),
    ] = None,
    rms: Annotated[Positive, Field(description='root mean square of the update of a matrix')] = 0.2,
    b1: Annotated[Fraction, Field(description='of Adam: decay of the average of gradients')] = 0.9,
    b2: Annotated[Fraction, Field(description='of Adam: decay of the average of squared gradients')] = 0.95,
    eps: Annotated[Positive, Field(description='added to a divisor, against a division by zero')] = 1e-8,
) -> optax.GradientTransformation:
    """Orthogonalized momentum for the layers' matrices, Adam for the rest. Jordan 2024,
    kellerjordan.github.io/posts/muon.

    Optax differs from Jordan in two ways: Adam has Nesterov's momentum too, and the bias of both momenta is corrected,
    in that of a matrix before it is orthogonalized. The updates of matrices are then a few percent apart in the first
    ten steps, and equal after about a hundred. `rms` is the root mean square of an update, so that Adam's learning rate
    serves both (arXiv:2502.16982, sec. 2.2). `polynomials: polar_express`: Amsel et al. 2025, arXiv:2505.16932.
    `neuron_b2`: NorMuon, Li et al. 2025, arXiv:2510.05491. `qk_clip`: MuonClip, Kimi Team 2025, arXiv:2507.20534,
    section 2.1.
    """
    del qk_clip  # the model has the logits, and clips (qk_clip.py)
    dtype = jnp.bfloat16 if precision == 'bf16' else None
    by_neuron = [] if neuron_b2 is None else [scale_by_neurons(matrices, neuron_b2, rms, eps)]
    rules: dict[Any, optax.GradientTransformation] = {
        'muon': optax.chain(
            scale_by_muon(
                matrices,
                momentum=momentum,
                iterations=iterations,
                rms=rms,
                eps=eps,
                polynomials=polynomials,
                dtype=dtype,
            ),
            *by_neuron,
        ),
        'adam': optax.chain(optax.scale_by_adam(b1, b2, eps, nesterov=True)),
    }

    def rule_of_each(weights: Any) -> Any:
        return jax.tree.map(lambda _, dims: 'adam' if dims is None else 'muon', weights, matrices(weights))

    return optax.chain(optax.partition(rules, rule_of_each))


def soap(
    matrices: Matrices = matrix_dimensions,
    *,
    b1: B1 = 0.95,
    b2: Annotated[Fraction, Field(description='decay of the second moment and of the preconditioners')] = 0.95,
    eps: Eps = 1e-8,
    precondition_frequency: Annotated[Count, Field(description='steps between improvements of the eigenvectors')] = 10,
    max_precond_dim: Annotated[Count, Field(description='wider dimensions have no preconditioner')] = 10000,
) -> optax.GradientTransformation:
    """Adam in the eigenbasis of Shampoo's preconditioner, for matrices and tables; Adam for the rest. arXiv:2409.11321.

    Every `precondition_frequency` steps the eigenvectors of a matrix improve, in each step those of other matrices. A
    dimension wider than `max_precond_dim`, such as a vocabulary, has no preconditioner.
    """
    return scale_by_soap(matrices, b1, b2, eps, precondition_frequency, max_precond_dim)


def schedule_free(
    *,
    b1: Annotated[Fraction, Field(description='how near the gradient is taken to the average of the weights')] = 0.9,
    b2: B2 = 0.95,
    eps: Eps = 1e-8,
) -> ScheduleFree:
    """Adam without momentum, whose weights are an average: for a constant rate.
    Defazio et al. 2024, arXiv:2405.15682.
    """
    moments = optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True)
    return ScheduleFree(moments, b1)


# Whether the optimizers that work on matrices count tables as such
_WITH_TABLES = {'muon': False, 'soap': True}
_SHOWN = 8  # names of weights in a line of the start-up report


def describe_matrices(name: str, recipe: Recipe, weights: Any) -> str:
    """A line of the start-up report: how many weights are updated as matrices, and which are not.

    '' for an optimizer that treats all weights alike. Frozen weights are left out.

    Raises:
        UserError: the model has no matrix.
    """
    if name not in _WITH_TABLES:
        return ''
    kept = without_frozen(weights, settings_of(recipe, weights))
    named = jax.tree_util.tree_leaves_with_path(kept)
    dims = jax.tree.structure(kept).flatten_up_to(recipe.model.matrix_dimensions(kept, tables=_WITH_TABLES[name]))
    matrices = [w for (_, w), one in zip(named, dims, strict=True) if one is not None]
    if not matrices:
        model = type(recipe.model).__name__
        raise UserError(
            f'optimizer.name = {name}: no weight that trains is a matrix, by matrix_dimensions of {model}\n'
            f'define {model}.matrix_dimensions (docs/architecture.md), or use optimizer.name=adamw'
        )
    verb = 'orthogonalizes' if name == 'muon' else 'rotates'
    others = [(path, w) for (path, w), one in zip(named, dims, strict=True) if one is None]
    layers = [re.sub(r'\b\d+\b', '*', jax.tree_util.keystr(path, simple=True, separator='.')) for path, _ in others]
    names = list(dict.fromkeys(layers))
    more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
    return (
        f'{name} {verb} {_count(matrices)}; AdamW updates {_count([w for _, w in others])}'
        f'{": " if names else ""}{", ".join(names[:_SHOWN])}{more}'
    )


def _count(weights: Sequence[Any]) -> str:
    return f'{len(weights)} weights with {sum(w.size for w in weights):,} parameters'
