"""Recorded behaviour of the package: what a change of its inside must leave as it is.

`recordings` says how a recording is compared and written anew; each other module has one part, and a test beside it.
"""
