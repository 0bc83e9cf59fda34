"""The experience log: every exchange, report and instruction of every scenario, kept durably and read back byte for byte.

Owns the SQLite database (schema, migrations, the single writer with group commit, pooled readers), the session trees, report
matching, the scenario registry, retention, import and export. Knows nothing of HTTP or of training.
"""
