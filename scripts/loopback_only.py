"""Run a command where the loopback is the whole network: `python -m scripts.loopback_only COMMAND...`.

Chromium breaks off every request of its pages when an address of the machine comes or goes
(ERR_NETWORK_CHANGED), as with each container that starts. A network namespace of its own keeps it apart from
those, and shows that pages need no other address. Root alone can make one; without, the command runs in the
machine's network, which is told.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Sequence

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>; os.unshare is Python 3.12's
_SET_FLAGS, _UP = 0x8914, 0x1  # SIOCSIFFLAGS and IFF_UP of <linux/sockios.h> and <linux/if.h>


def leave_network() -> None:
    """Move this thread and what it starts to a network of a loopback alone.

    Raises OSError where that may not be done.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "network namespaces are Linux' own")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP))


def main(command: Sequence[str]) -> None:
    """Become the command."""
    try:
        leave_network()
    except OSError as error:
        print(f"in the machine's own network ({error.strerror})", file=sys.stderr)
    os.execvp(command[0], list(command))  # noqa: S606 -- a command of the Makefile


if __name__ == "__main__":
    main(sys.argv[1:])
