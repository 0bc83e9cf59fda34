"""The client of the HTTP API that command line and dashboard share: standard library and `core` only, no business rules."""
