"""The fields of a dataclass are the options of a verb."""

import dataclasses
from typing import Annotated

import pytest
import typer

from pretrax.cli._options import with_options
from pretrax.infer.sampling_settings import TopP


def test_the_fields_of_a_dataclass_are_the_options_of_a_verb(capsys):
    """Nested fields come where the dataclass has them, with the defaults of its instance; a tuple may be repeated."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Inner:
        size: Annotated[int, typer.Option(min=1)] = 1
        share: TopP | None = None
        hidden: int = 5

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        name: Annotated[str, typer.Argument()]
        inner: Inner = dataclasses.field(default_factory=lambda: Inner(size=3))
        word: Annotated[tuple[str, ...], typer.Option('-w')] = ()

    def verb(options: Options) -> None:
        called.append(options)

    called = []
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_options(verb))
    command = typer.main.get_command(app)
    command.main(['a'], standalone_mode=False)
    command.main(['b', '--size', '7', '--share', '0.5', '-w', 'x', '-w', 'y'], standalone_mode=False)
    assert called == [
        Options(name='a'),
        Options(name='b', inner=Inner(size=7, share=0.5), word=('x', 'y')),
    ]
    with pytest.raises(typer.BadParameter, match='less than or equal to 1'):
        command.main(['a', '--share', '2'], standalone_mode=False)
