"""One driver for each kind of engine; `base` says what a driver does, `registry` lists them."""
