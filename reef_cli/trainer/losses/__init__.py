"""Parts of losses under their standard names, as pure torch functions: ratios, advantages, log-probs.

A method's program picks from here and holds only what differs. Everything works in float64 (for tests) and float32, on any
device, and keeps no state. Symbols: `ratio` = exp(log-prob now - log-prob of the behaviour policy), per sampled token.
"""
