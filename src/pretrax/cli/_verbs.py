"""Verbs are files, groups are folders; both are imported only when they are called, so that help is fast.

`pretrax data tokenize` is `data/tokenize.py`: its docstring is the help, and the signature of its function `tokenize`,
or the dataclass that it takes (`_options.py`), declares the arguments and options. A trailing underscore, as in
`import_.py`, avoids a name that Python uses. A file whose name begins with an underscore is not a verb. Verbs import
JAX, pydantic and the like inside functions.
"""

import ast
import difflib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pretrax.cli._options import with_options
from pretrax.errors import UserError

ROOT = Path(__file__).parent


class Group(TyperGroup):
    """The verbs in a folder."""

    folder = ROOT

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(_paths(self.folder))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        path = _paths(self.folder).get(cmd_name)
        if path is None:
            return None
        app = typer.Typer(name=cmd_name, add_completion=False, rich_markup_mode=None)
        if path.is_dir():
            app.callback(cls=Group, help=_docstring(path), no_args_is_help=True)(lambda: None)
            group = typer.main.get_group(app)
            assert isinstance(group, Group)
            group.folder = path
            return group
        module = importlib.import_module('.'.join([str(__package__), *path.relative_to(ROOT).with_suffix('').parts]))
        app.command(cmd_name, cls=Verb, help=module.__doc__)(with_options(getattr(module, path.stem)))
        return typer.main.get_command(app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section('Commands'):
            formatter.write_dl(
                [(name, _docstring(path).partition('\n')[0]) for name, path in sorted(_paths(self.folder).items())]
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] == 'help' and not ctx.resilient_parsing:
            return self.resolve_command(ctx, [*args[1:], '--help']) if args[1:] else _show_help(ctx)
        if args[0] not in _paths(self.folder) and not args[0].startswith('-') and not ctx.resilient_parsing:
            raise UserError(_no_verb(ctx.command_path, args))
        return super().resolve_command(ctx, args)


class Verb(TyperCommand):
    """A verb. If it takes KEY=VALUE, a flag in that form, or a key in the form of a flag, is explained."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and any(parameter.name == 'overrides' for parameter in self.params):
            names = [name for each in self.params for name in (*each.opts, *each.secondary_opts)]
            declared = {name for name in names if name.startswith('--')}
            _check_spelling(ctx.command_path, args, {'--help', *declared})
        return super().parse_args(ctx, args)


def _show_help(ctx: Any) -> Any:
    print(ctx.get_help())
    ctx.exit()


def _paths(folder: Path) -> dict[str, Path]:
    """{name: file of a verb, or folder of a group}."""
    return {
        path.stem.removesuffix('_').replace('_', '-'): path
        for path in folder.iterdir()
        if not path.name.startswith(('_', '.')) and (path.is_dir() or path.suffix == '.py')
    }


def _docstring(path: Path) -> str:
    """The docstring of a file, or of a package, which is not imported."""
    file = path / '__init__.py' if path.is_dir() else path
    return ast.get_docstring(ast.parse(file.read_text())) or ''


def _commands(folder: Path, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every group and verb below a folder: ('data', 'tokenize')."""
    for name, path in sorted(_paths(folder).items()):
        yield (*words, name)
        if path.is_dir():
            yield from _commands(path, (*words, name))


def _no_verb(command: str, args: Sequence[str]) -> str:
    """`pretrax trian`: the nearest verb of all groups, those of this group first."""
    from pretrax.config.other_tools import other_tools

    given, here = args[0], tuple(command.split()[1:])
    if meant := other_tools().verbs.get(' '.join((*here, given))):
        return f'{command} has no verb {given!r}\n  {meant}'
    if not here and Path(given).suffix in ('.yaml', '.yml'):
        return f'{given} is a configuration, not a verb\n  did you mean: {" ".join([command, "train", *args])}'
    every = list(_commands(ROOT))
    by_name = {words[-1]: words for words in [*every, *(words for words in every if words[:-1] == here)]}
    near = difflib.get_close_matches(given, by_name, n=1)
    names = [words[-1] for words in every if words[:-1] == here]
    hint = [f'  did you mean: {" ".join(["pretrax", *by_name[near[0]], *args[1:]])}'] if near else []
    return '\n'.join([f'{command} has no verb {given!r}', *hint, f'  verbs: {", ".join(names)}'])


def _check_spelling(command: str, args: Sequence[str], options: set[str]) -> None:
    """Raises UserError for `topology=v5e-256`, which is --topology, and for `--steps 5`, which is steps=5."""
    for number, word in enumerate(args):
        name, equals, value = word.partition('=')
        if word == '--':
            return
        if word.startswith('--'):
            if name not in options:
                following = [value] if equals else [text for text in args[number + 1 :][:1] if text[:1] != '-']
                raise UserError(_no_option(command, name, ''.join(following) or 'VALUE', options))
        elif equals and f'--{name.replace("_", "-")}' in options and name not in _sections():
            flag = f'--{name.replace("_", "-")}' + ('' if value in ('true', 'false') else f' {value}')
            raise UserError(
                f'{word}: this is an option of `{command}`, not a key of the configuration\n  write: {flag}'
            )


def _sections() -> set[str]:
    from pretrax.config.schema import RunConfig

    return set(RunConfig.model_fields)


def _no_option(command: str, flag: str, value: str, options: set[str]) -> str:
    """`--steps 5`: the key of the configuration, or the option that is nearest."""
    from pretrax.config.other_tools import other_tools
    from pretrax.config.registry import DEFAULTS, option_names, options_model
    from pretrax.config.schema import RunConfig, known_keys

    keys = known_keys(RunConfig)
    keys += [key for kind, name in DEFAULTS.items() for key in known_keys(options_model(kind, name), f'{kind}.')]
    name = flag.removeprefix('--').replace('-', '_')
    by_last = {key.rpartition('.')[2]: key for key in reversed(keys)}
    by_last |= {name: f'model.{key}' for name, key in option_names('model', DEFAULTS['model']).RENAMED.items()}
    key = name if name in keys else by_last.get(name) or other_tools().names.get(name)
    near = difflib.get_close_matches(flag, sorted(options), n=1, cutoff=0.75)
    advice = '' if key or near else other_tools().advice.get(name, '')
    if key is None and not near and not advice:
        key = next((by_last.get(one, one) for one in difflib.get_close_matches(name, [*keys, *by_last], n=1)), None)
    hint = f'  {advice}' if advice else f'  did you mean {near[0]}?' if near else ''
    hint = f'  configuration is written KEY=VALUE: {key}={value}' if key else hint
    return '\n'.join(
        filter(None, [f'{command} has no option {flag}', hint, f'  options: {", ".join(sorted(options))}'])
    )
