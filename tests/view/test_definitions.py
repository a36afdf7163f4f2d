"""Definitions of metrics; tests/docs/test_reference.py compares the keys with the source and the pages."""

import dataclasses

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.model.statistics import HeadStatistics, LayerStatistics
from pretrax.train.layer_statistics import weight_statistics
from pretrax.view.definitions import LAYER_DEFINITIONS, definition_of, definition_of_statistic
from small import LLAMA, mesh_of, transformer


def test_every_statistic_that_is_written_has_a_definition():
    written = {field.name for part in (LayerStatistics, HeadStatistics) for field in dataclasses.fields(part)}
    weights, arch = {'layers': {'q': np.ones((2, 3))}, 'embed': np.ones(4)}, transformer(LLAMA).arch
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), weights)
        found = weight_statistics(weights, weights, weights, shardings, arch)
    written |= {name.partition('/')[0] for name in found}
    assert written == set(LAYER_DEFINITIONS)
    assert definition_of_statistic('gradient_norm/q').name == 'gradient norm of q'


def test_a_source_of_a_mixture_has_the_definition_of_its_family():
    assert definition_of('val_loss/code').name == 'validation loss of code'
    assert definition_of('val_loss/code').unit == 'nats per token'


def test_an_unknown_key_is_named_after_itself():
    assert definition_of('my_number').name == 'my_number'
    assert definition_of('other/NAME').name == 'other/NAME'
