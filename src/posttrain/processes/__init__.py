"""Processes that can be killed: whatever the code in them does, a call ends with an answer or a typed failure in time.

    trainer  ──frames──▶  keeper  ──fork──▶  worker  ──▶  whatever the code starts
    pool.py               keeper.py          worker.py

The trainer (``pool.WorkerPool``) starts keepers as fresh Python processes, without torch. A keeper loads the functions once,
forks a worker that calls them, and watches it: wall time, CPU time, memory, output, answer size, number of processes. When a
limit is passed it kills the worker with all its descendants and forks the next one, in milliseconds; loading is not repeated.
The keeper itself never runs a call, so no call can hold its lock, block its signals or exhaust its memory.

Descendants cannot get away: the keeper is their subreaper (PR_SET_CHILD_SUBREAPER), so an orphan, also one that forked
twice or opened a session of its own, becomes the keeper's child, and killing goes on until the keeper has no child left. What
a call starts ends with the call. A worker dies with its keeper (PR_SET_PDEATHSIG), a keeper ends when the trainer does (its
input ends); should a call kill its keeper, the trainer kills what carries that keeper's mark in its environment.

A fork bomb is stopped before it goes off: whoever forks waits until the keeper has counted (``fork_gate.py``).

What crosses between processes is JSON behind a length that is checked before anything is read; never pickle.

Why not pebble's ProcessPool (read in version 5.2.3): it stops the worker process alone, not what that started; with SIGTERM
first, which a worker can block for three seconds; its workers share one pipe and one lock, so one that dies inside it holds
up the others; results are unpickled in the trainer, whatever their size; and it limits time, not memory, output or processes.

On systems other than Linux there is no subreaper: a worker's process group is killed, and a process that left the group stays.
"""
