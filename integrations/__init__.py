"""Integrations with training frameworks; each uses offload's public names only."""
