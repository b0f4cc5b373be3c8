"""``python -m ckptd_client.preflight``: the command, for launchers that start Python modules."""

import typer

from ckptd.cli.preflight_command import preflight

if __name__ == "__main__":
    typer.run(preflight)
