"""Optimizers by name, from Optax. Each returns a direction; rate, decay and clipping are lines of `step.py`."""

from typing import Annotated

import optax
from optax import contrib
from pydantic import Field

from pretrax.model.weights import matrix_dimensions
from pretrax.train.average import ScheduleFree
from pretrax.train.soap import scale_by_soap

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]


def adamw(*, b1: Fraction = 0.9, b2: Fraction = 0.95, eps: Positive = 1e-8) -> optax.GradientTransformation:
    """Adam's direction; with decoupled decay it is AdamW. Loshchilov and Hutter 2019, arXiv:1711.05101."""
    return optax.scale_by_adam(b1=b1, b2=b2, eps=eps)


def adafactor(
    *, decay_rate: Fraction = 0.8, clip: Positive = 1.0, eps: Positive = 1e-30
) -> optax.GradientTransformation:
    """Factored second moments, update clipping. Shazeer and Stern 2018, arXiv:1804.04235."""
    moments = optax.scale_by_factored_rms(decay_rate=decay_rate, epsilon=eps)
    return optax.chain(moments, optax.clip_by_block_rms(clip))


def lion(*, b1: Fraction = 0.9, b2: Fraction = 0.99) -> optax.GradientTransformation:
    """The sign of an interpolated momentum. Chen et al. 2023, arXiv:2302.06675."""
    return optax.scale_by_lion(b1=b1, b2=b2)


def sgd(*, momentum: Fraction = 0.0, nesterov: bool = False) -> optax.GradientTransformation:
    """The gradient, or its momentum."""
    return optax.trace(decay=momentum, nesterov=nesterov) if momentum else optax.identity()


def muon(
    *,
    momentum: Fraction = 0.95,
    iterations: Count = 5,
    rms: Positive = 0.2,
    b1: Fraction = 0.9,
    b2: Fraction = 0.95,
    eps: Positive = 1e-8,
) -> optax.GradientTransformation:
    """Orthogonalized momentum for the layers' matrices, Adam for the rest. Jordan 2024, kellerjordan.github.io/posts/muon.

    Both with Nesterov's momentum, which Optax gives them together (Jordan's Adam has the plain one).
    `rms` is the root mean square of an update, so that Adam's learning rate serves both (arXiv:2502.16982, sec. 2.2).
    """
    descent = contrib.muon(
        1.0,
        beta=momentum,
        ns_steps=iterations,
        adam_b1=b1,
        adam_b2=b2,
        eps=eps,
        adam_learning_rate=1.0,
        consistent_rms=rms,
        muon_weight_dimension_numbers=matrix_dimensions,
    )
    return optax.chain(descent, optax.scale(-1.0))  # Optax's muon already points downhill


def soap(
    *,
    b1: Fraction = 0.95,
    b2: Fraction = 0.95,
    eps: Positive = 1e-8,
    precondition_frequency: Count = 10,
    max_precond_dim: Count = 10000,
) -> optax.GradientTransformation:
    """Adam in the eigenbasis of Shampoo's preconditioner, for matrices and tables; Adam for the rest. arXiv:2409.11321.

    Every `precondition_frequency` steps the eigenvectors are improved. A dimension wider than `max_precond_dim`, such as a
    vocabulary, has no preconditioner.
    """
    return scale_by_soap(b1, b2, eps, precondition_frequency, max_precond_dim)


def schedule_free(*, b1: Fraction = 0.9, b2: Fraction = 0.95, eps: Positive = 1e-8) -> ScheduleFree:
    """Adam without momentum, whose weights are an average: for a constant rate. Defazio et al. 2024, arXiv:2405.15682."""
    moments = optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True)
    return ScheduleFree(moments, b1)
