"""Running what a model wrote without trusting it: a bubblewrap sandbox, and short programs with limits inside it.

Owns namespaces, mounts, limits. Does not know agents, episodes, graders or tasks.
"""
