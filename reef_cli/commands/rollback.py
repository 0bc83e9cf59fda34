"""`reef rollback`: `reef release rollback`, at hand when it is needed."""

from reef_cli.commands import release
from reef_cli.commands.shell import new_app

app = new_app()
app.command()(release.rollback)
