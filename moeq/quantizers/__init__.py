"""From layer inputs to replicas and losses."""
