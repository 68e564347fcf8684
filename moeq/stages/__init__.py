"""One module a stage, each with run(context)."""
