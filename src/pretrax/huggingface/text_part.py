"""The language model inside of a checkpoint that has more parts, such as a vision tower. Imports no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrax.errors import UserError
from pretrax.huggingface.fields import wrong
from pretrax.huggingface.files import HuggingFaceCheckpoint, Tensor
from pretrax.huggingface.harmless import is_harmless
from pretrax.tables import read_table


@dataclass(frozen=True)
class TextPart:
    """Where a model with several parts keeps its language model.

    Args:
        model_type: model type of the language model.
        outer: fields beside `text_config` that describe the other parts.
        names: prefixes of tensors, and their names in a checkpoint of only the language model. The first that fits is
            used.
        left_out: prefixes of the tensors of the other parts.
        tied: whether the embedding is tied if config.json does not say it.
        capped: whether the class applies the soft cap of the logits.
    """

    model_type: str
    outer: Sequence[str]
    names: Mapping[str, str]
    left_out: Sequence[str]
    tied: bool
    capped: bool = False


TEXT_PARTS = {
    kind: TextPart(**row | {'outer': row['outer'].split(), 'left_out': row['left_out'].split()})
    for kind, row in read_table(Path(__file__).with_suffix('.yaml')).items()
}


def text_part(config: Mapping[str, Any]) -> TextPart | None:
    """The part to read of a checkpoint with this config.json; None: it has only a language model."""
    kind = config.get('model_type')
    return TEXT_PARTS.get(kind) if isinstance(kind, str) else None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the language model: `text_config`, if there are other parts.

    Raises:
        UserError: `text_config` is that of another model, or contradicts the fields beside it.
    """
    part = text_part(config)
    if part is None:
        return config
    inner = {} if config.get('text_config') is None else config['text_config']
    if not isinstance(inner, dict):
        raise wrong('text_config', inner, 'an object')
    if inner.get('model_type', part.model_type) != part.model_type:
        raise wrong('text_config.model_type', inner['model_type'], part.model_type)
    tied = config.get('tie_word_embeddings', part.tied)
    if not isinstance(tied, bool):
        raise wrong('tie_word_embeddings', tied, 'true or false')
    if inner.get('tie_word_embeddings', tied) != tied:
        raise wrong('text_config.tie_word_embeddings', inner['tie_word_embeddings'], f'that of the whole model, {tied}')
    if inner.get('final_logit_softcapping') is not None and not part.capped:
        raise wrong(
            'text_config.final_logit_softcapping', inner['final_logit_softcapping'], 'null: the class applies none'
        )
    known = {'text_config', 'tie_word_embeddings', 'quantization_config', *part.outer}
    beside = {name: value for name, value in config.items() if name not in known}
    # What nobody knows is refused where the rest is, under its own name.
    strange = {name: value for name, value in beside.items() if not is_harmless(name, value)}
    more = {'quantization_config': config['quantization_config']} if 'quantization_config' in config else {}
    return {**inner, **strange, **more, 'model_type': part.model_type, 'tie_word_embeddings': tied}


def text_checkpoint(checkpoint: HuggingFaceCheckpoint) -> tuple[HuggingFaceCheckpoint, list[str]]:
    """A checkpoint with only the tensors of its language model, by such a model's names, and those left out."""
    part = text_part(checkpoint.config)
    if part is None:
        return checkpoint, []
    tensors: dict[str, Tensor] = {}
    left_out: dict[str, int] = {}
    for name, tensor in checkpoint.tensors.items():
        other = next((prefix for prefix in part.left_out if name.startswith(prefix)), None)
        if other is not None:
            kind = other.strip('.').rpartition('.')[2]
            left_out[kind] = left_out.get(kind, 0) + 1
            continue
        old, new = next(((old, new) for old, new in part.names.items() if name.startswith(old)), ('', ''))
        short = new + name.removeprefix(old)
        if short in tensors:
            raise UserError(
                f'{checkpoint.directory}: two tensors are {short} of the language model, one of them {name}'
            )
        tensors[short] = tensor
    said = ', '.join(f'{kind} ({count} tensors)' for kind, count in left_out.items()) or 'nothing'
    note = f'{checkpoint.config["model_type"]}: only its language model is read; left out: {said}'
    text = HuggingFaceCheckpoint(checkpoint.directory, dict(text_config(checkpoint.config)), tensors)
    return text, [note, f'an export writes it as {part.model_type}, without the other parts']
