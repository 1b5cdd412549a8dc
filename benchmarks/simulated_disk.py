"""A simulated disk: record what a process does to the regular files of a folder, and compute what
may be there after a power cut at any moment. Used by power_cuts.py; not a script.

Only what was synced is certain: content by an fsync of the file, names by one of the folder.
Anything else may be there completely, cut, in some of its blocks, or not at all.
"""

import builtins
import fcntl
import io
import itertools
import os
import pickle

_BLOCKS = (512, 4096)  # bytes that a disk or page cache writes atomically


class Recorder:
    """Records to a file what this process does to the regular files of a folder, as tuples that
    begin with the kind."""

    def __init__(self, folder, path):
        self.folder, self.real, self.numbers, self.next = (
            os.path.realpath(folder),
            {},
            {},
            itertools.count(),
        )
        self.trace = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for entry in os.scandir(self.folder):
            if entry.is_file(follow_symlinks=False):
                self.note("there", entry.name, self.number_of(entry.stat(), fresh=True))

    def install(self):
        """Replace Python's functions by recording ones."""
        for module, name, own in (
            (os, "open", self.open),
            (os, "write", self.write),
            (os, "fsync", self.fsync),
            (os, "ftruncate", self.ftruncate),
            (os, "replace", self.replace),
            (os, "rename", self.replace),
            (os, "unlink", self.unlink),
            (os, "remove", self.unlink),
            (os, "setxattr", self.setxattr),
            (builtins, "open", self.open_stream),
            (io, "open", self.open_stream),
        ):
            self.real[name if module is os else "builtin"] = getattr(module, name)
            setattr(module, name, own)

    def note(self, *what):
        self.real.get("write", os.write)(self.trace, pickle.dumps(what))

    def number_of(self, status, *, fresh=False):
        """Return the number of a file in the trace; None if it is not in the folder."""
        inode = status.st_dev, status.st_ino
        if fresh:
            self.numbers[inode] = next(self.next)
        return self.numbers.get(inode)

    def name_in(self, path):
        """Return the name of a path in the folder; None for other paths."""
        if isinstance(path, int):
            return None
        path = os.path.join(
            os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path)
        )
        return os.path.basename(path) if os.path.dirname(path) == self.folder else None

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        name = self.name_in(path) if dir_fd is None and flags & (os.O_WRONLY | os.O_RDWR) else None
        fresh = name is not None and not os.path.exists(path)
        descriptor = self.real["open"](path, flags, mode, dir_fd=dir_fd)
        if fresh:
            self.note("name", name, self.number_of(os.fstat(descriptor), fresh=True))
        elif name is not None and flags & os.O_TRUNC:
            self.note("truncate", self.number_of(os.fstat(descriptor)), 0)
        return descriptor

    def write(self, descriptor, data):
        status = os.fstat(descriptor)
        # such writes are appended here; others go through `Stream`
        at = status.st_size
        count = self.real["write"](descriptor, data)
        if (number := self.number_of(status)) is not None:
            self.note("write", number, at, bytes(data[:count]))
        return count

    def fsync(self, descriptor):
        self.real["fsync"](descriptor)
        status = os.fstat(descriptor)
        if os.path.samestat(status, os.stat(self.folder)):
            self.note("sync names")
        elif (number := self.number_of(status)) is not None:
            self.note("sync", number)

    def ftruncate(self, descriptor, size):
        self.real["ftruncate"](descriptor, size)
        if (number := self.number_of(os.fstat(descriptor))) is not None:
            self.note("truncate", number, size)

    def replace(self, source, target):
        number, names = (
            self.number_of(os.stat(source)),
            (self.name_in(source), self.name_in(target)),
        )
        self.real["replace"](source, target)
        if number is not None:
            assert None not in names, "a file that was renamed out of its folder"
            self.note("rename", *names, number)

    def unlink(self, path, *, dir_fd=None):
        self.real["unlink"](path, dir_fd=dir_fd)
        if dir_fd is None and (name := self.name_in(path)) is not None:
            self.note("remove", name)

    def setxattr(self, path, attribute, value, *rest, **more):
        self.real["setxattr"](path, attribute, value, *rest, **more)
        if (number := self.number_of(os.stat(path))) is not None:
            self.note("attribute", number, attribute, value)

    def open_stream(
        self,
        file,
        mode="r",
        buffering=-1,
        encoding=None,
        errors=None,
        newline=None,
        closefd=True,
        opener=None,
    ):
        """Replace the built-in open: files that may be written in the folder become a `Stream`."""
        writes = set(mode) & set("wax+")
        status = os.fstat(file) if isinstance(file, int) else None
        if not writes or (self.number_of(status) if status else self.name_in(file)) is None:
            return self.real["builtin"](
                file, mode, buffering, encoding, errors, newline, closefd, opener
            )
        raw = Stream(self, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


class Stream(io.FileIO):
    """A file whose writes are recorded."""

    def __init__(self, recorder, file, mode, closefd, opener):
        self.recorder = recorder
        super().__init__(
            file, mode, closefd, opener or (lambda path, flags: os.open(path, flags, 0o666))
        )
        self.number, self.appends = recorder.number_of(os.fstat(self.fileno())), mode[0] == "a"
        self.appends |= bool(fcntl.fcntl(self.fileno(), fcntl.F_GETFL) & os.O_APPEND)

    def write(self, data):
        at = os.fstat(self.fileno()).st_size if self.appends else self.tell()
        count = super().write(data)
        self.recorder.note("write", self.number, at, bytes(data[:count]))
        return count

    def truncate(self, size=None):
        size = super().truncate(size)
        self.recorder.note("truncate", self.number, size)
        return size


class File:
    """Content that is certain, and the operations since."""

    def __init__(self, content=b"", attributes=None):
        self.content, self.attributes, self.pending = content, attributes or {}, []

    def do(self, *what):
        self.pending.append(what)

    def sync(self):
        self.content, self.attributes = self.after(self.pending)
        self.pending = []

    def after(self, done):
        """Return content and attributes after these operations."""
        content, attributes = bytearray(self.content), dict(self.attributes)
        for kind, *what in done:
            if kind == "attribute":
                attributes[what[0]] = what[1]
            elif kind == "truncate":
                content = content[: what[0]].ljust(what[0], b"\0")
            else:
                at, data = what
                content = content.ljust(at, b"\0")
                content[at : at + len(data)] = data
        return bytes(content), attributes

    def after_cut(self, chance):
        """Return possible content and attributes: none, all or a beginning of the operations, or
        any of their blocks."""
        way = chance.choice(("nothing", "all", "torn", "blocks", "blocks"))
        if way == "nothing" or not self.pending:
            return self.content, self.attributes
        if way == "all":
            return self.after(self.pending)
        if way == "torn":
            done = self.pending[: chance.randrange(len(self.pending)) + 1]
            if done[-1][0] == "write":
                kind, at, data = done.pop()
                done.append((kind, at, data[: chance.randrange(len(data) + 1)]))
            return self.after(done)
        whole, attributes = self.after(self.pending)
        size = chance.choice((len(whole), chance.randint(*sorted((len(self.content), len(whole))))))
        block = chance.choice(_BLOCKS)
        found = bytearray(self.content[:size].ljust(size, b"\0"))
        likely = chance.random()
        for at in range(0, size, block):
            if chance.random() < likely:
                found[at : at + block] = whole[at : min(at + block, size)].ljust(
                    min(block, size - at), b"\0"
                )
        return bytes(found), attributes if chance.random() < 0.5 else self.attributes


class Disk:
    """The regular files of one folder after the operations of a trace. `names`: the certain names,
    with their File numbers."""

    def __init__(self, found):
        self.start, self.files, self.names, self.pending = found, {}, {}, []

    def do(self, kind, *what):
        if kind == "there":
            self.names[what[0]], self.files[what[1]] = what[1], File(*self.start[what[0]])
        elif kind == "sync":
            self.files[what[0]].sync()
        elif kind == "sync names":
            self.names, self.pending = _renamed(self.names, self.pending), []
        elif kind in ("name", "rename", "remove"):
            if kind == "name":
                self.files[what[1]] = File()
            self.pending.append((kind, *what))
        else:
            self.files[what[0]].do(kind, *what[1:])

    def certain(self, name):
        """Return the content that a name certainly has on the disk; None if the name itself may be
        lost."""
        number = self.names.get(name)
        return b"" if number is None else self.files[number].content

    def after_cut(self, chance):
        """Return possible files, {name: (content, attributes)}."""
        done = chance.choice(
            (
                [],
                self.pending,
                self.pending[: chance.randrange(len(self.pending) + 1)],
                [one for one in self.pending if chance.random() < 0.5],
            )
        )
        found = {number: file.after_cut(chance) for number, file in self.files.items()}
        return {name: found[number] for name, number in _renamed(self.names, done).items()}


def _renamed(names, done):
    names = dict(names)
    for kind, *what in done:
        if kind == "rename" and names.get(what[0]) == what[2]:
            del names[what[0]]
        if kind == "remove":
            names.pop(what[0], None)
        else:
            names[what[-2]] = what[-1]
    return names
