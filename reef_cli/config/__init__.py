"""Settings of a deployment: the schema of `serve.yaml`, its layers with the origin of every value, and where state lives.

Knows nothing of how anything runs. Importing this package is cheap; YAML and recipes are read only by `load`.
"""
