"""Hosts of environments: in the trainer's process (``inline``), or in processes of their own that can be killed (``processes``).

    trainer  ──socket────────────▶  worker      one per living environment, used again for the next
    processes.py  ──▶  fork server  ──fork──▶  worker.py

The fork server (``processes.fork_server``) is a fresh Python without torch. It imports the environments' libraries and the
user's own files once and forks the workers, so that the hundredth costs milliseconds. A worker that does not answer in time,
or holds too much memory, is killed with everything that it has started; so are processes that a worker leaves behind when it
dies. Other episodes are not affected. What crosses is JSON (``processes.wire``), never pickle.
"""
