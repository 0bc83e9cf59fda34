"""The `/reef/*` routes, one module per noun. Each exports `ROUTES`: `(method, path, handler)` rows."""
