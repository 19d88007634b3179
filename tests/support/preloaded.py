"""What programs that tests fork have loaded already (`forked`). Only that process imports this module."""

import gc

import tokencache.cli
import tokencache.testing.engine
from tokencache.testing.tokenizer import build_tokenizer

build_tokenizer()
gc.collect()
gc.freeze()  # a collection in a process that is forked leaves the shared pages alone

assert tokencache.cli
assert tokencache.testing.engine
