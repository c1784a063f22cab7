"""Importing this calls `enable()`, for programs that can be told to import a module and no more."""

from offload.integrations.verl.switch import enable

enable()
