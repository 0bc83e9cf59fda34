"""`reef serve`: configuration in, the supervisor's exit code out."""

from pathlib import Path
from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.shell import Shell, new_app, with_shell

app = new_app()

_EPILOG = """\b
Every setting is a flag: --reef.port 8901, --engine.kind upstream, --engine.sglang.tp_size 2.
Layers: flag over REEF_SECTION__KEY over file over default; see: reef config show --origin

\b
Examples:
  reef serve
  reef serve -c recipes/sao/examples/sao/serve.yaml
  reef serve --engine.kind upstream --engine.url https://host/v1 --engine.model NAME
"""


@app.command(epilog=_EPILOG, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@with_shell(local=True)
def serve(
    shell: Shell,
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="serve.yaml to read")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings with their origins and exit")
    ] = False,
) -> int:
    """Start the server: gateway, engine and, with a recipe, learning; Ctrl-C drains, a second one forces"""
    loaded = load_for(shell, ctx, config)
    if print_config:
        from reef_cli.config.render import render_config, rows_of

        rows = [
            {"key": f"{section}.{name}", "value": value, "origin": origin} for section, name, value, origin in rows_of(loaded)
        ]
        shell.emit({"config": rows}, lambda: print(render_config(loaded, mask=True), end=""))
        return 0
    from reef_cli.supervisor import run

    return int(run(loaded))


def load_for(shell: Shell, ctx: typer.Context, config: Path | None) -> Any:
    """The layers joined, `--home` among the flags."""
    from reef_cli.config.load import load

    source = ctx.get_parameter_source("home")
    named = source is not None and source.name == "COMMANDLINE"
    flags = ["--reef.home", str(shell.home.root), *ctx.args] if named else list(ctx.args)
    if exposed := [word for word in flags if word.partition("=")[0] in ("--reef.token", "--reef.tokens", "--engine.api_key")]:
        output.say(
            f"warning: {exposed[0].partition('=')[0]} shows in process listings; use REEF_TOKEN, ${{VARIABLE}} or a file"
        )
    return load(flags, shell.environ, config)
