"""Trains a small model with one library, as its users do, and prints a line of JSON on rank 0.

    torchrun --standalone --nproc-per-node 2 tests/clients/play.py LIBRARY stock|triton|in_place

The results must have the same ``bits`` with each class.
"""

import sys

import classifiers
import hugging_face
import special_models
from client import Client

if __name__ == "__main__":
    functions = vars(classifiers) | vars(hugging_face) | vars(special_models)
    library, ddp = sys.argv[1:]
    functions[f"with_{library}"](Client(ddp))
