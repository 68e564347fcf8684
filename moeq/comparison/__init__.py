"""`moeq eval` without a run of its own: any number of models, checkpoints, runs and assignments, side by side."""
