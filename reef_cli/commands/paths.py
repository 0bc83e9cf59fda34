"""`reef paths`: where state lives."""

from reef_cli.commands import output
from reef_cli.commands.shell import Shell, new_app, with_shell
from reef_cli.config.paths import cache_at

app = new_app()


@app.command()
@with_shell(local=True)
def paths(shell: Shell) -> None:
    """Print where state lives"""
    places = {**shell.home.listing(), "cache": str(cache_at(shell.environ))}
    shell.emit(places, lambda: output.pairs(places.items()))
