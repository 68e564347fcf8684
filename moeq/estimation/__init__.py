"""moeq estimate without a run: sizes from a name, a configuration or a packed checkpoint; tables, files and a page."""
