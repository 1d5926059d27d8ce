"""Options that commands share are declared once, and every command takes all of them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from hal.cli.audit_options import read_outputs
from hal.cli.option_groups import takes
from hal_engine.cli import register_commands
from hal_engine.cli.arguments import read_model_choices
from hal_engine.cli.plan_target import read_plan_target

Pair = tuple[str, int | None]


def read_pair(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A name.")],
    count: Annotated[int | None, typer.Option("--count", help="A count.")] = None,
) -> Pair:
    """Two words as one value."""
    assert ctx.info_name
    return name, count


def _run(app: typer.Typer, *words: str) -> Any:
    return get_command(app).main(args=list(words), prog_name="x", standalone_mode=False)


def test_a_command_gets_what_its_reader_makes() -> None:
    app, found = typer.Typer(), []

    @app.command()
    @takes(pair=read_pair)
    def show(pair: Pair, more: Annotated[bool, typer.Option("--more")] = False) -> None:
        """What it does."""
        found.append((pair, more))

    _run(app, "a", "--count", "3")
    _run(app, "--more", "b")
    assert found == [(("a", 3), False), (("b", None), True)]
    assert show.__doc__ == "What it does."


def test_readers_are_made_of_readers() -> None:
    app, found = typer.Typer(), []

    @takes(pair=read_pair)
    def read_more(pair: Pair, other: Annotated[str, typer.Option("--other")] = "") -> str:
        return f"{pair}{other}"

    @app.command()
    @takes(text=read_more)
    def show(text: str) -> None:
        found.append(text)

    _run(app, "a", "--other", "!")
    assert found == ["('a', None)!"]


def test_a_reader_without_a_parameter_is_an_error() -> None:
    def command(count: int) -> None: ...

    with pytest.raises(TypeError, match="no parameter pair"):
        takes(pair=read_pair)(command)


def test_two_parameters_of_one_name_are_an_error() -> None:
    def command(pair: Pair, name: str) -> None: ...

    with pytest.raises(TypeError, match="two parameters of one name"):
        takes(pair=read_pair)(command)


def test_commands_of_the_engine_take_all_of_their_groups() -> None:
    app = typer.Typer()
    register_commands(app)
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    groups = {
        "audit": (read_model_choices, read_outputs),
        "serve": (read_model_choices,),
        "plan": (read_plan_target,),
        "lock": (read_plan_target,),
    }
    for name, readers in groups.items():
        names = {parameter.name for parameter in commands[name].params}
        for reader in readers:
            wanted = inspect.signature(reader).parameters.keys() - {"ctx"}
            assert wanted <= names, (name, wanted - names)


def test_each_option_is_declared_in_one_place() -> None:
    """A second declaration of one of the shared options would be found here."""
    root = Path(__file__).resolve().parents[2]
    files = [*root.glob("hal/hal/cli/*.py"), *root.glob("engine/hal_engine/cli/*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    for option, owner in {
        '"--junit"': "audit_options.py",
        '"--sarif"': "audit_options.py",
        '"--html"': "audit_options.py",
        '"--previous"': "audit_options.py",
        '"--with"': "plan_target.py",
        '"--use"': "arguments.py",
        '"--tp"': "arguments.py",
        '"--set"': "arguments.py",
    }.items():
        declaring = [p.name for p, text in texts.items() for _ in range(text.count(option))]
        assert set(declaring) == {owner}, option
