"""Child processes: starting them apart, watching them, and ending them with everything that they have started.

One file, one idea; a kind of child uses those that it needs:

    frames.py       messages behind their length        wire.py         values as JSON, never pickle
    start.py        a child in a session of its own     environment.py  the variables that each kind of child may see
    proc.py         reading /proc                       descendants.py  killing what is below a process
    session.py      a child with its last words         command_keeper.py  a command that ends with us, however we end
    fork_server.py, forks.py   many workers forked from one that has loaded what they need
    limits.py, fork_gate.py    what a call may use      pool.py, keeper.py, worker.py   calls with a deadline
    child.py        one process that keeps the user's own objects

A kind of child: who starts it; what is watched; who ends it.

    reward worker    pool starts a keeper, which forks it; wall and CPU time, memory, output, answer, processes; its keeper
    own classes      a child, behind start.start; the time of an answer; the trainer, or the end of its input
    environment      a fork server forks it; the time of an answer (by its host), memory (by the server); the fork server
    agent            its environment's process, by start.fork or start.start; its end (session); its environment's process
    server           a command keeper, behind start.start; its end and health; the keeper, by SIGTERM, then SIGKILL
    Ray worker       Ray; silence, and its state on its node (proc); descendants.kill on that node
    box's warden     boxes, by start.start; its end and answer; the end of its input, and the kernel ends its boxes

A call of a reward ends with an answer or a typed failure in time, whatever the code in it does:

    trainer  ──frames──▶  keeper  ──fork──▶  worker  ──▶  processes that the code starts
    pool.py               keeper.py          worker.py

A keeper is a fresh Python without torch. It loads the functions once, forks a worker that calls them, and watches it. When a
limit is passed it kills the worker with all its descendants and forks the next one, in milliseconds; loading is not repeated.
The keeper itself never runs a call, so no call can hold its lock, block its signals or exhaust its memory.

Descendants cannot get away: keepers and fork servers are subreapers (PR_SET_CHILD_SUBREAPER), so an orphan, also one that
forked twice or opened a session of its own, becomes their child, and killing goes on until no child is left. A forked child
dies with its parent (PR_SET_PDEATHSIG); keepers and fork servers end when the trainer does, because their input ends. Should a
call kill its keeper, the trainer kills all processes that carry that keeper's mark in their environment.

A fork bomb is stopped before it goes off: a process that forks waits until the keeper has counted (``fork_gate.py``).

Why not pebble's ProcessPool (read in version 5.2.3): it stops the worker process alone, not what that started; with SIGTERM
first, which a worker can block for three seconds; its workers share one pipe and one lock, so one that dies inside it holds
up the others; results are unpickled in the trainer, whatever their size; and it limits time, not memory, output or processes.

On systems other than Linux there is no subreaper: a worker's process group is killed, and a process that left the group stays.
"""
