"""Where a model's weights lie: in a file on a drive (`offload.weights.file`)."""
