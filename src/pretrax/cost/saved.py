"""The values that the backward pass of a layer keeps by name (`model.save`), and the products that it repeats.

Letters as in memory.py. A value that is neither kept nor in host memory is computed again, with the product that makes
it. The result of w_down is needed again only by a norm after the block.
"""

import dataclasses

from pretrax.cost.step_facts import BYTES, StepFacts
from pretrax.model.architecture import Architecture


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """A value that `model.save` names, on average over the layers."""

    values: float  # numbers per token
    params: float  # parameters of the product that makes it, per token; 0: none


def saved_values(arch: Architecture, step: StepFacts) -> dict[str, SavedValue]:
    """The values of a layer by their names. 'input' is not among them: it is kept unless it is in host memory."""
    with_attention, with_state = arch.n_attention_layers / arch.n_layers, arch.n_recurrent_layers / arch.n_layers
    with_experts, width = arch.n_expert_layers / arch.n_layers, BYTES[step.compute]
    of_experts = with_experts * arch.experts.experts_per_token * arch.feed_forward.d_ff
    dense = (1 - with_experts) * arch.sizes['F'] + with_experts * arch.experts.d_shared
    is_exchanged = step.mesh.get('e', 1) > 1 and arch.experts.n_experts > 1
    near = dense + (0 if is_exchanged else of_experts)  # an exchange over e keeps nothing
    n_heads, gated = arch.attention.n_heads, arch.feed_forward.gated
    keys = with_state * arch.recurrent.n_key_heads * arch.recurrent.d_key
    states = with_state * arch.recurrent.n_heads * arch.recurrent.d_head
    mixed = with_attention * n_heads * arch.mean_of_heads(lambda heads: heads.d_value)
    of_attention = {
        'q': with_attention * n_heads * arch.mean_of_heads(lambda heads: heads.d_query),
        'k': with_attention * arch.mean_of_heads(lambda heads: heads.n_kv * heads.d_query),
        'v': with_attention * arch.mean_of_heads(lambda heads: heads.n_kv * heads.d_value),
        'gate': arch.attention.gate * mixed,
    }
    # The parameters of latent attention are divided by width; without it this is d_model.
    rows = (with_attention * arch.mean_attention_params - mixed * arch.d_model) / max(1, sum(of_attention.values()))
    of_states = {'q': keys, 'k': keys, 'v': states, 'gate': states}
    found = {
        name: SavedValue(wide + of_states[name], rows * wide + arch.d_model * of_states[name])
        for name, wide in of_attention.items()
    }
    gate = near if gated else 0.0
    found['gate'] = SavedValue(found['gate'].values + gate, found['gate'].params + arch.d_model * gate)
    # and the logsumexp of its scores, in f32
    found['attention'] = SavedValue(mixed + with_attention * n_heads * 4 / width + states, 0.0)
    found['attention_out'] = SavedValue(arch.d_model, arch.d_model * (mixed + states))
    found['up'] = SavedValue(near, arch.d_model * near)
    normed = arch.n_norms == 4
    found['mlp_out'] = SavedValue(arch.d_model * normed, arch.d_model * near * normed)
    return found


def offloaded_activations(arch: Architecture, step: StepFacts) -> float:
    """Bytes of the activations of a pass that each device keeps in host memory."""
    n = {axis: step.mesh.get(axis, 1) for axis in 'rdectp'}
    offloaded = [name for name, choice in (step.saved or {}).items() if choice == 'offload']
    known = saved_values(arch, step) | {'input': SavedValue(arch.d_model, 0.0)}
    values = sum(known[name].values for name in offloaded if name in known)
    layers = arch.n_layers / n['p']
    tokens = step.tokens * step.micro_batches / (n['r'] * n['d'] * n['e'] * n['c'])
    return BYTES[step.compute] * layers * tokens * values / n['t']


def repeated_products(arch: Architecture, step: StepFacts) -> dict[str, float]:
    """{name of a value: parameters per token of the products that the backward pass repeats for it, in all layers}."""
    saved, values = step.saved if step.inputs is None else {}, saved_values(arch, step)
    if saved is None:
        return {}
    is_exchanged = step.mesh.get('e', 1) > 1 and arch.experts.n_experts > 1
    layers = arch.n_layers + arch.multi_token.n_layers
    found = {
        name: layers * one.params
        for name, one in values.items()
        if one.params and saved.get(name, 'recompute') == 'recompute'
    }
    if is_exchanged:  # it keeps nothing, and the results of w_down are not needed: see model/exchange.py
        of_token = arch.experts.experts_per_token * arch.d_model * arch.feed_forward.d_ff
        found['experts'] = arch.n_routers * of_token * (arch.feed_forward.n_matrices - 1)
    whole_stages = step.inputs is not None or (step.mesh.get('p', 1) > 1 and saved == {})
    if whole_stages and arch.n_norms != 4 and not arch.experts.n_experts:
        found['w_down'] = layers * values['up'].params
    return found


def repeated_share(arch: Architecture, step: StepFacts) -> float:
    """The part of the products of a forward pass through the layers that the backward pass repeats."""
    every = repeated_products(arch, dataclasses.replace(step, saved={}))
    return sum(repeated_products(arch, step).values()) / max(1.0, sum(every.values()))
