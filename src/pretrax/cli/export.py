"""`pretrax export RUN_OR_CHECKPOINT DIR`: a checkpoint as the stock classes of `transformers` load it."""

import pathlib

from pretrax.cli.import_ import KEPT
from pretrax.errors import UserError
from pretrax.huggingface.export import export
from pretrax.model.transformer import Transformer
from pretrax.run.trained import open_trained

DTYPES = {'f32': 'F32', 'bf16': 'BF16', 'f16': 'F16'}


def export_checkpoint(path: str, out: str, dtype: str | None) -> None:
    """Writes the directory and says what is in it."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f'--dtype is {dtype}; expected one of {", ".join(DTYPES)}')
    trained = open_trained(path)
    model, source = trained.run.recipe.model, trained.run.source
    if not isinstance(model, Transformer):
        raise UserError(f'{path}: its model is {type(model).__name__}, which no class of transformers computes')
    was = (trained.description.get('imported') or {}).get('dtype')
    stored = DTYPES[dtype] if dtype else was or 'F32'
    why = 'as asked' if dtype else 'as the imported files' if was else 'exact; --dtype bf16 halves the size'
    kept = trained.directory.parent / KEPT
    options = trained.run.config.model.options
    files = export(
        trained.pieces, model.arch, trained.run.like.weights, pathlib.Path(out), dtype=stored,
        family=getattr(options, 'family', None), tokenizer=getattr(source, 'tokenizer', None),
        kept=kept if kept.is_dir() else None,
    )  # fmt: skip
    print(f'exported step {trained.step} of {path} to {out}, {stored} ({why}): {", ".join(files)}')
    print(f"load it with transformers.AutoModelForCausalLM.from_pretrained('{out}')")
