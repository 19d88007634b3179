"""Engine drivers: everything in which engines differ."""
