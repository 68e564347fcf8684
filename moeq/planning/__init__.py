"""What a run will need and whether it fits, from configuration, safetensors headers and a probe of a few seconds."""
