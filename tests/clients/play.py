"""Trains a small model with one library, as its users do, and prints a line of JSON on rank 0.

    torchrun --standalone --nproc-per-node 2 tests/clients/play.py ignite --ddp triton

``--ddp stock`` must print the same ``bits``, and so must ``--ddp in_place``.
"""

import argparse

import classifiers
import hugging_face
import special_models
from client import Client


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", help="NAME of a function with_NAME")
    parser.add_argument("--ddp", choices=["stock", "triton", "in_place"], required=True)
    parser.add_argument("--unused", action="store_true", help="add a parameter that nothing uses")
    arguments = parser.parse_args()
    functions = vars(classifiers) | vars(hugging_face) | vars(special_models)
    functions[f"with_{arguments.library}"](Client(arguments))


if __name__ == "__main__":
    main()
