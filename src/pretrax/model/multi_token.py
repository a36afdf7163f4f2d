"""Multi-token prediction: each module after the last layer predicts one more token ahead, and has a loss of its own.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. At token i, module k combines the hidden state of module k - 1 (module
0 is the decoder) with the embedding of token i + k, and predicts token i + k + 1. The embedding and the unembedding are
those of the decoder. Generation does not use the modules.

Letters: B batch, L length, M d_model, M_next d_model of a projection's result, V vocabulary.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture
from pretrax.model.context import local_columns
from pretrax.model.ends import embed, unembed
from pretrax.model.layer_spec import LayerSpec, Tokens
from pretrax.model.layers import join_results
from pretrax.model.loss import Batch, LossTerms, in_chunks, loss_terms
from pretrax.model.matmul import gather, product
from pretrax.model.norm import norm
from pretrax.model.numerics import COMPUTE
from pretrax.model.routing import Routed
from pretrax.model.weights import Ends, MultiToken
from pretrax.shardlib import all_gather, f32, i32, num, save, typechecked, unroll

if TYPE_CHECKING:
    from pretrax.model.transformer import Transformer


def predict_ahead(
    model: 'Transformer', w: MultiToken, ends: Ends, x: jax.Array, routed: Routed | None,
    batch: Batch, tokens: Tokens,
) -> tuple[LossTerms, Routed | None]:  # fmt: skip
    """The terms of the modules, from the last hidden states; and the statistics of all routers."""
    # Equations 21 to 25. Products of the modules are in the compute dtype. `routed` are the statistics of the decoder.
    arch, plan = model.arch, model.plan
    if not arch.multi_token.n_layers:
        return {}, routed
    columns = local_columns(batch.tokens, plan.context)
    h, terms = norm(x, ends.norm, ends.norm_bias, arch), LossTerms()
    sums, of_routers = [], [routed]
    for k in range(1, arch.multi_token.n_layers + 1):
        later = ahead(batch, columns, k)
        one = jax.tree.map(lambda array, k=k: array[k - 1], w)
        spec = LayerSpec(arch, plan, arch.kinds[-1], COMPUTE, number=jnp.int32(arch.n_layers + k - 1))
        own = dataclasses.replace(ends, norm=one.norm, norm_bias=None)

        def module(
            h: jax.Array, w: MultiToken, later: Batch = later, spec: LayerSpec = spec
        ) -> tuple[jax.Array, Routed | None]:
            embedding = embed(ends.embedding, None, later.tokens, later.positions, arch, model.dtype)
            return model.layer_block(save(combined(h, embedding, w, arch), 'input'), w.layer, tokens, spec)

        def terms_of(y: num['B/r/d/e L/c/t M'], part: Batch, own: Ends = own) -> LossTerms:
            return loss_terms(unembed(own, y, arch, COMPUTE['head']), part, arch.vocab_size, 0.0)

        with jax.named_scope('multi_token'):
            y, (router,) = unroll([module], h, [one], plan.saved_in_layers)
            nll, count = in_chunks(terms_of, y, later, plan.loss_chunks)['nll']
        terms[f'mtp_loss/{k}'] = arch.multi_token.loss / arch.multi_token.n_layers * nll, count
        sums.append(jnp.stack([nll, count]))
        of_routers.append(jax.tree.map(lambda array: array[None], router))
        h = norm(y, one.norm, None, arch)
    table = jnp.stack(sums)
    return terms | {'multi_token': (table, None)}, join_results(of_routers, jnp.concatenate)


@typechecked
def combined(
    h: num['B/r/d/e L/c/t M'], embedding: num['B/r/d/e L/c/t M'], w: MultiToken, arch: Architecture
) -> num['B/r/d/e L/c/t M']:
    """The input of a module's layer, eq. 21: the normed hidden states and embeddings, projected together."""

    def projected(x: jax.Array, matrix: num['M/d M_next']) -> num['B/r/d/e L/c/t M_next']:
        matrix = gather('M/d M_next -> M M_next', matrix, x)
        return product('B/r/d/e L/c/t M, M M_next -> B/r/d/e L/c/t M_next', x, matrix, COMPUTE['from_hidden'])

    of_embedding = projected(norm(embedding, w.embedding_norm, None, arch), w.from_embedding)
    return of_embedding + projected(norm(h, w.hidden_norm, None, arch), w.from_hidden)


def ahead(batch: Batch, columns: i32['L/c'], k: int) -> Batch:
    """The batch with the tokens and targets of k positions later; past the end of a row, with its last ones.

    The mask is 0 for targets in another document or past the end. Their tokens still count in the loads of experts.
    """
    order = all_gather('L/c -> L', columns)
    there = columns + k
    source = jnp.argsort(order)[jnp.minimum(there, order.shape[0] - 1)]

    def later(x: jax.Array) -> jax.Array:
        return jnp.take(all_gather('B/r/d/e L/c -> B/r/d/e L', x), source, axis=1)

    same = (there < order.shape[0]) & (later(batch.segments) == batch.segments)
    mask = jnp.where(same, later(batch.mask), 0)
    return Batch(later(batch.tokens), later(batch.targets), batch.segments, batch.positions, mask)


def ahead_denominators(batch: Batch, model: 'Transformer') -> dict[str, f32['']]:
    """The denominators of the terms of `predict_ahead`. They depend only on the batch."""
    arch, columns = model.arch, local_columns(batch.tokens, model.plan.context)
    modules = range(1, arch.multi_token.n_layers + 1)
    return {f'mtp_loss/{k}': jnp.sum(ahead(batch, columns, k).mask) for k in modules}


def ahead_metrics(tables: dict[str, Any]) -> dict[str, f32['']]:
    """`mtp_nll/1` and so on: each module's mean cross-entropy without its weight; NaN if documents are too short."""
    if 'multi_token' not in tables:
        return {}
    return {f'mtp_nll/{k}': total / count for k, (total, count) in enumerate(tables['multi_token'], start=1)}
