"""`reef demo`: the whole loop on this machine, watched live.

It starts a real `reef serve` in a throw-away home, plays a scripted user who scores every answer by a rule that can be
checked (and reports the score, or only says what it thinks), lets the recipe learn for a bounded number of steps, and ends with
held-out scores before, after, and after a rollback. A client of the HTTP API like any other; it knows no learning method.
"""

from reef_cli.demo.run import Options, Result, play, run

__all__ = ["Options", "Result", "play", "run"]
