"""An accelerator, or none: its memory, its lanes, and host memory as it reaches it."""
