"""A reward function whose response says what it does. Every bomb makes sure that it is limited, and gives up by itself.

Loaded by the tests as a user's file; nothing here runs in the tests' own process.
"""

import contextlib
import ctypes
import os
import random
import re
import resource
import signal
import threading
import time

GIVES_UP_S = 4.0  # when a bomb that nobody has stopped ends


def compute_score(data_source, solution_str, ground_truth, extra_info):
    kind, _, rest = solution_str.partition(" ")
    print("scoring", kind)
    if kind in POISONS:
        return POISONS[kind]()
    return {"score": float(rest == ground_truth), "length": len(rest)}


def endless_loop():
    while True:
        pass


def big_integer():
    return 9**9**9**9  # one long multiplication, which holds the interpreter's lock


def slow_pattern():
    return re.match(r"(a+)+$", "a" * 60 + "b")


def memory_bomb():
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    held = []
    for _ in range(2000):
        held.append(bytearray(10**6))
    return len(held)


def shared_memory_bomb():
    """No process takes more than it may; all together do."""
    give_up = time.monotonic() + GIVES_UP_S
    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(40 * 10**6)
            while time.monotonic() < give_up:
                time.sleep(0.01)
            os._exit(len(held) > 0)
    while time.monotonic() < give_up:
        time.sleep(0.01)


def fork_bomb(session=False):
    give_up = time.monotonic() + GIVES_UP_S
    generation = 0
    while time.monotonic() < give_up and generation < 8:  # at most 2^8 processes, were nothing to stop them
        try:
            if os.fork() == 0:
                generation += 1
                if session:
                    os.setsid()
        except OSError:
            time.sleep(0.001)
    while time.monotonic() < give_up:
        time.sleep(0.01)
    os._exit(0)


def fork_bomb_of_sessions():
    fork_bomb(session=True)


def double_fork():
    """A daemon: it belongs to nobody, and keeps the worker's pipes open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(60)
        os._exit(0)
    os.wait()
    return 1.0


def much_output():
    for _ in range(1000):
        print("x" * 10**6)
    return 1.0


def large_answer():
    return {"score": 1.0, **{f"{n:>100}": n for n in range(20_000)}}


def leaves():
    os._exit(3)


def segmentation_fault():
    ctypes.string_at(0)


def sleeps():
    time.sleep(60)


def blocks_signals():
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


def kills_its_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def closes_everything():
    os.closerange(0, 256)
    return 1.0


def interrupts():
    raise KeyboardInterrupt


def many_files():
    return len([open(os.devnull) for _ in range(2000)])


def leaves_a_thread():
    def spin():
        while True:
            pass

    threading.Thread(target=spin, daemon=True).start()
    return 1.0


def child_comes_back():
    """Both processes return from here, the child first."""
    if os.fork() == 0:
        return 7.0
    time.sleep(0.2)
    return 1.0


def child_raises():
    if os.fork() == 0:
        raise RuntimeError("in the child")
    return 1.0


def sets_an_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


def random_number():
    return random.random()


POISONS = {
    function.__name__: function
    for function in (
        *(endless_loop, big_integer, slow_pattern, memory_bomb, shared_memory_bomb, fork_bomb, fork_bomb_of_sessions),
        *(double_fork, much_output, large_answer, leaves, segmentation_fault, sleeps, blocks_signals, kills_its_parent),
        *(closes_everything, interrupts, many_files, leaves_a_thread, sets_an_alarm, random_number),
        *(child_comes_back, child_raises),
    )
}
