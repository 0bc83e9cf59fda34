"""The HTTP edge: routes, authentication, dialects, streaming, receipts, error bodies. Knows nothing of learning methods.

`app.build_app(deps)` is the application, `deps.Deps` what it is given, `context.open_context` what a request is about.
"""
