"""Where a model's weights lie: in a file on a drive (`weights.file`), or in host memory (`weights.host`)."""
