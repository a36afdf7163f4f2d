"""The command line. Verbs are imported when they are called, so that `pretrax --help` costs no JAX.

`main` is the one place where a `UserError` becomes text: at most ten lines on stderr and exit code 2. Any other
exception is a defect of ours and keeps its traceback.
"""

import sys
from typing import Annotated

import typer

from pretrax import __version__
from pretrax.errors import MISTAKE, UserError
from pretrax.machine.accelerators import skip_absent_accelerators
from pretrax.machine.process_memory import ask_for_kept_memory

app = typer.Typer(
    help='Pretrain decoder-only language models in JAX.',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help='Look at configurations.', no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name='config')
data_app = typer.Typer(help='Make, look at and change token files.', no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name='data')
checkpoint_app = typer.Typer(help='Look at checkpoints and average them.', no_args_is_help=True, rich_markup_mode=None)
app.add_typer(checkpoint_app, name='checkpoint')
launch_app = typer.Typer(help='Train in several processes.', no_args_is_help=True, rich_markup_mode=None)
app.add_typer(launch_app, name='launch')

ALLOW_CHANGES = typer.Option('--allow-changes', help='Resume although the configuration has changed.')

ConfigFile = Annotated[str, typer.Argument(metavar='CONFIG', help='A YAML file, such as configs/quickstart.yaml.')]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar='[KEY=VALUE]...', help='Changes, such as mesh.d=4 or steps=1000.')
]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; exits with 2 after a mistake of the user."""
    if arguments is None and sys.argv[1:2] == ['train']:
        ask_for_kept_memory()
    skip_absent_accelerators()
    try:
        app(arguments)
    except UserError as error:
        print(error.told(), file=sys.stderr)
        sys.exit(MISTAKE)


def _own_keys(overrides: list[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """KEY=VALUE that a verb takes itself, and the rest, which changes the configuration."""
    pairs = [(override.partition('='), override) for override in overrides]
    own = {key: value for (key, _, value), _ in pairs if key in names}
    return own, [override for (key, _, _), override in pairs if key not in names]


@data_app.command()
def index(
    files: Annotated[list[str], typer.Argument(metavar='FILE...', help='.jsonl files, also .gz and .zst.')],
) -> None:
    """Write where the documents of huge .jsonl files begin, beside each file."""
    from pretrax.cli.data_index import index

    index(files)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option('--version', help='Print the version and exit.')] = False) -> None:
    if version:
        print(f'pretrax {__version__}')
        raise typer.Exit


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    allow_changes: Annotated[bool, ALLOW_CHANGES] = False,
    dry_run: Annotated[bool, typer.Option('--dry-run', help='All but training: say what it would do.')] = False,
) -> None:
    """Train a model; in an existing run directory, resume. compiled=FILE runs a step that `pretrax compile` saved."""
    from pretrax.config import load

    own, changes = _own_keys(overrides or [], 'compiled')
    loaded = load(config, changes)  # before JAX is imported: a mistake is told at once
    if loaded.mesh.is_planned or loaded.batch.micro == 'auto':
        from pretrax.ahead.auto import settled

        loaded = settled(loaded, print)
    if dry_run:
        from pretrax.cli.dry_run import dry_run as run_dry

        return run_dry(loaded, allow_changes, own.get('compiled'))
    from pretrax.cli.train import train

    return train(loaded, allow_changes, own.get('compiled'))


@app.command('compile')
def compile_(config: ConfigFile, overrides: Overrides = None) -> None:
    """Compile the training step for hardware that is not here; say whether it fits.

    Besides changes of the configuration: topology=v5e-256 (or h200, v5p:4x4x4, ...; none: the devices that are here),
    slices=2, save=FILE.
    """
    from pretrax.config import load

    own, changes = _own_keys(overrides or [], 'topology', 'slices', 'save')
    loaded = load(config, changes)
    from pretrax.cli.compile import compile_step

    compile_step(loaded, own)


@launch_app.callback()
def _launch() -> None:
    pass  # with a single verb Typer would leave its name out


@launch_app.command()
def local(
    config: ConfigFile,
    processes: Annotated[int, typer.Option('--processes', '-n', min=1, help='How many.')],
    overrides: Overrides = None,
    devices: Annotated[
        int | None, typer.Option('--devices-per-process', min=1, help='Of each (default: as the mesh asks, or all).')
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help='Attempts that may follow one that no further checkpoint came of.')
    ] = 3,
    elastic: Annotated[
        bool, typer.Option('--elastic', help='Go on with fewer processes when one is lost again and again.')
    ] = False,
    allow_changes: Annotated[bool, ALLOW_CHANGES] = False,
) -> None:
    """Train in several processes of this machine; start them again from the newest checkpoint when one is lost."""
    from pretrax.cli.launch import local

    local(config, overrides or [], processes, devices, retries, elastic, allow_changes)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    verify: Annotated[bool, typer.Option('--verify', help='Compile the fastest ways, and compare the memory.')] = False,
) -> None:
    """Predict memory and speed of a step without compiling it, and what would be faster.

    Besides changes of the configuration: topology=v5e-256 (or h200x8, v5p:4x4x4, ...), slices=2.
    """
    from pretrax.config import load

    own, changes = _own_keys(overrides or [], 'topology', 'slices')
    loaded = load(config, changes)
    from pretrax.cli.plan import plan

    plan(loaded, own, verify)


@app.command()
def bench(
    sweep: Annotated[str, typer.Argument(metavar='SWEEP', help='A YAML file, such as configs/sweeps/quick.yaml.')],
    out: Annotated[
        str | None, typer.Option('--out', '-o', metavar='DIR', help='Where results go (default: sweeps/<its name>).')
    ] = None,
) -> None:
    """Time the steps of a grid of configurations, each in a process of its own; go on where it was stopped."""
    from pretrax.cli.bench import bench

    bench(sweep, out)


@app.command()
def generate(
    path: Annotated[str, typer.Argument(metavar='RUN_OR_CHECKPOINT', help='runs/<name>, or a checkpoint in it.')],
    prompt: Annotated[list[str] | None, typer.Option(help='Text to continue; may be repeated.')] = None,
    tokens: Annotated[int, typer.Option(min=1, help='Tokens to write.')] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help='0: always the likeliest token.')] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help='Choose among the k likeliest tokens.')] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help='... among the likeliest that reach p.')] = None,
    seed: Annotated[int, typer.Option(min=0, help='Of the random choices.')] = 0,
) -> None:
    """Write text with a trained model."""
    from pretrax.cli.generate import generate

    generate(path, prompt or [], tokens, temperature, top_k, top_p, seed)


@app.command('import')
def import_(
    place: Annotated[
        str, typer.Argument(metavar='HF_DIR_OR_ID', help='A directory, or org/name[@revision] of the hub.')
    ],
    out: Annotated[str | None, typer.Option('--out', '-o', help='The run to write (default: runs/<its name>).')] = None,
) -> None:
    """Make a run of a Hugging Face checkpoint: to generate, to train on from, to export."""
    from pretrax.cli.import_ import import_checkpoint

    import_checkpoint(place, out)


@app.command()
def export(
    path: Annotated[str, typer.Argument(metavar='RUN_OR_CHECKPOINT', help='runs/<name>, or a checkpoint in it.')],
    out: Annotated[str, typer.Argument(metavar='DIR', help='A new directory.')],
    dtype: Annotated[str | None, typer.Option(help='bf16, f16 or f32 (default: as imported, else f32).')] = None,
) -> None:
    """Write a checkpoint for Hugging Face: safetensors, config.json, tokenizer."""
    from pretrax.cli.export import export_checkpoint

    export_checkpoint(path, out, dtype)


@app.command()
def plot(
    runs: Annotated[list[str], typer.Argument(metavar='RUN...', help='Directories of runs.')],
    out: Annotated[str | None, typer.Option('--out', '-o', help='An .svg or .html file; none: text.')] = None,
    key: Annotated[str, typer.Option('--key', '-k', help='Which metric.')] = 'loss',
) -> None:
    """Draw a metric of one or more runs."""
    from pretrax.cli.plot import plot

    plot(runs, out, key)


@config_app.command()
def show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print every value and where it came from."""
    from pretrax.cli.config import show

    show(config, overrides or [])


