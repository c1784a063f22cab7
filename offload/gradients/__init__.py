"""One store of gradients, in host memory or on a device, and their norms."""
