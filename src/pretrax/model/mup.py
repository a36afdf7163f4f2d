"""Maximal update parametrization (muP): a learning rate found for one width and depth also fits others. No JAX here.

A model that is m times as wide as the base model, and l times as deep, differs from it as this table says. Everything
else stays as it is: embeddings, norms, biases and convolutions. The ratios between embedding, layers and logits are
therefore those of the base model, where `embedding_multiplier` and `logit_multiplier` are tuned (Yang et al. 2022,
section 6).

| what | initial standard deviation | learning rate | in the forward pass |
|---|---|---|---|
| matrices of the layers | m^-1/2 | m^-1; with Muon m^-1/2 | |
| routers, the gate of a shared expert, an unembedding of its own | m^-1 | m^-1 | |
| a tied unembedding | | | logits times m^-1 |
| what attention and feed-forward add | | l^(power - 1) for all weights of the layers | times l^-power |
| attention scores, if heads are wider | | | divided by the width of a head, not by its square root |

Sources: Yang et al. 2022, arXiv:2203.03466, tables 3 and 8; for depth, Yang et al. 2023, arXiv:2310.02244 (power 1/2)
and Dey et al. 2025, arXiv:2505.01618 (power 1); for Muon, whose update has a spectral norm of its own, Yang et al.
2023, arXiv:2310.17813, section 3: an update of norm sqrt(outputs / inputs), where Muon's here is in proportion to
sqrt(width).
"""

import dataclasses
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from pretrax.errors import UserError

# Matrices that Muon does not update, since their columns belong to heads
_OF_HEADS = ('linear_a', 'linear_beta')
# Weights whose outputs do not become more as the model becomes wider
_READOUTS = ('router', 'shared_mix', 'unembed')
_LAYERS = 'layers.'


class Mup(BaseModel):
    """The section `model.mup`: the base model, whose learning rate and initial values the configuration gives."""

    model_config = ConfigDict(extra='forbid', frozen=True, strict=True)

    base_width: Annotated[int, Field(gt=0)] = Field(description='d_model of the base model')
    base_layers: Annotated[int, Field(gt=0)] | None = Field(
        None, description='n_layers of the base model (default: depth changes nothing)'
    )
    depth_power: Annotated[float, Field(ge=0.5, le=1)] | None = Field(
        None, description='residual branches are multiplied by (n_layers / base_layers)^-power (default 1)'
    )
    base_d_head: Annotated[int, Field(gt=0)] | None = Field(
        None, description='d_head of the base model (default: that of this model)'
    )
    independent_decay: bool = Field(
        True, description='a weight whose learning rate is smaller decays as fast as before; false: slower'
    )


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How a decoder differs from the base model."""

    width: float  # d_model, relative to the base model
    depth: float  # n_layers, relative to the base model; 1 if depth changes nothing
    depth_power: float
    independent_decay: bool

    def __str__(self) -> str:
        deeper = f' and {self.depth:g} times as deep' if self.depth != 1 else ''
        return f'muP: {self.width:g} times as wide{deeper} as the base model'

    def init(self, name: str, is_matrix: bool) -> float:
        """What the initial standard deviation of a weight is multiplied by.

        Args:
            name: of the weight, without `layers.`.
            is_matrix: whether it is a matrix of a layer.
        """
        if name in _READOUTS:
            return 1 / self.width
        return self.width**-0.5 if is_matrix or name in _OF_HEADS else 1.0

    def rate(self, name: str, is_matrix: bool, matrix_power: float) -> float:
        """What the learning rate of a weight is multiplied by.

        Args:
            name: of the weight.
            is_matrix: whether it is a matrix of a layer.
            matrix_power: the learning rate of matrices is in proportion to width^-power with this optimizer.
        """
        last = name.rpartition('.')[2]
        factor = self.depth ** (self.depth_power - 1) if name.startswith(_LAYERS) else 1.0
        if last in (*_READOUTS, *_OF_HEADS):
            return factor / self.width
        return factor * self.width**-matrix_power if is_matrix else factor


def apply_mup(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    """Changes the multipliers of a decoder, and replaces the section `mup` by its `Scaling`. Raises UserError."""
    if chosen['mup'] is None:
        return
    mup = Mup.model_validate(chosen['mup'])
    width = chosen['d_model'] / mup.base_width
    depth = chosen['n_layers'] / mup.base_layers if mup.base_layers else 1.0
    power = 1.0 if mup.depth_power is None else mup.depth_power
    if mup.depth_power is not None and not mup.base_layers:
        raise UserError(
            f'model.mup.depth_power = {mup.depth_power:g} is relative to base_layers\ngive model.mup.base_layers'
        )
    if mup.base_d_head and mup.base_d_head != chosen['attention.d_head']:
        if chosen['attention.latent.kv_rank']:
            raise UserError(
                'model.mup.base_d_head does not fit latent attention (model.attention.latent.kv_rank)\nleave it out'
            )
        if said.get('attention.query_pre_attn_scalar'):
            raise UserError(
                'model.mup.base_d_head and model.attention.query_pre_attn_scalar both say what scores are divided by\n'
                'leave out one'
            )
        usual = chosen['attention.query_pre_attn_scalar'] or chosen['attention.d_head']
        chosen['attention.query_pre_attn_scalar'] = usual * chosen['attention.d_head'] / mup.base_d_head
    if chosen['embedding.tied']:
        chosen['head.multiplier'] /= width
    if chosen['embedding.scale']:  # by the square root of the width of the base model
        chosen['embedding.multiplier'] *= width**-0.5
    chosen['block.residual_multiplier'] *= depth**-power
    chosen['mup'] = Scaling(width, depth, power, mup.independent_decay)