@config_app.command()
def schema(
    plugin: Annotated[list[str] | None, typer.Option(help='A Python file with further components.')] = None,
) -> None:
    """Print the JSON Schema of a configuration file."""
    from pretrax.cli.config import schema

    schema(plugin or [])


@config_app.command()
def diff(
    old: Annotated[str, typer.Argument(metavar='A', help='A YAML file.')],
    new: Annotated[str, typer.Argument(metavar='B', help='Another.')],
) -> None:
    """Print the keys whose values differ, old -> new."""
    from pretrax.cli.config import diff

    diff(old, new)


@data_app.command()
def tokenize(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[
        str | None, typer.Option('--out', '-o', metavar='DIR', help='A new directory; none: the one of the run.')
    ] = None,
) -> None:
    """Turn the text of a configuration into flat-tokens."""
    from pretrax.config import load

    loaded = load(config, overrides or [])
    from pretrax.cli.data_tokenize import tokenize

    tokenize(loaded, [config, *(overrides or [])], out)


@data_app.command()
def train_tokenizer(
    source: Annotated[
        str, typer.Argument(metavar='CONFIG|TEXT', help='A YAML file, or what data.text may name: files, stdlib.')
    ],
    out: Annotated[str, typer.Option('--out', '-o', metavar='FILE', help='A new tokenizer.json.')],
    overrides: Overrides = None,
    vocab_size: Annotated[int | None, typer.Option(min=257, help='Tokens; none: data.vocab_size.')] = None,
    model: Annotated[str, typer.Option(help='bpe or unigram.')] = 'bpe',
) -> None:
    """Train a tokenizer on text."""
    from pretrax.cli.data_train_tokenizer import train_tokenizer

    train_tokenizer(source, overrides or [], out, vocab_size, model)


