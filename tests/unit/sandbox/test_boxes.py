"""What a boxed program can do, shown with canaries that are made for it: files, listeners on loopback, a process.

Every program is harmless outside a box: it sends nothing beyond this machine, and what it fills or forks is bounded.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import posttrain
from posttrain.sandbox import boxes
from posttrain.sandbox.boxes import BoxError, BoxRun, Program
from posttrain.sandbox.layers import Layer, Layers, describe, probe, walls_for
from posttrain.sandbox.walls import WALLS, BoxLimits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boxes are made by Linux")

# All that there is, and two halves that must hold alone: where a kernel has no Landlock or no seccomp, and where a container
# allows no namespaces.
SETS = {
    "all": tuple(WALLS),
    "namespaces": ("user", "mount", "pid", "network", "ipc", "uts"),
    "kernel": ("landlock", "seccomp"),
}


@pytest.fixture(params=SETS)
def walls(request: pytest.FixtureRequest) -> tuple[str, ...]:
    off = {layer.name: layer.reason for layer in probe().layers if not layer.on}
    wanted = SETS[request.param]
    if request.param != "all" and off.keys() & set(wanted):
        pytest.skip("; ".join(f"no {name}: {off[name]}" for name in wanted if name in off))
    return tuple(name for name in wanted if name not in off)


def box(source: str, walls: tuple[str, ...] | None = None, stdin: str = "", **limits: float) -> BoxRun:
    found = probe().walls if walls is None else walls
    return boxes.run(Program(source=source, stdin=stdin), BoxLimits(**limits), found)


# Files of these names are tried to be made where every user may make some.
ESCAPED = (Path("/tmp/posttrain-escape"), Path("/dev/shm/posttrain-escape"))


@dataclass
class Canaries:
    given: dict[str, object]
    file: Path
    victim: subprocess.Popen
    listeners: dict[str, socket.socket]

    def noticed(self) -> list[str]:
        """The listeners that something has come to."""
        found = []
        for name, listener in self.listeners.items():
            listener.setblocking(False)
            try:
                listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(1 << 12)
                found.append(name)
            except BlockingIOError:
                pass
        return found


@pytest.fixture
def canaries(tmp_path: Path) -> Iterator[Canaries]:
    """Things outside that anyone may read, write, reach or signal, and what they noticed."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    file = tmp_path / "canary"
    file.write_text("for nobody", encoding="utf-8")
    file.chmod(0o666)
    listeners = [
        ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        ("unix", socket.AF_UNIX, socket.SOCK_DGRAM, str(tmp_path / "socket")),
        ("abstract", socket.AF_UNIX, socket.SOCK_DGRAM, f"\0posttrain-canary-{os.getpid()}"),
    ]
    opened: dict[str, socket.socket] = {}
    for name, family, kind, address in listeners:
        opened[name] = socket.socket(family, kind)
        opened[name].bind(address)
        if kind == socket.SOCK_STREAM:
            opened[name].listen()
    (tmp_path / "socket").chmod(0o777)
    victim = subprocess.Popen(["sleep", "60"], env={"SECRET": "victim"})
    libc = ctypes.CDLL(None, use_errno=True)
    shared = {
        "queue": libc.msgget(0, 0o1666),
        "semaphore": libc.semget(0, 1, 0o1666),
        "memory": libc.shmget(0, 4096, 0o1666),
    }
    assert min(shared.values()) >= 0
    libc.msgsnd(shared["queue"], struct.pack("l8s", 1, b"secret"), 8, 0)
    mq = f"/posttrain-canary-{os.getpid()}".encode()
    has_mq = libc.mq_open(mq, os.O_CREAT | os.O_RDWR, 0o666, None) >= 0
    given = {
        "file": str(file),
        "port": opened["tcp"].getsockname()[1],
        "udp": opened["udp"].getsockname()[1],
        "unix": str(tmp_path / "socket"),
        "abstract": listeners[3][3],
        "victim": victim.pid,
        "shared": shared,
        "mq": mq.decode() if has_mq else None,
        "repository": str(Path(posttrain.__file__).parent / "errors.py"),
        "home": str(Path.home()),
        "at_home": [path.name for path in Path.home().iterdir() if path not in Path(os.__file__).parents],
    }
    yield Canaries(given, file, victim, opened)
    for path in ESCAPED:
        path.unlink(missing_ok=True)
    libc.mq_unlink(mq)
    libc.msgctl(shared["queue"], 0, None)  # IPC_RMID
    libc.semctl(shared["semaphore"], 0, 0)
    libc.shmctl(shared["memory"], 0, None)
    victim.kill()
    victim.wait()
    for listener in opened.values():
        listener.close()


