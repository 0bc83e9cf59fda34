"""Reef's own coding agent: a small loop with read, bash, edit and write, so that everything works with no vendor's agent.

Standard library only, Python 3.9 or newer, relative imports: it travels to machines that have no Reef. It speaks chat
completions to `REEF_BASE_URL`, takes its harness from `REEF_NATIVE_DIR`, and writes every message to a JSONL session file.
"""
