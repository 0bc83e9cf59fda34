"""The command line: parse, call, render. One file per command, imported only when that command runs.

Business rules live behind the HTTP API and in the rooms below; nothing here decides anything a server would.
"""