TokenPath = Annotated[str, typer.Argument(metavar='PATH', help='Token files: flat-tokens, or those of another tool.')]
FlatTokensPath = Annotated[str, typer.Argument(metavar='PATH', help='A directory of flat-tokens.')]
OutDirectory = Annotated[str, typer.Option('--out', '-o', metavar='DIR', help='A new directory.')]
TokenizerOption = Annotated[
    str | None, typer.Option('--tokenizer', help='What the ids mean, where the files do not say it.')
]
EndOfText = Annotated[int | None, typer.Option('--end-of-text', min=0, help='What ends a document in a nanoGPT .bin.')]
VocabSize = Annotated[
    int | None, typer.Option('--vocab-size', min=1, help='Of the ids, where the files do not say it.')
]


@data_app.command()
def inspect(
    path: TokenPath,
    plot: Annotated[str | None, typer.Option(metavar='FILE.svg', help='Draw how long documents are.')] = None,
    documents: Annotated[int, typer.Option(min=0, help='Of each split to show.')] = 3,
    tokenizer: TokenizerOption = None,
    vocab_size: VocabSize = None,
    end_of_text: EndOfText = None,
) -> None:
    """Show what token files hold: counts, lengths, tokenizer, checksums, first documents."""
    from pretrax.cli.data_inspect import inspect

    inspect(path, plot, documents, tokenizer, vocab_size, end_of_text)


@data_app.command()
def verify(
    path: TokenPath,
    tokenizer: TokenizerOption = None,
    vocab_size: VocabSize = None,
    end_of_text: EndOfText = None,
    text: Annotated[str | None, typer.Option(help='Where the text is: its first documents have to be there.')] = None,
    field: Annotated[str, typer.Option(help='The field of a row that holds the text.')] = 'text',
) -> None:
    """Check everything that token files say about themselves, and tokenise a sample again."""
    from pretrax.cli.data_verify import verify

    verify(path, tokenizer, vocab_size, end_of_text, text, field)


@data_app.command()
def convert(
    path: TokenPath,
    out: OutDirectory,
    to: Annotated[str, typer.Option(help='flat-tokens, or nanogpt: train.bin and val.bin.')] = 'flat-tokens',
    tokenizer: TokenizerOption = None,
    vocab_size: VocabSize = None,
    end_of_text: EndOfText = None,
) -> None:
    """Write token files of any tool as flat-tokens."""
    from pretrax.cli.data_convert import convert

    convert(path, out, to, tokenizer, vocab_size, end_of_text)


