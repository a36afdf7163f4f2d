"""Known types of models that cannot be imported, with the parts that the decoder lacks."""

_GEMMA3N = (
    'several residual streams (AltUp), an embedding for each layer, layers that read the keys and values of another one'
)
_GEMMA4 = 'norms of values, an embedding for each layer, layers that read the keys and values of another one, heads of two widths'

REFUSED = {
    'gemma3n': _GEMMA3N, 'gemma3n_text': _GEMMA3N,
    'gemma4': _GEMMA4, 'gemma4_text': _GEMMA4, 'gemma4_unified': _GEMMA4, 'gemma4_unified_text': _GEMMA4,
}  # fmt: skip


def why_refused(model_type: str) -> str:
    """The parts of a model that the decoder lacks, as the end of a sentence; '' if the type is not known."""
    return f': it has {REFUSED[model_type]}' if model_type in REFUSED else ''
