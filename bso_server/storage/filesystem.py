"""On what kind of file system a path lies."""

from __future__ import annotations

import re
from pathlib import Path

_MOUNTS = Path("/proc/mounts")

# Where file locks and shared memory do not reach the other hosts, so that SQLite's write-ahead log is corrupted.
_NETWORK = re.compile(r"9p|afs|beegfs|ceph|cifs|glusterfs|gpfs|lustre|ncpfs|nfs4?|smb3|smbfs|fuse\.sshfs.*")


def network_filesystem(path: Path, mounts: str | None = None) -> str | None:
    """The type of the network file system that holds `path`, or None when it is local or nobody can tell.

    The file need not exist; without `mounts`, what ``/proc/mounts`` says counts.
    """
    if mounts is None:
        mounts = _MOUNTS.read_text() if _MOUNTS.exists() else ""
    resolved = path.resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        _device, mount_point, filesystem, *_ = line.split()
        # The kernel escapes blanks and backslashes as octal numbers.
        point = Path(mount_point.encode().decode("unicode_escape"))
        # Of two mounts on the same point the later one is what one sees.
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), filesystem
    return kind if _NETWORK.fullmatch(kind) else None