@data_app.command()
def merge(
    paths: Annotated[list[str], typer.Argument(metavar='PATH...', help='Directories of flat-tokens.')],
    out: OutDirectory,
) -> None:
    """Join flat-tokens of one tokenizer, split by split, in the order given."""
    from pretrax.cli.data_merge import merge

    merge(paths, out)


@data_app.command()
def shuffle(
    path: FlatTokensPath,
    out: OutDirectory,
    seed: Annotated[int, typer.Option(min=0, help='Of the random order.')] = 0,
) -> None:
    """Put the documents of each split in a random order."""
    from pretrax.cli.data_shuffle import shuffle

    shuffle(path, out, seed)


@data_app.command()
def split(
    path: FlatTokensPath,
    out: OutDirectory,
    fraction: Annotated[float | None, typer.Option(min=0, max=1, help='Of the documents, to hold out.')] = None,
    count: Annotated[int | None, typer.Option(min=1, help='Of documents to hold out.')] = None,
    seed: Annotated[int, typer.Option(min=0, help='Another choice of documents.')] = 0,
) -> None:
    """Divide documents into train and validation, by a hash of each."""
    from pretrax.cli.data_split import split

    split(path, out, fraction, count, seed)


RunPath = Annotated[str, typer.Argument(metavar='RUN_OR_CHECKPOINT', help='runs/<name>, or a checkpoint in it.')]


@checkpoint_app.command('list')
def list_(run: Annotated[str, typer.Argument(metavar='RUN', help='Such as runs/<name>.')]) -> None:
    """Show what a run has saved: steps, sizes, why each is kept, whether its files are there."""
    from pretrax.cli.checkpoint_list import list_checkpoints

    list_checkpoints(run)


@checkpoint_app.command('inspect')
def inspect_checkpoint(
    path: RunPath, files: Annotated[bool, typer.Option('--files', help='Each file with its size and digest.')] = False
) -> None:
    """Show what a checkpoint says of itself: versions, configuration, every array, sums."""
    from pretrax.cli.checkpoint_inspect import inspect

    inspect(path, files)


@checkpoint_app.command('verify')
def verify_checkpoint(
    paths: Annotated[list[str], typer.Argument(metavar='RUN_OR_CHECKPOINT...', help='Of a run: all of them.')],
) -> None:
    """Read every file and compare it with its digest; exit code 2 where one differs."""
    from pretrax.cli.checkpoint_verify import verify_checkpoints

    verify_checkpoints(paths)


@checkpoint_app.command('diff')
def diff_checkpoints(
    one: Annotated[str, typer.Argument(metavar='A', help='A run or a checkpoint.')],
    other: Annotated[str, typer.Argument(metavar='B', help='Another.')],
    optimizer: Annotated[bool, typer.Option('--optimizer', help="The optimizer's state as well.")] = False,
    most: Annotated[int, typer.Option(min=1, help='Arrays to show.')] = 20,
) -> None:
    """Compare configurations, shapes and values; what lies furthest apart comes first."""
    from pretrax.cli.checkpoint_diff import diff

    diff(one, other, optimizer, most)


@checkpoint_app.command('average')
def average_checkpoints(
    paths: Annotated[list[str], typer.Argument(metavar='RUN_OR_CHECKPOINT...', help='Of a run: its last ones.')],
    out: Annotated[str, typer.Option('--out', '-o', metavar='RUN', help='A new directory, such as runs/average.')],
    last: Annotated[int, typer.Option(min=1, help='Checkpoints of each run that is named.')] = 1,
) -> None:
    """Write the mean of weights: of the last checkpoints of a run, or of several runs of one model."""
    from pretrax.cli.checkpoint_average import average

    average(paths, out, last)


@checkpoint_app.command('export-weights')
def export_weights(
    path: RunPath,
    out: Annotated[str, typer.Argument(metavar='DIR', help='A new directory.')],
    dtype: Annotated[str, typer.Option(help='f32, bf16 or f16.')] = 'f32',
) -> None:
    """Write the weights alone: safetensors of our own names. `pretrax export` writes them for Hugging Face."""
    from pretrax.cli.checkpoint_export_weights import export_weights

    export_weights(path, out, dtype)
