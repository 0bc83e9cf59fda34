"""The screen as plain text, for comparing what a person sees without any package for snapshots."""

from textual.app import App


def screen_text(app: App[object]) -> str:
    """Every line of the screen, trailing blanks cut."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)
