"""A folder seen through FUSE, which is how many network file systems come; needs root and /dev/fuse, and no library.

    python seen_through_fuse.py BELOW POINT [direct]

Serves POINT with what is in BELOW until it is unmounted. Whatever is opened with O_DIRECT is opened so below as well
with `direct`, and as any other file without. A file that is deleted while somebody has it open stays under another
name until it is closed, as with other servers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

THREADS = 8
MOST_BYTES = 1 << 20
"""Of one read or write; the kernel cuts longer ones."""
IN, OUT = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
SETATTR = struct.Struct("<II6Q8I")
TRANSFER = struct.Struct("<QQIIQII")
FLAGS = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 22
"""Several reads at once; O_TRUNC comes with an open; writes of more than a page; as long as the answer says."""
MODE, UID, GID, SIZE, ATIME, MTIME, ATIME_NOW, MTIME_NOW = (1 << bit for bit in (0, 1, 2, 3, 4, 5, 7, 8))


@contextlib.contextmanager
def mounted(below: Path, point: Path, *, direct: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Have a folder seen at another one; yield its server. Skips the test where that cannot be."""
    import pytest

    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    command = [sys.executable, "-IS", __file__, str(below), str(point), *(["direct"] if direct else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        if not server.stdout.readline():
            pytest.skip(f"no FUSE here: {server.stderr.read().decode().strip()}")
        try:
            yield server
        finally:
            subprocess.run(["umount", "--lazy", str(point)], check=True)
            server.kill()  # which ends what somebody may still have open there


class Server:
    """Answers the kernel, on several threads.

    Args:
        below: What is served.
        device: An open /dev/fuse that is mounted.
        direct: Whether files are opened below with O_DIRECT where they are here.
    """

    def __init__(self, below: str, device: int, *, direct: bool) -> None:
        self._device, self._left_out = device, 0 if direct else os.O_DIRECT
        self._lock = threading.Lock()
        self._paths = {1: below}  # of nodes, by their numbers
        self._nodes = {below: 1}
        self._open: dict[int, list[int]] = {}  # descriptors of nodes
        self._hidden: dict[int, str] = {}  # nodes that are gone when these are closed
        # No FLUSH (25): the kernel then asks for none, for which the end of a process would wait.
        self._answers: dict[int, Callable[[int, memoryview], bytes]] = {
            1: self._lookup,
            3: self._getattr,
            4: self._setattr,
            9: self._mkdir,
            10: self._unlink,
            11: self._rmdir,
            12: self._rename,
            14: self._open_file,
            16: self._write,
            17: self._statfs,
            18: self._release,
            20: self._fsync,
            26: self._init,
            27: lambda node, body: struct.pack("<QII", 0, 0, 0),  # OPENDIR
            28: self._readdir,
            29: lambda node, body: b"",  # RELEASEDIR
            30: self._fsyncdir,
            35: self._create,
            43: self._fallocate,
            45: self._rename2,
        }

    def serve(self) -> None:
        """Answer until it is unmounted; on any number of threads."""
        request = mmap.mmap(-1, MOST_BYTES + 8192)  # its pages, and those of `buffer`, are aligned as O_DIRECT wants
        buffer = mmap.mmap(-1, MOST_BYTES)
        while True:
            try:
                count = os.readv(self._device, [request])
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # it was interrupted
                    continue
                return
            _, code, unique, node, *_ = IN.unpack_from(request)
            if code in (2, 36, 42):  # FORGET, INTERRUPT and BATCH_FORGET want no answer
                continue
            body, number, answer = memoryview(request)[IN.size : count], 0, b""
            try:
                if code == 15:
                    answer = self._read(body, buffer)
                elif code in self._answers:
                    answer = self._answers[code](node, body)
                else:
                    number = errno.ENOSYS
            except OSError as error:
                number = error.errno or errno.EIO
            body.release()
            with contextlib.suppress(FileNotFoundError):  # whoever asked has been killed
                os.writev(self._device, [OUT.pack(OUT.size + len(answer), -number, unique), answer])

    # Names

    def _path(self, node: int, name: memoryview | None = None) -> str:
        with self._lock:
            path = self._paths[node]
        return path if name is None else f"{path}/{bytes(name).split(bytes(1))[0].decode()}"

    def _entry(self, path: str) -> bytes:
        attributes = attributes_of(os.lstat(path))
        with self._lock:
            node = self._nodes.setdefault(path, len(self._paths) + 1)
            self._paths[node] = path
        return struct.pack("<4QII", node, 0, 0, 0, 0, 0) + attributes

    def _moved(self, old: str, new: str) -> None:
        """Know what lies at a path, and below it, by another one."""
        with self._lock:
            self._nodes.pop(new, None)
            for path, node in [*self._nodes.items()]:
                if path == old or path.startswith(old + "/"):
                    del self._nodes[path]
                    self._paths[node] = new + path[len(old) :]
                    self._nodes[self._paths[node]] = node

    def _lookup(self, node: int, body: memoryview) -> bytes:
        return self._entry(self._path(node, body))

    def _mkdir(self, node: int, body: memoryview) -> bytes:
        path, (mode, mask) = self._path(node, body[8:]), struct.unpack_from("<II", body)
        os.mkdir(path, mode & ~mask)
        return self._entry(path)

    def _unlink(self, node: int, body: memoryview) -> bytes:
        path = self._path(node, body)
        with self._lock:
            gone = self._nodes.get(path, 0)
            is_open = bool(self._open.get(gone))
        if is_open:
            hidden = f"{os.path.dirname(path)}/.fuse_hidden{gone:08x}"
            os.rename(path, hidden)
            self._moved(path, hidden)
            self._hidden[gone] = hidden
        else:
            os.unlink(path)
            with self._lock:
                self._nodes.pop(path, None)
        return b""

    def _rmdir(self, node: int, body: memoryview) -> bytes:
        path = self._path(node, body)
        os.rmdir(path)
        with self._lock:
            self._nodes.pop(path, None)
        return b""

    def _rename(self, node: int, body: memoryview, at: int = 8) -> bytes:
        old, new, *_ = (name.decode() for name in bytes(body[at:]).split(bytes(1)))
        paths = f"{self._path(node)}/{old}", f"{self._path(*struct.unpack_from('<Q', body))}/{new}"
        os.rename(*paths)
        self._moved(*paths)
        return b""

    def _rename2(self, node: int, body: memoryview) -> bytes:
        if struct.unpack_from("<I", body, 8)[0]:
            raise OSError(errno.EINVAL, "no flags")
        return self._rename(node, body, 16)

    # Attributes

    def _getattr(self, node: int, body: memoryview) -> bytes:
        try:
            found = os.lstat(self._path(node))
        except FileNotFoundError:  # somebody has deleted it below
            with self._lock:
                if not self._open.get(node):
                    raise
                found = os.fstat(self._open[node][0])
        return struct.pack("<QII", 0, 0, 0) + attributes_of(found)

    def _setattr(self, node: int, body: memoryview) -> bytes:
        given, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = SETATTR.unpack_from(body)
        path = self._path(node)
        if given & MODE:
            os.chmod(path, stat.S_IMODE(mode))
        if given & (UID | GID):
            os.chown(path, uid if given & UID else -1, gid if given & GID else -1)
        if given & SIZE:
            os.truncate(path, size)
        if given & (ATIME_NOW | MTIME_NOW):
            os.utime(path)
        elif given & (ATIME | MTIME):
            was = os.lstat(path)
            times = (was.st_atime_ns, was.st_mtime_ns)
            wanted = (atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns)
            chosen = (wanted[0] if given & ATIME else times[0], wanted[1] if given & MTIME else times[1])
            os.utime(path, ns=chosen)
        return self._getattr(node, body)

    def _statfs(self, node: int, body: memoryview) -> bytes:
        found = os.statvfs(self._path(node))
        counts = found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree
        return struct.pack("<5Q10I", *counts, found.f_bsize, found.f_namemax, found.f_frsize, *7 * (0,))

    def _readdir(self, node: int, body: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        entries = [(entry.name.encode(), entry.inode()) for entry in os.scandir(self._path(node))]
        answer = b""
        for place, (name, number) in enumerate(sorted(entries)[offset:], offset + 1):
            one = struct.pack("<QQII", number, place, len(name), 0) + name
            one += bytes(-len(one) % 8)
            if len(answer) + len(one) > size:
                break
            answer += one
        return answer

    def _fsyncdir(self, node: int, body: memoryview) -> bytes:
        folder = os.open(self._path(node), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return b""

    # Files

    def _opened(self, path: str, flags: int, mode: int = 0) -> int:
        return os.open(path, flags & ~(self._left_out | os.O_APPEND | os.O_NOFOLLOW) | os.O_CLOEXEC, mode)

    def _handle(self, node: int, descriptor: int) -> bytes:
        with self._lock:
            self._open.setdefault(node, []).append(descriptor)
        return struct.pack("<QII", descriptor, 0, 0)

    def _open_file(self, node: int, body: memoryview) -> bytes:
        return self._handle(node, self._opened(self._path(node), struct.unpack_from("<I", body)[0]))

    def _create(self, node: int, body: memoryview) -> bytes:
        flags, mode, mask = struct.unpack_from("<III", body)
        path = self._path(node, body[16:])
        descriptor = self._opened(path, flags | os.O_CREAT, mode & ~mask)
        entry = self._entry(path)
        return entry + self._handle(struct.unpack_from("<Q", entry)[0], descriptor)

    def _release(self, node: int, body: memoryview) -> bytes:
        descriptor = struct.unpack_from("<Q", body)[0]
        with self._lock:
            self._open[node].remove(descriptor)
            hidden = None if self._open[node] else self._hidden.pop(node, None)
            self._nodes.pop(hidden or "", None)
        os.close(descriptor)
        if hidden is not None:
            os.unlink(hidden)
        return b""

    def _read(self, body: memoryview, buffer: mmap.mmap) -> bytes:
        descriptor, offset, size, *_ = TRANSFER.unpack_from(body)
        with memoryview(buffer) as view:
            return bytes(view[: os.preadv(descriptor, [view[:size]], offset)])

    def _write(self, node: int, body: memoryview) -> bytes:
        descriptor, offset, size, *_ = TRANSFER.unpack_from(body)
        aligned = mmap.mmap(-1, max(size, 1))
        aligned[:size] = bytes(body[TRANSFER.size : TRANSFER.size + size])
        with memoryview(aligned) as view:
            return struct.pack("<II", os.pwritev(descriptor, [view[:size]], offset), 0)

    def _fsync(self, node: int, body: memoryview) -> bytes:
        descriptor, flags = struct.unpack_from("<QI", body)
        (os.fdatasync if flags & 1 else os.fsync)(descriptor)
        return b""

    def _fallocate(self, node: int, body: memoryview) -> bytes:
        descriptor, offset, length, mode = struct.unpack_from("<QQQI", body)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "no modes")
        os.posix_fallocate(descriptor, offset, length)
        return b""

    def _init(self, node: int, body: memoryview) -> bytes:
        major, minor, ahead, flags = struct.unpack_from("<4I", body)
        spoken = major, min(minor, 31), ahead, flags & FLAGS
        return struct.pack("<4IHHIIHH8I", *spoken, 16, 12, MOST_BYTES, 1, MOST_BYTES // mmap.PAGESIZE, *9 * (0,))


def attributes_of(found: os.stat_result) -> bytes:
    times = [(ns // 10**9, ns % 10**9) for ns in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
    seconds, rest = zip(*times, strict=True)
    sizes = found.st_ino, found.st_size, found.st_blocks
    owners = found.st_mode, found.st_nlink, found.st_uid, found.st_gid
    return ATTRIBUTES.pack(*sizes, *seconds, *rest, *owners, found.st_rdev, found.st_blksize, 0)


def main() -> None:
    below, point, *rest = sys.argv[1:]
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if ctypes.CDLL(None, use_errno=True).mount(b"through", point.encode(), b"fuse", 0, options.encode()):
        sys.exit(os.strerror(ctypes.get_errno()))
    server = Server(below, device, direct=rest == ["direct"])
    print("mounted", flush=True)
    threads = [threading.Thread(target=server.serve) for _ in range(THREADS)]
    for thread in threads:
        thread.start()


if __name__ == "__main__":
    main()
