"""Decides: operations, where tiles lie, the machine, saves, the one loop. Pure, but for the loop that it is given."""