ATTEMPTS = r"""
import ctypes, json, os, signal, sys
given = json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)
done = []
def attempt(function):
    try:
        if function() is not False:
            done.append(function.__name__)
    except BaseException:
        pass
def must(result):
    if result < 0:
        raise OSError(ctypes.get_errno())
def sent(family, address):
    import socket
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.sendto(b"escaped", address)

@attempt
def read_file(): open(given["file"]).read()
@attempt
def read_shadow(): open("/etc/shadow").read()
@attempt
def read_passwd(): open("/etc/passwd").read()
@attempt
def list_home(): return bool(set(os.listdir(given["home"])) & set(given["at_home"]))
@attempt
def read_repository(): open(given["repository"]).read()
@attempt
def import_package(): import posttrain
@attempt
def see_environment(): return bool(os.environ) or bool(open("/proc/self/environ").read())
@attempt
def write_file(): open(given["file"], "w").write("escaped")
@attempt
def append_file(): open(given["file"], "a").write("escaped")
@attempt
def make_file(): open(given["file"] + ".new", "w").write("escaped")
@attempt
def change_mode(): os.chmod(given["file"], 0o600)
@attempt
def change_time(): os.utime(given["file"], (1, 1))
@attempt
def cut_file(): os.truncate(given["file"], 0)
@attempt
def read_through_symlink():
    os.symlink(given["file"], "link")
    open("link").read()
@attempt
def read_up(): open("../" * 30 + given["file"]).read()
@attempt
def hard_link(): os.link(given["file"], "hard")
@attempt
def write_tmp(): open("/tmp/posttrain-escape", "w")
@attempt
def write_dev_shm(): open("/dev/shm/posttrain-escape", "w")
@attempt
def tcp():
    import socket
    socket.create_connection(("127.0.0.1", given["port"]), 2)
@attempt
def udp():
    import socket
    sent(socket.AF_INET, ("127.0.0.1", given["udp"]))
@attempt
def dns():
    import socket
    question = bytes([0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 6]) + b"canary" + bytes([7]) + b"invalid" + bytes([0, 0, 1, 0, 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # to the canary, as if it were a name server
        s.connect(("127.0.0.1", given["udp"]))
        s.send(question)
@attempt
def look_up_a_name():
    import socket
    socket.getaddrinfo("localhost", 80)
@attempt
def unix():
    import socket
    sent(socket.AF_UNIX, given["unix"])
@attempt
def unix_abstract():
    import socket
    sent(socket.AF_UNIX, given["abstract"])
@attempt
def from_a_pair():
    import socket
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"escaped", given["unix"])
@attempt
def signal_parent(): return bool(os.getppid()) and os.kill(os.getppid(), 0) is None
@attempt
def signal_all(): os.kill(-1, 0)
@attempt
def see_victim(): open("/proc/%d/environ" % given["victim"]).read()
@attempt
def see_first_process(): open("/proc/1/environ").read()
@attempt
def trace_victim(): must(libc.ptrace(16, given["victim"], 0, 0))
@attempt
def read_victim():
    buffer = ctypes.create_string_buffer(8)
    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    one = Vector(ctypes.addressof(buffer), 8)
    must(libc.process_vm_readv(given["victim"], ctypes.byref(one), 1, ctypes.byref(one), 1, 0))
@attempt
def limit_victim():
    import resource
    resource.prlimit(given["victim"], resource.RLIMIT_NOFILE)
@attempt
def become_root(): os.setuid(0)
@attempt
def mount(): must(libc.mount(b"tmpfs", b"/scratch", b"tmpfs", 0, None))
@attempt
def make_device(): os.mknod("device", 0o600 | 0o020000, os.makedev(1, 1))
@attempt
def change_root(): os.chroot("/")
@attempt
def host_name():
    import socket
    socket.sethostname("escaped")
@attempt
def outlive_the_warden(): return libc.prctl(1, 0, 0, 0, 0) == 0
@attempt
def raise_limits():
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
@attempt
def run_a_shell():
    import subprocess
    subprocess.run(["/bin/sh", "-c", "true"], check=True)
@attempt
def signal_victim(): os.kill(given["victim"], signal.SIGTERM)
@attempt
def remove_file(): os.remove(given["file"])
@attempt
def see_a_queue(): must(libc.msgctl(given["shared"]["queue"], 2, ctypes.create_string_buffer(1024)))
@attempt
def write_to_a_queue():
    message = ctypes.create_string_buffer(bytes([1]) + bytes(15))
    must(libc.msgsnd(given["shared"]["queue"], message, 8, 0o4000))
@attempt
def read_a_queue(): must(libc.msgrcv(given["shared"]["queue"], ctypes.create_string_buffer(64), 8, 0, 0o4000))
@attempt
def remove_a_queue(): must(libc.msgctl(given["shared"]["queue"], 0, None))
@attempt
def read_a_semaphore(): must(libc.semctl(given["shared"]["semaphore"], 0, 12))
@attempt
def remove_semaphores(): must(libc.semctl(given["shared"]["semaphore"], 0, 0))
@attempt
def map_shared_memory():
    libc.shmat.restype = ctypes.c_ssize_t
    must(libc.shmat(given["shared"]["memory"], None, 0))
@attempt
def remove_shared_memory(): must(libc.shmctl(given["shared"]["memory"], 0, None))
@attempt
def remove_a_posix_queue(): must(libc.mq_unlink(given["mq"].encode()))
@attempt
def watch_a_folder(): must(libc.inotify_add_watch(libc.inotify_init(), os.path.dirname(given["file"]).encode(), 0x100))
@attempt
def watch_the_library():
    if "/scratch" == os.getcwd():
        return False  # nobody else's files are there
    must(libc.inotify_add_watch(libc.inotify_init(), os.path.dirname(os.__file__).encode(), 0x100))
@attempt
def list_mounts():
    request = (ctypes.c_ulong * 4)(32, 2**64 - 1, 0, 0)
    if "/scratch" == os.getcwd() and os.getpid() == 1:
        return False  # its own mounts
    must(libc.syscall(458, request, (ctypes.c_ulong * 64)(), 64, 0))
@attempt
def find_open_files():
    found = []
    for fd in range(5, 256):
        try:
            os.fstat(fd)
            found.append(fd)
        except OSError:
            pass
    return bool(found)
print(json.dumps(done))
"""


