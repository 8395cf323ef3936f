"""What the commands of ``stagectl`` share: options that several have, and how text is said."""

from __future__ import annotations

from pathlib import Path

import click

from stager.request import policy

config_option = click.option(
    "--config", type=click.Path(path_type=Path, readable=False), default=policy.DEFAULT_PATH,
    show_default=True, help="The site's stage.toml.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def say(text: str) -> None:
    """Tell the user what was done."""
    click.echo(f"stage: {text}")


def complain(text: str) -> None:
    """Tell the user what could not be done."""
    click.echo(f"stage: {text}", err=True)
