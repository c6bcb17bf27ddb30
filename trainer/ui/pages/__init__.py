"""HTTP handlers: each module has `routes(studio)`, reads a request, asks a view and renders a template."""
