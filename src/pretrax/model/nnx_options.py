"""The options of a Flax NNX module: `model: {name: nnx, target: package.module:Class, ...}`. No JAX."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class NnxOptions(BaseModel):
    """Which module, what it is built with, and how its names for mesh axes are ours."""

    model_config = ConfigDict(extra='forbid', frozen=True, strict=True)

    target: str = Field(pattern=r'^[\w.]+:\w+$', description='package.module:Class, an nnx.Module')
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description='arguments of the class; vocab_size, sequence_length, dtype and rngs are supplied',
    )
    axes: dict[str, str | list[str]] = Field(
        default={'batch': ['r', 'd', 'e'], 'data': ['r', 'd'], 'model': 't'},
        description="mesh axes for the names in the module's annotations; r, d, e, c and t mean themselves",
    )
    flops_per_token: float | None = Field(
        None, gt=0, description='training FLOPs for one token, for MFU; null: 6 x parameters'
    )