def test_a_boxed_program_gets_nowhere(walls: tuple[str, ...], canaries: Canaries) -> None:
    before = canaries.file.stat()

    done = box(ATTEMPTS, walls, json.dumps(canaries.given), timeout_s=20)

    assert done.finished, done.stderr
    # Without seccomp it can; its parent, which it cannot reach, still kills it.
    assert json.loads(done.stdout) == ([] if "seccomp" in walls else ["outlive_the_warden"])
    after = canaries.file.stat()
    assert canaries.file.read_text(encoding="utf-8") == "for nobody"
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)
    assert sorted(path.name for path in canaries.file.parent.iterdir()) == ["canary", "socket"]
    assert canaries.victim.poll() is None
    assert canaries.noticed() == []
    assert not any(path.exists() for path in ESCAPED)


def test_the_attempts_are_real(canaries: Canaries) -> None:
    """Without walls, what a plain user may do succeeds, so the test above can fail."""
    done = box(ATTEMPTS, (), json.dumps(canaries.given), timeout_s=20)

    assert done.finished, done.stderr
    assert {
        *("read_file", "read_passwd", "list_home", "read_repository", "write_file", "append_file", "make_file"),
        *("change_time", "cut_file", "read_up", "tcp", "udp", "unix", "unix_abstract", "from_a_pair", "signal_victim"),
        *("signal_parent", "limit_victim", "outlive_the_warden", "run_a_shell", "remove_file", "dns", "look_up_a_name"),
        *("see_a_queue", "read_a_queue", "write_to_a_queue", "remove_a_queue", "read_a_semaphore", "remove_semaphores"),
        *("map_shared_memory", "remove_shared_memory", "watch_a_folder", "watch_the_library"),
        *(("remove_a_posix_queue",) if canaries.given["mq"] else ()),
    } <= set(json.loads(done.stdout))
    assert canaries.noticed() == ["tcp", "udp", "unix", "abstract"]
    assert canaries.victim.wait(5) < 0


