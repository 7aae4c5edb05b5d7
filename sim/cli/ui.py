"""``wattline ui``."""

from __future__ import annotations

import click

from sim.cli.help import Helped, complete_model


@click.command("ui", cls=Helped)
@click.argument("link", required=False, default="", metavar="[LINK|MODEL]", shell_complete=complete_model)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="port of 127.0.0.1 [default: a free one]")
@click.option("--open/--no-open", "opens", default=True, show_default=True, help="open the page in the browser")
def command(link: str, port: int, opens: bool) -> None:
    """A local page on which scenarios are changed and answer at once.

    It opens at a MODEL, or at a LINK that the page gave.

    The page answers this machine only, under an address with a token that is new every time. Ctrl-C ends it.
    """
    from sim.output.files import check_extra

    check_extra("wattline ui", "ui", "dash")
    import webbrowser

    from sim.ui.app import page

    made = page(port, link)
    click.echo(f"wattline ui: {made.link}  (Ctrl-C ends it)")
    if opens:
        webbrowser.open(made.link)
    try:
        made.server.serve_forever()
    finally:
        made.server.server_close()
