"""The table of names: every option of a stored flat section has one place in the sections, and comes back."""

import pytest
from pydantic import BaseModel

from former import flat, stored_config
from pretrax.model.architecture import KEYS
from pretrax.model.choices import DEFAULTS, NO_ATTENTION, NO_STATES, TransformerOptions, presets
from pretrax.model.families import families
from pretrax.model.option_names import RENAMED, SECTIONS, dotted, is_former, nest
from pretrax.model.options.feed_forward import NO_EXPERTS
from pretrax.model.rope_scaling import RopeScaling

# Options that 0.1 did not have, and no former name.
LATER = {
    'attention.global_d_head', 'attention.global_k_as_v', 'attention.global_n_kv_heads', 'attention.v_norm',
    'block.layer_scale',
}  # fmt: skip
STORED = {key: value for key, value in stored_config()['model'].items() if key != 'name'}


def sections(model: type[BaseModel] = TransformerOptions, path: str = '') -> dict[str, type[BaseModel]]:
    """The options classes of the sections, by dotted key."""
    found = {path: model}
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            found |= sections(type(field.default), f'{path}.{name}'.removeprefix('.'))
    return found


def test_every_stored_option_has_one_key():
    keys = {f'{path}.{name}'.removeprefix('.') for path, model in sections().items() for name in model.model_fields}
    assert {RENAMED.get(name, name) for name in STORED} == keys - {*sections()} - LATER
    assert keys > LATER
    assert len({RENAMED.get(name, name) for name in STORED}) == len(STORED) == 96
    assert {*SECTIONS, ''} == {*sections()}


def test_no_class_of_options_is_long():
    assert {path: len(model.model_fields) for path, model in sections().items() if len(model.model_fields) > 30} == {}


def test_a_stored_section_means_the_same():
    options = TransformerOptions(**nest(STORED))
    stored = {key: tuple(value) if isinstance(value, list) else value for key, value in dotted(nest(STORED)).items()}
    scaling = RopeScaling(**STORED['rope_scaling'])
    assert options.dotted() == {key: value for key, value in stored.items() if value is not None} | {
        'rope.scaling': scaling
    }
    assert options.attention.window == 8
    assert options.attention.kernel == 'blockwise'
    assert options.head.softcap == 20.0
    assert options.block.dropout == 0.1


def test_nesting_can_be_repeated_and_undone():
    numbered = {name: number for number, name in enumerate(STORED)}
    assert flat(nest(numbered)) == numbered
    assert nest(nest(numbered)) == nest(numbered)
    assert nest({'attention': {'n_heads': 2}, 'd_head': 8}) == {'attention': {'n_heads': 2, 'd_head': 8}}
    assert nest({'attention': {'n_head': 2}}) == {'attention': {'n_head': 2}}  # unknown keys stay where they are
    assert nest(flat({'attention': {'n_head': 2}, 'x': 1})) == {'attention': {'n_head': 2}, 'x': 1}


@pytest.mark.parametrize('name', ['attention', 'norm', 'init'])
def test_a_section_with_the_name_of_a_former_option_is_told_apart(name):
    assert is_former(name, 'auto')
    assert is_former(name, None)
    assert not is_former(name, {})
    assert nest({name: 'x'})[name] == {RENAMED[name].partition('.')[2]: 'x'}


def test_null_turns_latent_attention_off():
    off = TransformerOptions(preset='deepseek-v2-lite', attention={'latent': None, 'n_kv_heads': 16})  # type: ignore[arg-type]
    assert off.dotted()['attention.latent.kv_rank'] == 0
    assert 'attention.latent.q_rank' not in off.dotted()
    zero = TransformerOptions(**nest({'preset': 'deepseek-v2-lite', 'kv_rank': 0, 'n_kv_heads': 16}))
    assert off.dotted() == zero.dotted()


def test_tables_have_the_keys_of_the_configuration():
    keys = {*dotted(nest(STORED))} | LATER
    assert {*KEYS} - {'padded_vocab_size'} <= keys
    assert {*DEFAULTS, *NO_ATTENTION, *NO_EXPERTS, *NO_STATES} <= keys
    assert {key for rows in (families(), presets()) for row in rows.values() for key in row} <= keys
