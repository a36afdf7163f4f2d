"""Export a checkpoint to Hugging Face format.

Writes safetensors, config.json and the tokenizer, which the stock classes of transformers load.
"""

from pretrax.cli._arguments import Plugins, RunOrCheckpoint, load_plugins
from pretrax.errors import UserError
from pretrax.option import argument, option

DTYPES = {'f32': 'F32', 'bf16': 'BF16', 'f16': 'F16'}


def export(
    path: RunOrCheckpoint,
    out: str = argument('A new directory.', metavar='DIR'),
    dtype: str | None = option('bf16, f16 or f32. [default: that of most imported weights, or f32]', metavar='DTYPE'),
    plugin: Plugins = (),
) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f'--dtype is {dtype}; expected one of {", ".join(DTYPES)}')
    from pretrax.storage import locate
    from pretrax.storage.staging import read_directory

    place = locate(out)
    from pretrax.huggingface.export import export as write
    from pretrax.model.transformer import Transformer
    from pretrax.weights.trained import open_trained

    load_plugins(plugin)
    trained = open_trained(path)
    model, source = trained.run.recipe.model, trained.run.source
    if not isinstance(model, Transformer):
        raise UserError(
            f'{path}: no class of transformers computes its model, {type(model).__name__}\n'
            f'to write its weights as safetensors with their own names: pretrax checkpoint export-weights {path} {out}'
        )
    imported = (trained.description.get('imported') or {}).get('dtype')
    known = imported in DTYPES.values()  # others are read as F32
    stored = DTYPES[dtype] if dtype else str(imported) if known else 'F32'
    why = 'as requested' if dtype else 'as in the imported files' if known else 'exact; --dtype bf16 halves the size'
    with read_directory(trained.kept) as kept:
        files = write(
            trained.pieces,
            model.arch,
            trained.run.like.weights,
            place,
            dtype=stored,
            family=getattr(trained.run.config.model.options, 'family', None),
            tokenizer=getattr(source, 'tokenizer', None),
            kept=kept if kept.is_dir() else None,
        )
    print(f'exported step {trained.step} of {path} to {out}, {stored} ({why}): {", ".join(files)}')
    print(f"load it with transformers.AutoModelForCausalLM.from_pretrained('{out}')")
