"""The dashboard: a client process of the HTTP API, drawn with Textual. Closing it stops nothing.

One widget per file; facts flow down from `feed` as snapshots, wishes of the person flow up as messages. All text that came from
models, agents or users is made harmless before it is drawn.
"""
