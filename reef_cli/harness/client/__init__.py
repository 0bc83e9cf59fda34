"""The part of Reef that runs on a user's machine: installs one agent's harness, starts it, keeps receipts, reports.

Travels as one file to machines that have no Reef, so: standard library only, Python 3.9 or newer, relative imports. Writes
below one prefix and one wrapper script; everything it creates elsewhere is noted, so that uninstalling leaves no trace.
"""
