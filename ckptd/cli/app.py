"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptd import __version__
from ckptd.cli import (
    daemon_commands,
    doctor_command,
    log_command,
    plan_command,
    preflight_command,
    prune_commands,
    run_command,
    storage_commands,
)
from ckptd.daemon.command import daemon

app = typer.Typer(
    name="ckptd",
    help="Asynchronous checkpoints for PyTorch: look at runs, verify and export checkpoints, run the daemon.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("serve")(daemon)
app.command("status")(daemon_commands.status)
app.command("drain")(daemon_commands.drain)
app.command("ls")(storage_commands.ls)
app.command("show")(storage_commands.show)
app.command("verify")(storage_commands.verify)
app.command("export")(storage_commands.export)
app.command("prune")(prune_commands.prune)
app.command("pin")(prune_commands.pin)
app.command("unpin")(prune_commands.unpin)
app.command("log")(log_command.log)
app.command("plan")(plan_command.plan)
app.command("doctor")(doctor_command.doctor)
app.command("preflight")(preflight_command.preflight)
app.command(
    "run",
    add_help_option=False,  # torchrun's own, with ours
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(run_command.run)


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context, show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Asynchronous checkpoints for PyTorch: look at runs, verify and export checkpoints, run the daemon."""
    if show:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main() -> None:
    """Entry point of the command ``ckptd``."""
    app()
