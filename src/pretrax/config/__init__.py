"""Configuration: YAML of values in, a checked and frozen `RunConfig` out. Imports no JAX."""

from pretrax.config.effects import effect_of, may_change_on_resume, values_in_step
from pretrax.config.json_schema import json_schema, json_schema_text
from pretrax.config.load import from_manifest, from_values, load, load_plugin, read_resolved
from pretrax.config.mesh import resolve_mesh, settle
from pretrax.config.registry import build, feature, plugin_factory, register
from pretrax.config.renamed import upgraded
from pretrax.config.schema import InitFrom, Mesh, Processes, RunConfig
from pretrax.config.show import (
    ABSENT,
    config_leaves,
    diff,
    diff_values,
    origin,
    printable_override,
    resolved_yaml,
    shown_prompts,
    shown_samples,
    written_values,
)
from pretrax.config.upgrade import upgrade_file
