"""Checkpoints: commit, resume, verify, export and import."""

from __future__ import annotations