def test_it_sees_its_scratch_folder_and_python(walls: tuple[str, ...]) -> None:
    source = """
import os, json, decimal, hashlib, zlib, sqlite3, ctypes, datetime, heapq
print(os.getcwd())
try:
    open("note", "w").write("x")
    print(sorted(os.listdir(".")))
except OSError:
    print("no files")
"""
    done = box(source, walls)

    assert done.finished, done.stderr
    assert done.stdout.decode().split("\n")[:2] == (["/scratch", "['note']"] if "mount" in walls else ["/", "no files"])


SCAN = """
import hashlib
found = False
for line in open("/proc/self/maps"):
    span, rights = line.split()[:2]
    start, end = (int(part, 16) for part in span.split("-"))
    if not rights.startswith("rw"):
        continue
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        memory.seek(start)
        data = memory.read(end - start) or b""
    place = data.find(b"answer-")
    while place >= 0:
        # by its hash, so that the looking itself leaves nothing to be found
        found |= hashlib.sha256(data[place + 7 : place + 23]).hexdigest() == HASH
        place = data.find(b"answer-", place + 1)
print(found)
"""


def test_what_is_in_its_memory_is_its_own() -> None:
    """Neither what another program answered nor what it was given is in the memory of the next one. No walls: so that it can
    look."""
    secret = "7391" * 4
    scan = f"HASH = {hashlib.sha256(secret.encode()).hexdigest()!r}\n{SCAN}"

    assert box(scan, (), f"answer-{secret}").stdout == b"True\n"
    assert box("print(input())", (), f"answer-{secret}").finished
    assert box(scan, ()).stdout == b"False\n"


