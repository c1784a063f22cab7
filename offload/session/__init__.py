"""A session: it owns the engine thread and every lifetime. `offload.Engine` is its public face."""
