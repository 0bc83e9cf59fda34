"""Discovery: one hard problem, a strict verifier, an archive of solutions, and steps of search that a served model drives.

Owns the problem contract, the archive with its choice of parents (PUCT), the policies that turn a model's text into solutions,
the run and its pictures. Talks to Reef only through the HTTP calls it is given; knows no recipe and no engine.
"""
