"""The trainer: a subprocess with a DeepSpeed engine, checkpoints and weight pushes, and the handle that drives it.

Only `reef_cli.trainer.worker` and what it imports touch torch and DeepSpeed. Knows neither HTTP routes nor SQLite.
"""
