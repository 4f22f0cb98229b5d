"""Which headers of a machine belong to its compiler and C library.

The identity of a host compiler stands for these and no others. /usr/include also has headers of other packages, which
differ from machine to machine, so the C library's are known by their names. A header of such a name in /usr/local would
take the place of the C library's, so none of that directory is accepted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

# Headers of glibc up to 2.42, without `.h`.
_FILES = """
    _G_config a.out aio aliases alloca ar argp argz assert byteswap complex cpio crypt ctype dirent dlfcn elf
    endian envz err errno error execinfo fcntl features features-time64 fenv fmtmsg fnmatch fpu_control fstab fts
    ftw gconv getopt glob gnu-versions grp gshadow iconv ieee754 ifaddrs inttypes langinfo lastlog libgen libintl
    libio limits link locale malloc math mcheck memory mntent monetary mqueue netdb nl_types nss obstack paths poll
    printf pthread pty pwd re_comp regex resolv sched search semaphore setjmp sgtty shadow signal spawn stab stdbit
    stdc-predef stdint stdio stdio_ext stdlib string strings syscall sysexits syslog tar termio termios tgmath
    threads time ttyent uchar ucontext ulimit unistd utime utmp utmpx values wait wchar wctype wordexp xlocale
"""
_SYS = """
    acct auxv bitypes cdefs dir elf epoll errno eventfd fanotify fcntl file fsuid gmon ifunc inotify io ioctl ipc
    mman mount msg param personality pidfd poll prctl procfs ptrace queue quota random reg resource rseq select sem
    sendfile shm signal signalfd single_threaded socket socketvar stat statfs statvfs swap syscall sysctl sysinfo
    syslog sysmacros termios time timeb timerfd times timex ttydefaults types ucontext uio un unistd user utsname
    vfs wait xattr
"""
_NETINET = "ether icmp6 if_ether igmp in in_systm ip ip6 ip_icmp tcp udp"
# Directories that no other package has headers in: glibc's, and those of the kernel that glibc's include.
_DIRECTORIES = ("arpa", "bits", "gnu", "net", "netpacket", "sys/platform")
_KERNEL = ("asm", "asm-generic", "linux")


def is_of_cxx(directory: str, version: str) -> bool:
    """Return whether a directory that g++ searches is one of its C++ library, by the version in its path."""
    return re.search(rf"/c\+\+/{version.partition('.')[0]}\b", directory) is not None


def is_inside(directory: str, install: str) -> bool:
    """Return whether a directory is inside the one of g++'s own headers and start files."""
    installed = (os.path.normpath(install), os.path.realpath(install))
    names = (os.path.normpath(directory), os.path.realpath(directory))
    return any(f"{name}/".startswith(f"{own}/") for name in names for own in installed)


def patterns(search: Sequence[str], install: str, version: str) -> tuple[str, ...]:
    """Return regular expressions for the paths of the headers that belong to g++ and the C library.

    Args:
        search: The directories that g++ searches.
        install: The directory of its own programs and headers.
        version: Its version, which is in the paths of the C++ library.
    """
    whole: list[str] = []
    by_name: list[str] = []
    for directory in dict.fromkeys(
        name for path in search for name in (os.path.normpath(path), os.path.realpath(path))
    ):
        if is_of_cxx(directory, version) or is_inside(directory, install):
            whole.append(f"{re.escape(directory)}/.*")
        elif not directory.endswith("/local/include"):
            by_name += _of_c_library(directory)
    return tuple(dict.fromkeys([*whole, *by_name]))


def _of_c_library(directory: str) -> Iterator[str]:
    top = re.escape(directory)
    for below, names in (("", _FILES), ("sys/", _SYS), ("netinet/", _NETINET)):
        yield rf"{top}/{below}({'|'.join(map(re.escape, names.split()))})\.h"
    yield f"{top}/({'|'.join((*_DIRECTORIES, *_KERNEL))})/.*"
    # Where each package has a directory of its own, as with Nix, the kernel's headers are behind links.
    for name in _KERNEL:
        real = os.path.realpath(f"{directory}/{name}")
        if os.path.isdir(real) and real != f"{directory}/{name}":  # noqa: PTH112
            yield f"{re.escape(real)}/.*"
