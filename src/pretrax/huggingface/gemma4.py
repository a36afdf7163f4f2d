"""Fields of config.json for the layers of Gemma 4: those without a window have heads of other sizes. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrax.huggingface.fields import Field, Options, whole, wrong
from pretrax.huggingface.layers import FULL, WINDOW, all_but_every, types_of_layers, window_options
from pretrax.model.architecture import Architecture

_SIZES = ('head_dim', 'num_key_value_heads')


@dataclass(frozen=True)
class GlobalLayers(Field):
    """The layers with a window, and the heads of the others.

    As in the class, the last layer has no window whatever `layer_types` says. Released files give the sizes of the
    heads once (`global_head_dim`); the class writes them for each layer (`per_layer_config`).
    """

    fields = (
        'layer_types',
        'sliding_window',
        'global_head_dim',
        'num_global_key_value_heads',
        'per_layer_config',
        'attention_k_eq_v',
    )

    def read(self, config: Mapping[str, Any]) -> Options:
        count, window = whole('num_hidden_layers', config['num_hidden_layers']), config['sliding_window']
        if config['layer_types'] is None:
            windows = all_but_every(6, count)
        else:
            windows = types_of_layers(config['layer_types'], count, WINDOW)
        windows[-1] = False
        if not any(windows):
            raise wrong('layer_types', config['layer_types'], f'a layer with {WINDOW}')
        shared = config['attention_k_eq_v']
        if not isinstance(shared, bool):
            raise wrong('attention_k_eq_v', shared, 'true or false')
        d_head, n_kv_heads = self._sizes(config, windows)
        return window_options(windows, whole('sliding_window', window)) | {
            'attention.global_d_head': d_head,
            'attention.global_n_kv_heads': n_kv_heads,
            'attention.global_k_as_v': shared,
        }

    def _sizes(self, config: Mapping[str, Any], windows: list[bool]) -> tuple[int, int]:
        """Width and number of the key heads of layers without a window."""
        usual = [whole(name, config[name]) for name in _SIZES]
        by_layer = config.get('per_layer_config')
        if by_layer is None:
            n_kv_heads = config['num_global_key_value_heads'] if config['attention_k_eq_v'] else None
            n_kv_heads = usual[1] if n_kv_heads is None else whole('num_global_key_value_heads', n_kv_heads)
            return whole('global_head_dim', config['global_head_dim']), n_kv_heads
        said = by_layer if isinstance(by_layer, dict) else {}
        own = [said.get(str(layer), {}) for layer in range(len(windows))]
        expected = f'{" and ".join(_SIZES)} of layers without a window, the same in each'
        without = [sizes for sizes, has in zip(own, windows, strict=True) if not has]
        with_window = [sizes for sizes, has in zip(own, windows, strict=True) if has]
        known = all(isinstance(sizes, dict) and set(sizes) <= set(_SIZES) for sizes in own)
        if not known or len(without) != len(said) or any(with_window) or any(sizes != without[0] for sizes in without):
            raise wrong('per_layer_config', by_layer, expected)
        d_head, n_kv_heads = (
            whole(f'per_layer_config.{name}', without[0].get(name, size))
            for name, size in zip(_SIZES, usual, strict=True)
        )
        return d_head, n_kv_heads

    def write(self, arch: Architecture) -> dict[str, Any]:
        attention = arch.attention
        return {
            'sliding_window': attention.window or None,
            'layer_types': [WINDOW if window else FULL for window in arch.windows],
            'global_head_dim': attention.global_d_head or attention.d_head,
            'num_global_key_value_heads': attention.global_n_kv_heads or attention.n_kv_heads,
            'attention_k_eq_v': attention.global_k_as_v,
        }
