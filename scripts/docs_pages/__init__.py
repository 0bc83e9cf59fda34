"""What `scripts/docs.py` writes, one module per page or section; each gives Markdown text and touches no file."""
