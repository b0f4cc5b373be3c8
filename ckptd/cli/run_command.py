"""``ckptd run``: handed on to the client, which has torch."""

from __future__ import annotations

import importlib
import importlib.util

import typer

from ckptd.cli.output import guarded
from ckptd.errors import ConfigError


def run(context: typer.Context) -> None:
    """Start a training as torchrun does, keep it alive, and start it anew from its newest checkpoint.

    ckptd run [OPTIONS OF TORCHRUN AND OURS] -- train.py [ITS ARGUMENTS]; --help lists them.
    """
    guarded(lambda: _launch(context.args), as_json=False)


def _launch(argv: list[str]) -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("ckptd run stands on torchrun, and torch is not installed", hint="pip install 'ckptd[torch]'")
    importlib.import_module("ckptd_client.launch").run(argv)
