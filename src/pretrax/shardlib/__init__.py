"""shardlib: multi-device programs in which sharding is part of an array's type and communication is a line of code.

It is independent of the rest of pretrax and knows nothing about language models. `docs/shardlib.md` introduces it.
"""

from pretrax.shardlib.check import apart, as_here, check, scope
from pretrax.shardlib.errors import ShardingError
from pretrax.shardlib.ops import (
    alike,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    defer_reduction,
    einsum,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
    take,
    whole,
    zero_gradient,
)
from pretrax.shardlib.save import Choice, recompute_by_name, save
from pretrax.shardlib.scan import as_carried, scan, unroll
from pretrax.shardlib.shard_map import typed_shard_map
from pretrax.shardlib.typechecked import typechecked
from pretrax.shardlib.types import (
    Array,
    Dim,
    bf16,
    bool_,
    f8,
    f8_e5m2,
    f16,
    f32,
    i8,
    i32,
    is_fully_sharded,
    key,
    make_abstract,
    make_partition_specs,
    make_shardings,
    num,
    parse_dims,
    pytree_dataclass,
    u8,
    u32,
)

__all__ = [
    'Array', 'Choice', 'Dim', 'ShardingError', 'alike', 'all_gather', 'all_to_all', 'apart', 'as_carried', 'as_here', 'axis_index', 'axis_size', 'bf16', 'bool_', 'check',
    'defer_reduction', 'einsum', 'f8', 'f8_e5m2', 'f16', 'f32', 'i8', 'i32', 'is_fully_sharded', 'key',
    'make_abstract', 'make_partition_specs', 'make_shardings', 'num', 'parse_dims', 'pmax', 'pmean', 'ppermute', 'psum',
    'psum_scatter', 'pytree_dataclass', 'recompute_by_name', 'save', 'scan', 'scope', 'take', 'typechecked',
    'typed_shard_map', 'u8', 'u32', 'unroll', 'whole', 'zero_gradient',
]  # fmt: skip
