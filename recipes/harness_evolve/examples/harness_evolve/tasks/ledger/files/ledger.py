"""A ledger in plain text."""


def parse(line: str) -> tuple[str, str, str]:
    """Date, category and amount of a line."""
    date, category, amount = line.split()
    return date, category, amount