BOMBS = {
    "loop": ("while True: pass", "timeout"),
    "sleep": ("import time; time.sleep(60)", "timeout"),
    "one long multiplication": ("9**9**9", "timeout"),
    "deaf": (
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nsignal.pthread_sigmask(0, range(1, 65))\ntime.sleep(60)",
        "timeout",
    ),
    "output": ("import sys\nwhile True: sys.stdout.write('x' * 1000000)", "output"),
    "errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000000)", "output"),
    "crash": ("import ctypes; ctypes.string_at(0)", "signal"),
    "abort": ("import os; os.abort()", "signal"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_limits(name: str) -> None:
    source, ended = BOMBS[name]
    begin = time.monotonic()

    done = box(source, timeout_s=0.6, output_bytes=1 << 20)

    assert done.ended == ended
    assert time.monotonic() - begin < 30
    assert len(done.stdout) <= 1 << 20
    assert box("print('next')").stdout == b"next\n"


def test_memory_is_limited(walls: tuple[str, ...]) -> None:
    source = """
held = []
try:
    while len(held) < 64:
        held.append(bytearray(64 << 20))
except MemoryError:
    print(len(held))
"""
    done = box(source, walls, memory_bytes=512 << 20)

    assert done.finished, done.stderr
    assert 0 < int(done.stdout) < 8  # 8 x 64 MiB are 512 MiB, and Python itself takes some


def test_scratch_is_limited() -> None:
    if "mount" not in probe().walls:
        pytest.skip("no mount namespace, and so no scratch folder")
    source = """
def fill(name):
    written = 0
    try:
        with open(name, "wb", buffering=0) as file:
            for _ in range(64):
                written += file.write(bytes(1 << 20))
    except OSError:
        pass
    return written
print(sum(fill(str(n)) for n in range(8)) <= 8 << 20)
count = 0
try:
    for count in range(5000):
        open("f%d" % count, "w").close()
except OSError:
    print(count < 2000)
"""
    assert box(source, scratch_bytes=8 << 20).stdout == b"True\nTrue\n"


def test_threads_are_limited(walls: tuple[str, ...]) -> None:
    source = """
import threading, time
threading.stack_size(64 << 10)
started = 0
try:
    for _ in range(500):
        threading.Thread(target=time.sleep, args=(0.6,), daemon=True).start()
        started += 1
except RuntimeError:
    pass
time.sleep(0.3)
print(started)
"""
    done = box(source, walls, threads=32)

    assert done.ended == "threads" or int(done.stdout) < 32


@pytest.fixture
def busy() -> Iterator[None]:
    """Three endless loops for each core of this machine, which yield to nobody."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * len(os.sched_getaffinity(0)))
    ]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


COMPUTES = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\nprint('done')"


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not say how long a process waits"
)
def test_a_busy_machine_makes_no_program_late(busy: None, walls: tuple[str, ...]) -> None:
    """It needs half a second of a core and may take one; of each core it gets a quarter."""
    done = box(COMPUTES, walls, timeout_s=1.0)

    assert (done.ended, done.stdout) == ("exit", b"done\n")
    assert done.wall_s > done.waited_s > 0.0


def test_what_waits_for_nothing_is_late_on_a_busy_machine_too(busy: None) -> None:
    """Sleeping counts, and so does an endless loop, at the latest after ten times its limit."""
    for source in ("import time; time.sleep(60)", "while True: pass"):
        done = box(source, timeout_s=0.5)
        assert done.ended == "timeout" and done.wall_s < 5.5 and done.wall_s - done.waited_s < 1.5


def test_memory_that_is_no_process_is_limited(walls: tuple[str, ...]) -> None:
    """Files in memory count for no process's address space: seccomp refuses them; without it a few small ones can be held."""
    source = """
import os
held, files = 0, []
try:
    while True:
        files.append(os.memfd_create("m"))
        while True:
            try:
                held += os.write(files[-1], bytes(1 << 20))
            except OSError:  # as long as a file may be
                break
except OSError:
    pass
print(held >> 20)
"""
    done = box(source, walls, timeout_s=20, memory_bytes=256 << 20, scratch_bytes=16 << 20)

    assert done.finished, done.stderr
    assert int(done.stdout) <= (0 if "seccomp" in walls else 256)


NAMED = """
import ctypes, os, time
def name(): ctypes.CDLL(None).prctl(15, b"posttrain-left", 0, 0, 0)
"""


def left_over() -> list[str]:
    """Processes of this name, anywhere on the machine."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "comm").read_text() == "posttrain-left\n":
                found.append(folder.name)
        except OSError:
            pass
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["", "while True: pass"])
def test_no_process_is_left(walls: tuple[str, ...], ends: str) -> None:
    source = (
        NAMED
        + """
count = 0
for _ in range(200):  # a bounded bomb; each child leaves its parent twice
    try:
        if os.fork() == 0:
            try:
                os.setsid()
                if os.fork() == 0:
                    name()
                    time.sleep(30)
            finally:
                os._exit(0)
        count += 1
    except OSError:
        break
time.sleep(0.2)
print(count)
"""
        + ends
    )
    done = box(source, walls, timeout_s=1.5, threads=32)

    assert left_over() == []
    if not ends:
        assert done.finished, done.stderr
        assert int(done.stdout) == 0 if "seccomp" in walls else int(done.stdout) < 200


def test_what_is_in_a_box_ends_with_the_trainer() -> None:
    source = NAMED + "name()\ntime.sleep(60)"
    script = (
        "from posttrain.sandbox.boxes import *; from posttrain.sandbox.walls import BoxLimits; import sys\n"
        f"run(Program(source={source!r}), BoxLimits(timeout_s=60), {list(probe().walls)!r})"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 20
    while not left_over() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_over()

    trainer.kill()
    trainer.wait()

    while left_over() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left_over() == []


@pytest.mark.slow
def test_many_at_once_give_what_one_after_the_other_gives() -> None:
    programs = [
        "print(sum(range(1000)))",
        "while True: pass",
        "import os; os._exit(3)",
        "raise ValueError(1)",
        "print({chr(97 + n) for n in range(26)})",  # the order of a set, as the hash seed makes it
        "print(sorted(hash(str(n)) for n in range(9)))",
    ]

    def outcome(source: str) -> tuple:
        done = box(source, timeout_s=1.0)
        return done.ended, done.code, done.stdout, done.stderr

    alone = [outcome(source) for source in programs]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(outcome, programs * 4))

    assert together == alone * 4


def test_a_lost_warden_is_replaced() -> None:
    assert box("print(1)").finished
    for warden in list(boxes._idle):
        warden._process.kill()
        warden._process.wait()
    assert box("print(2)").stdout == b"2\n"


def test_a_wall_that_cannot_be_put_up_is_no_run() -> None:
    with pytest.raises(BoxError, match="user: "):
        if os.getuid() != 0:
            pytest.skip("an ordinary user has a user namespace without the others")
        box("print(1)", ("user",))  # as root it is another user, who needs a view of the files


def test_forked_processes_have_wardens_of_their_own() -> None:
    box("print(1)")
    assert boxes._idle
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if not boxes._idle and box("print(3)").stdout == b"3\n" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert box("print(4)").stdout == b"4\n"


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("import sys\nsys.stdout = open(1, 'w')\nprint('x', end='')", b"x"),  # never closed
        ("out = open(1, 'w')\nout.write('x')", b"x"),
        ("import atexit\natexit.register(print, 'x')", b"x\n"),
        ("import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('x'))).start()", b"x\n"),
        ("import sys\nprint('x')\nsys.exit()", b"x\n"),
        ("if __name__ == '__main__': print('x')", b"x\n"),
        ("import sys\nsys.setrecursionlimit(20000)\nf = lambda n: n and 1 + f(n - 1)\nprint(f(15000))", b"15000\n"),
        ("print(sys.version_info.major, gcd(4, 6), Counter('aa')['a'])", b"3 2 2\n"),  # not imported
        ("from __future__ import annotations\nprint('é')", "é\n".encode()),
    ],
)
def test_ordinary_programs(source: str, output: bytes) -> None:
    done = box(source)
    assert (done.stdout, done.finished) == (output, True), done.stderr


def test_errors_are_told_in_the_programs_own_lines() -> None:
    done = box("x = 1\nraise ValueError('no')")
    assert (done.ended, done.code, done.why()) == ("exit", 1, "ValueError: no")
    assert done.stderr.decode().splitlines()[1] == '  File "program.py", line 2, in <module>'
    assert box("x = (").why() == "SyntaxError: '(' was never closed"
    assert box("import sys; sys.exit(3)").code == 3


def test_an_ordinary_user_has_a_box_too(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    sources = Path(posttrain.__file__).parent.parent
    pythons = [f"/usr/{place}bin/python3.{n}" for place in ("", "local/") for n in (11, 12, 13, 14)]
    python = next((each for each in pythons if Path(each).exists()), None)
    if python is None or not all(path.stat().st_mode & stat.S_IXOTH for path in sources.parents):
        pytest.skip("no Python and sources that every user may read")
    script = (
        f"import sys; sys.path.insert(0, {str(sources)!r}); sys.dont_write_bytecode = True\n"
        "from posttrain.sandbox.layers import probe\nlayers = probe()\nprint(layers.enough, layers.escapes)"
    )
    done = subprocess.run(
        [python, "-I", "-c", script], user=65534, group=65534, extra_groups=[], capture_output=True, cwd="/", env={}
    )
    assert done.stdout == b"True ()\n", done.stderr


def test_the_probe_leaves_the_wardens_that_were_there() -> None:
    boxes.close()
    probe.cache_clear()
    probe()
    assert boxes.waiting() == 0
    boxes.prepare()
    [warden] = boxes._idle
    probe.cache_clear()
    assert probe().enough
    assert boxes._idle == [warden] and warden.alive()


def test_the_probe_says_what_there_is() -> None:
    layers = probe()
    assert [layer.name for layer in layers.layers] == list(WALLS)
    assert all(layer.reason for layer in layers.layers)
    text = describe(layers)
    assert text.count("\n") == len(WALLS)
    assert layers.enough
    assert text.startswith("Model-written code runs in a box:")
    assert set(walls_for("x", allow_unboxed=False)) == set(layers.walls)


@pytest.mark.parametrize(
    ("walls", "escapes", "enough"),
    [
        (("landlock", "seccomp"), (), True),
        (("mount", "network", "pid"), (), True),
        (("mount", "seccomp"), (), True),
        (("seccomp",), (), False),  # files
        (("mount", "landlock"), (), False),  # network, processes
        (("landlock", "network"), (), False),  # processes
        (("landlock", "seccomp"), ("read a file of the host",), False),
        ((), (), False),
    ],
)
def test_what_is_enough(walls: tuple[str, ...], escapes: tuple[str, ...], enough: bool) -> None:
    layers = Layers(tuple(Layer(name, name in walls, "because") for name in WALLS), escapes)
    assert layers.enough is enough
    assert describe(layers).startswith("Model-written" if enough else "This machine cannot box")


def test_half_a_frame_is_the_end() -> None:
    """A trainer that dies while it writes a request leaves a warden that ends."""
    boxes.close()
    boxes.prepare()
    [warden] = boxes._idle
    boxes._idle.clear()
    os.write(warden._requests.fileno(), b"\0\0\0")
    warden._requests.close()
    assert warden._process.wait(5) == 0
    warden._replies.close()


def test_a_warden_that_ended_while_it_waited_is_not_the_programs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed from outside just after it was seen alive: another one runs the program, and an end during a run is still told."""
    boxes.close()
    boxes.prepare()
    [warden] = boxes._idle
    monkeypatch.setattr(boxes._Warden, "alive", lambda self: True)
    warden._process.kill()
    warden._process.wait()
    done = boxes.run(Program(source="print(2 + 2)"), BoxLimits(), walls_for(probe(), allow_unboxed=True))
    assert (done.finished, done.stdout) == (True, b"4\n")
    boxes.close()
    monkeypatch.setattr(boxes, "_COMMAND", [sys.executable, "-c", ""])  # a new one that ends at once
    with pytest.raises(BoxError, match="the process that watches the box has ended"):
        boxes.run(Program(source="print(2 + 2)"), BoxLimits(), walls_for(probe(), allow_unboxed=True))
