"""The embedded engine: the same core on a diffusers pipeline, and the `sixbit` command line."""
