"""Your own optimizer: the sign of the momentum. Bernstein et al. 2018, arXiv:1802.04434.

An optimizer is an Optax transformation that turns a gradient into a direction. pretrax applies the learning rate,
weight decay and clipping. Keyword-only parameters are the options in YAML.
"""

import jax
import jax.numpy as jnp
import optax

from pretrax import register


@register('optimizer', 'signum')
def signum(*, momentum: float = 0.9) -> optax.GradientTransformation:
    def update(updates, state, params=None):
        del params
        state = jax.tree.map(lambda m, gradient: momentum * m + (1 - momentum) * gradient, state, updates)
        return jax.tree.map(jnp.sign, state), state

    return optax.GradientTransformation(init=lambda params: jax.tree.map(jnp.zeros_like, params), update=update)
