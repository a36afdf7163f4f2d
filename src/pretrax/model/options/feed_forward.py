"""The options of the feed-forward and of a mixture of experts, and which fit together. No JAX here.

In every check, `chosen` has all options and `said` those of the configuration, by dotted key.
"""

import math
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pretrax.errors import UserError
from pretrax.model.options.section import Choice, LayerNumbers, Section, option

UNGATED = ('gelu', 'gelu_erf', 'relu2')  # activations without a gate


class FeedForwardOptions(Section):
    """The feed-forward."""

    d_ff: Choice[NonNegativeInt] = option(
        description='width (default 4 d_model, or 8/3 if gated); 0: layers have no feed-forward'
    )
    activation: Choice[Literal['swiglu', 'swiglu_oai', 'geglu', 'gelu', 'gelu_erf', 'relu2']] = option(
        description='swiglu, swiglu_oai and geglu are gated (default: of the family)'
    )
    swiglu_limit: Choice[PositiveFloat] = option(
        7.0, changes='forward', description='swiglu_oai clamps gate and up to it (default 7)'
    )
    bias: Choice[bool] = option(
        former='mlp_bias', description='biases on the feed-forward, on experts and their router (default: model.bias)'
    )

    @property
    def gated(self) -> bool:
        """Whether it has a gate."""
        return self.activation not in UNGATED

    @property
    def n_matrices(self) -> int:
        """Its matrices: up, down and perhaps a gate."""
        return 2 + self.gated

    def describe(self) -> str:
        """For the start-up report."""
        limit = f' (values up to {self.swiglu_limit:g})' if self.activation == 'swiglu_oai' else ''
        return self.activation + limit


class RouterOptions(Section):
    """How tokens are distributed among experts."""

    scores: Choice[Literal['softmax', 'sigmoid']] = option(
        'softmax',
        former='router_scores',
        description='how the router scores experts: softmax over all of them (default), or sigmoid of each',
    )
    bias: Choice[bool] = option(
        False,
        former='router_bias',
        description='a bias of each expert, added to its score when experts are chosen, balances the load (default no)',
    )
    bias_rate: Choice[NonNegativeFloat] = option(
        0.001,
        former='router_bias_rate',
        changes='training',
        description='with bias: how far each step moves the biases, up if an expert has less than an even load '
        '(default 0.001)',
    )
    n_groups: Choice[PositiveInt] = option(
        1, former='n_expert_groups', description='groups of neighboring experts (default 1: none)'
    )
    groups_per_token: Choice[PositiveInt] = option(
        1, description="groups that a token's experts are chosen from: those with the highest group_scores"
    )
    group_scores: Choice[Literal['max', 'top2']] = option(
        'max', description="a group's score: its highest, or the sum of its two highest (default max)"
    )
    normalize: Choice[bool] = option(
        True, former='normalize_router', description="a token's weights on its experts sum to one"
    )
    scale: Choice[PositiveFloat] = option(
        1.0,
        former='router_scale',
        changes='forward',
        description="multiplies a token's weights on its experts, after normalize (default 1)",
    )
    weigh_inputs: Choice[bool] = option(
        False, description="a token's weights multiply what its experts read, not what they give (default no)"
    )
    balance_loss: Choice[NonNegativeFloat] = option(
        0.01, changes='training', description='weight of the load-balance loss (default 0.01)'
    )
    balance_over: Choice[Literal['sequence', 'batch']] = option(
        'sequence',
        changes='training',
        description='whether the load is balanced in each sequence (default) or over the batch',
    )
    z_loss: Choice[NonNegativeFloat] = option(
        0.0, former='router_z_loss', changes='training', description="weight of mean(log(Z)^2) of the router's logits"
    )


class ExpertsOptions(Section):
    """A mixture of experts."""

    n_experts: Choice[NonNegativeInt] = option(
        0, description='feed-forwards that a router chooses from (default 0: one feed-forward, no router)'
    )
    experts_per_token: Choice[PositiveInt] = option(2, description='experts per token (default 2)')
    dense_layers: Choice[LayerNumbers] = option(
        (), description='layers without experts: the first n, or a list of numbers from 0 (default 0: none)'
    )
    every: Choice[PositiveInt] = option(
        1, former='expert_every', description='every n-th layer has experts (default 1: all)'
    )
    d_ff_dense: Choice[PositiveInt] = option(
        0, description='width of the feed-forward of layers without experts (default: that of all active experts)'
    )
    d_shared: Choice[NonNegativeInt] = option(
        0, description='width of the shared expert, which every token uses (default 0: none)'
    )
    shared_gate: Choice[bool] = option(False, description="the shared expert's output is gated by the token")
    capacity: PositiveFloat | None = option(
        None,
        changes='training',
        description='tokens per expert and sequence, relative to an even share; null: no limit',
    )
    router: RouterOptions = Field(default=RouterOptions(), description='how tokens are distributed among experts')


# The options of a decoder without experts
NO_EXPERTS = ExpertsOptions.defaults('experts.') | {'experts.router.balance_loss': 0.0}


