"""Contains a driver for each kind of engine; `base` defines what a driver does, `registry` lists the drivers."""
