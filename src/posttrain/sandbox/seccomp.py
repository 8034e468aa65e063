"""seccomp: the kernel refuses this process system calls that no program which computes an answer needs.

A deny-list: what is refused is named by what it could do. What remains is memory, files that are open or may be opened,
threads, time, and pipes. A refused call fails with EPERM, so Python raises PermissionError. Source: seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

from posttrain.sandbox import kernel

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# By name, the number on x86_64 and on aarch64; None where the architecture does not have the call.
_Numbers = dict[str, tuple[int | None, int | None]]
_NETWORK: _Numbers = {
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept4": (288, 242),
}
_PROCESSES: _Numbers = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
_IDENTITY: _Numbers = {
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setgroups": (116, 159),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
    "setns": (308, 268),
    "unshare": (272, 97),
    "personality": (135, 92),
}
_FILES: _Numbers = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Landlock does not cover attributes of files that belong to the same user.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "truncate": (76, 45),  # Landlock covers it from version 3
}
# Memory that no limit of the process counts, and that may outlive it.
_MEMORY: _Numbers = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}
# Queues, semaphores and shared memory of System V and POSIX: those of other processes are reached by their number or name.
_SHARED: _Numbers = {
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184),
    "mq_getsetattr": (245, 185),
}
# Seeing what others do with files that this process may not open, and where they are mounted.
_WATCHING: _Numbers = {
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "inotify_rm_watch": (255, 28),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "statmount": (457, 457),
    "listmount": (458, 458),
}
_KERNEL: _Numbers = {
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "uselib": (134, None),
}
_REFUSED: _Numbers = {**_NETWORK, **_PROCESSES, **_IDENTITY, **_FILES, **_MEMORY, **_SHARED, **_WATCHING, **_KERNEL}
# Refused by their arguments.
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
_CLONE_THREAD = 0x00010000
_KILL, _TGKILL = {"x86_64": 62, "aarch64": 129}, {"x86_64": 234, "aarch64": 131}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_PRCTL = {"x86_64": 157, "aarch64": 167}
# F_SETOWN, F_SETSIG, F_SETOWN_EX
_FCNTL, _FCNTL_SIGNALS = {"x86_64": 72, "aarch64": 25}, (8, 10, 15)
_IOCTL, _IOCTL_SIGNALS = (
    {"x86_64": 16, "aarch64": 29},
    (0x8901, 0x8902, 0x5412, 0x541C),
)  # FIOSETOWN … TIOCSTI, TIOCLINUX

# Classic BPF: load a word of struct seccomp_data; jump if equal; jump if any bit is set; jump if at least; and; return.
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_NUMBER, _ARCH = 0, 4
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000

Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, value


def offered() -> bool:
    return kernel.MACHINE in _ARCHITECTURE


def refuse() -> None:
    """Make the calls above fail, for this process and all that it starts. Needs no_new_privs.

    Raises: OSError.
    """
    if not offered():
        raise OSError(errno.ENOSYS, f"no list of system calls for {kernel.MACHINE}")
    program = b"".join(struct.pack("HBBI", *each) for each in _program(kernel.MACHINE, os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    kernel.prctl(kernel.PR_SET_SECCOMP, kernel.SECCOMP_MODE_FILTER, header)


def _program(machine: str, pid: int) -> list[Instruction]:
    column = 0 if machine == "x86_64" else 1
    refused = [numbers[column] for numbers in _REFUSED.values()]
    return [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),  # another architecture's numbers mean other calls
        (_LOAD, 0, 0, _NUMBER),
        *([(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL_PROCESS)] if machine == "x86_64" else []),
        *(line for number in refused if number is not None for line in _never(number, errno.EPERM)),
        *_never(_CLONE3, errno.ENOSYS),  # its flags are behind a pointer; the C library falls back to clone
        *_argument(_CLONE[machine], 0, [(_ANY_BIT, 1, 0, _CLONE_THREAD)]),
        *_argument(_KILL[machine], 0, [(_EQUAL, 1, 0, pid)]),
        *_argument(_TGKILL[machine], 0, [(_EQUAL, 1, 0, pid)]),
        # A connected pair within the process; other types could be sent from to any address.
        *_argument(_SOCKETPAIR[machine], 0, [(_EQUAL, 1, 0, _AF_UNIX)]),
        *_argument(_SOCKETPAIR[machine], 1, [(_AND, 0, 0, _SOCK_TYPE_MASK), (_EQUAL, 1, 0, _SOCK_STREAM)]),
        *_argument(_PRLIMIT[machine], 0, [(_EQUAL, 1, 0, 0)]),  # its own limits only
        # It dies with its warden.
        *_argument(_PRCTL[machine], 0, [(_EQUAL, 0, 1, kernel.PR_SET_PDEATHSIG)]),
        *(line for value in _FCNTL_SIGNALS for line in _argument(_FCNTL[machine], 1, [(_EQUAL, 0, 1, value)])),
        *(line for value in _IOCTL_SIGNALS for line in _argument(_IOCTL[machine], 1, [(_EQUAL, 0, 1, value)])),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _never(number: int, error: int) -> Iterator[Instruction]:
    yield (_EQUAL, 0, 1, number)
    yield (_RETURN, 0, 0, _ERROR | error)


def _argument(number: int, index: int, test: list[Instruction]) -> Iterator[Instruction]:
    """Refuse the call when ``test``, on the low half of an argument, falls through to the next instruction. It jumps over one
    instruction to allow; the number of the call is loaded again afterwards."""
    yield (_EQUAL, 0, len(test) + 3, number)
    yield (_LOAD, 0, 0, 16 + 8 * index)  # both architectures are little-endian
    yield from test
    yield (_RETURN, 0, 0, _ERROR | errno.EPERM)
    yield (_LOAD, 0, 0, _NUMBER)