def check(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    """Changes `chosen`. Raises UserError."""
    n_experts, per_token = chosen['experts.n_experts'], chosen['experts.experts_per_token']
    if not n_experts:
        for name in filter(lambda name: name.startswith('experts.'), said):
            if name != 'experts.n_experts' and said[name] and (name, said[name]) != ('experts.every', 1):
                raise UserError(
                    f'model.{name} = {said[name]} applies to experts, but there are none\n'
                    'set model.experts.n_experts, or leave it out'
                )
        chosen.update(NO_EXPERTS)  # a preset whose experts were turned off
        return
    if n_experts == 1 or per_token > n_experts:
        raise UserError(
            f'model.experts.n_experts = {n_experts} with model.experts.experts_per_token = {per_token}\n'
            'use at least 2 experts, and no more experts per token than experts; model.experts.n_experts=0 is one '
            'feed-forward'
        )
    if not chosen['feed_forward.d_ff']:
        raise UserError(
            f'model.experts.n_experts = {n_experts} with model.feed_forward.d_ff = 0: experts without a width\n'
            'give model.feed_forward.d_ff, the width of an expert, or use model.experts.n_experts=0'
        )
    if chosen['feed_forward.activation'] in UNGATED:
        raise UserError(
            f'model.feed_forward.activation = {chosen["feed_forward.activation"]}: experts always have a gate\n'
            'use model.feed_forward.activation=swiglu'
        )
    if chosen['feed_forward.bias'] and chosen['experts.router.weigh_inputs']:
        raise UserError(
            'model.feed_forward.bias = true: experts whose inputs are weighed have no biases here\n'
            'use model.feed_forward.bias=false or model.experts.router.weigh_inputs=false'
        )
    if chosen['feed_forward.bias'] and chosen['experts.d_shared']:
        raise UserError(
            'model.feed_forward.bias = true: a shared expert has no biases here\n'
            'use model.feed_forward.bias=false or model.experts.d_shared=0'
        )
    if chosen['experts.shared_gate'] and not chosen['experts.d_shared'] and said.get('experts.shared_gate'):
        raise UserError(
            'model.experts.shared_gate = True, but there is no shared expert\ngive model.experts.d_shared, its width'
        )
    chosen['experts.shared_gate'] = chosen['experts.shared_gate'] and chosen['experts.d_shared'] > 0
    if said.get('experts.router.bias_rate') and not chosen['experts.router.bias']:
        raise UserError(
            f'model.experts.router.bias_rate = {said["experts.router.bias_rate"]} moves the biases of routers, but '
            'there are none\nuse model.experts.router.bias=true'
        )
    _check_groups(chosen)
    _check_dense_layers(chosen, said)


def _check_groups(chosen: dict[str, Any]) -> None:
    n_experts, groups = chosen['experts.n_experts'], chosen['experts.router.n_groups']
    used = chosen['experts.router.groups_per_token']
    if n_experts % groups:
        raise UserError(
            f'model.experts.n_experts = {n_experts} is not divisible by model.experts.router.n_groups = {groups}\n'
            f'use model.experts.router.n_groups={math.gcd(n_experts, groups)}'
        )
    if used > groups:
        raise UserError(
            f'model.experts.router.groups_per_token = {used} of model.experts.router.n_groups = {groups}\n'
            f'use at most {groups}'
        )
    if chosen['experts.experts_per_token'] > used * n_experts // groups:
        raise UserError(
            f'model.experts.experts_per_token = {chosen["experts.experts_per_token"]}, but {used} of {groups} groups '
            f'have {used * n_experts // groups} experts\n'
            'use a larger model.experts.router.groups_per_token, or fewer experts per token'
        )
    if chosen['experts.router.group_scores'] == 'top2' and n_experts == groups:
        raise UserError(
            'model.experts.router.group_scores = top2: a group has one expert\n'
            'use fewer groups (model.experts.router.n_groups), or max'
        )


def _check_dense_layers(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    n_layers, every, dense = chosen['n_layers'], chosen['experts.every'], chosen['experts.dense_layers']
    if isinstance(dense, tuple) and (wrong := [i for i in dense if i >= n_layers]):
        raise UserError(f'model.experts.dense_layers names layer {wrong[0]}, and the layers are 0 to {n_layers - 1}')
    dense = tuple(range(min(dense, n_layers))) if isinstance(dense, int) else tuple(sorted(set(dense)))
    chosen['experts.dense_layers'] = dense
    with_experts = [i for i in range(n_layers) if has_experts(i, dense, every)]
    if not with_experts:
        raise UserError(
            f'model.experts.dense_layers and model.experts.every leave none of the {n_layers} layers with experts\n'
            'use fewer dense layers, or model.experts.n_experts=0'
        )
    if len(with_experts) == n_layers:
        if said.get('experts.d_ff_dense'):
            raise UserError(
                'model.experts.d_ff_dense is the width of layers without experts, but there are none\n'
                'give model.experts.dense_layers'
            )
        chosen['experts.d_ff_dense'] = 0
    elif not chosen['experts.d_ff_dense']:
        chosen['experts.d_ff_dense'] = (
            chosen['experts.experts_per_token'] * chosen['feed_forward.d_ff'] + chosen['experts.d_shared']
        )


def has_experts(i: int, dense_layers: tuple[int, ...], expert_every: int) -> bool:
    """Whether layer i, from 0, of a decoder with experts has them."""
    return i not in dense_layers and (i + 1) % expert_every == 0
