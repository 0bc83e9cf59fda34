"""The harness half: trees of entries, the compose engine, adapters of real agents, installation and episodes.

Owns what surrounds the model in an agent. Knows nothing of release policy, HTTP routes or training; what it needs from the
chain is stated as a Protocol (`service.Releases`).
"""
