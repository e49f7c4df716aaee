"""In a rank of a compared script: redirects the files that the script saves to a scratch folder.

A file that the script saves with ``torch.save``, safetensors, ``torch.distributed.checkpoint`` or
fsspec goes to a folder of the launch, under the path that the script gives. From then on, that path
refers to the file in the folder, for functions that load, and for the usual functions that find,
list, rename, copy, link, read or remove a file. All ranks of a launch share the folder, and no
other launch does. Folders that the script creates are recorded, so that the launcher can remove
those that stay empty.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem

_LSTAT, _MAKE = os.lstat, os.mkdir  # the original functions


class Scratch:
    """The folder of one launch, which need not exist, and a file that records folders."""

    def __init__(self, folder: str, notes: str) -> None:
        self._folder, self._notes = folder, notes

    def install(self) -> None:
        """Install the redirection in this process."""
        found, made, named = self._found, self._made, self._named
        _wrap(torch, "load", 0, "f", found)
        _wrap(torch, "save", 1, "f", made)
        _wrap(filesystem.FileSystemReader, "__init__", 1, "path", found)
        _wrap(filesystem.FileSystemReader, "reset", 1, "checkpoint_id", found)
        _wrap(filesystem.FileSystemWriter, "__init__", 1, "path", named)
        _wrap(filesystem.FileSystemWriter, "reset", 1, "checkpoint_id", named)
        if importlib.util.find_spec("safetensors") is not None:
            library = importlib.import_module("safetensors")
            functions = importlib.import_module("safetensors.torch")
            _wrap(library, "safe_open", 0, "filename", found)
            _wrap(functions, "load_file", 0, "filename", found)
            _wrap(functions, "save_file", 1, "filename", made)
        for name in ("stat", "lstat", "access", "remove", "unlink"):
            _wrap(os, name, 0, "path", found)
        _wrap(shutil, "rmtree", 0, "path", found)
        for name in ("rename", "replace", "link", "symlink"):
            self._wrap_pair(os, name)
        for name in ("copy", "copy2", "copyfile"):
            self._wrap_pair(shutil, name)
        self._wrap_listings()
        for module in (builtins, io):
            self._wrap_open(module, "open")
        self._wrap_fsspec()
        self._note_folders()

    def _there(self, path: Any) -> str:
        """Return the location of ``path`` in the folder."""
        return self._folder + os.path.abspath(os.fsdecode(path))

    def _found(self, path: Any) -> Any:
        """Return the file in the folder if it exists, otherwise ``path``."""
        if isinstance(path, str | bytes | os.PathLike) and os.fspath(path):
            there = self._there(path)
            try:
                _LSTAT(there)
            except OSError:
                return path
            return os.fsencode(there) if isinstance(path, bytes) else there
        return path

    def _made(self, path: Any) -> Any:
        """Return a path in the folder for a file that the script could create."""
        if not isinstance(path, str | bytes | os.PathLike):
            return path
        # If its folder does not exist, the script gets the error that it would get without us.
        folder = os.path.dirname(os.path.abspath(os.fsdecode(path)))
        return self._named(path) if os.path.isdir(folder) else path

    def _named(self, path: Any) -> Any:
        """Return the path in the folder, after creating its parent folders."""
        if path is None:
            return None
        there = self._there(path)
        self._make(os.path.dirname(there))
        return there

    def _make(self, folder: str) -> None:
        """Create ``folder`` below the scratch folder, including its parents."""
        if not os.path.isdir(folder):
            self._make(os.path.dirname(folder))
            with suppress(FileExistsError):  # created by another rank
                _MAKE(folder)

    def _wrap_pair(self, module: Any, name: str) -> None:
        """Keep a saved file that is renamed or copied in the folder, under its new name."""
        function = getattr(module, name)

        @functools.wraps(function)
        def wrapped(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            start = src
            if name == "symlink":  # its target is relative to the folder of the link
                start = os.path.join(os.path.dirname(os.fsdecode(dst)), os.fsdecode(src))
            found = self._found(start)
            if found is not start:
                function(found, self._made(dst), *args, **kwargs)
                return dst
            return function(src, dst, *args, **kwargs)

        setattr(module, name, wrapped)

    def _wrap_listings(self) -> None:
        """Include the saved files in listings, also for ``glob`` and ``os.walk``."""
        scan, names = os.scandir, os.listdir

        @functools.wraps(scan)
        def scandir(path: Any = ".") -> Any:
            there = self._found(path)
            if there is path:
                return scan(path)
            entries = {entry.name: entry for entry in scan(there)}
            with suppress(OSError), scan(path) as own:  # there is none if all its files were saved
                entries = {**{entry.name: entry for entry in own}, **entries}
            return _Entries(entries.values())

        @functools.wraps(names)
        def listdir(path: Any = ".") -> list[Any]:
            is_own = self._found(path) is path
            return names(path) if is_own else [entry.name for entry in scandir(path)]

        os.scandir, os.listdir = scandir, listdir

    def _wrap_open(self, module: Any, name: str) -> None:
        function = getattr(module, name)

        @functools.wraps(function)
        def wrapped(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            path = self._found(file) if "r" in mode else file
            return function(path, mode, *args, **kwargs)

        setattr(module, name, wrapped)

    def _wrap_fsspec(self) -> None:
        local = importlib.import_module("fsspec.implementations.local").LocalFileOpener
        construct = local.__init__

        @functools.wraps(construct)
        def constructing(opener: Any, path: Any, mode: str, *args: Any, **kwargs: Any) -> None:
            path = self._found(path) if "r" in mode else self._made(path)
            construct(opener, path, mode, *args, **kwargs)

        local.__init__ = constructing

    def _note_folders(self) -> None:
        make = os.mkdir

        @functools.wraps(make)
        def making(path: Any, *args: Any, **kwargs: Any) -> None:
            make(path, *args, **kwargs)
            if kwargs.get("dir_fd") is None:
                with open(self._notes, "a", encoding="utf-8") as notes:
                    notes.write(f"{os.path.abspath(os.fsdecode(path))}\n")

        os.mkdir = making


class _Entries(Iterator[Any]):
    """The return value of os.scandir()."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _wrap(owner: Any, name: str, at: int, keyword: str, to: Callable[[Any], Any]) -> None:
    """Pass the path argument of a function through ``to``."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None:  # the path is relative to another folder
            return function(*args, **kwargs)
        if keyword in kwargs:
            kwargs[keyword] = to(kwargs[keyword])
        elif len(args) > at:
            args = (*args[:at], to(args[at]), *args[at + 1 :])
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)
