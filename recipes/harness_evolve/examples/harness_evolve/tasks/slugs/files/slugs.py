"""Slugs for titles."""


def slugify(title: str) -> str:
    return title.lower().replace(" ", "-")
