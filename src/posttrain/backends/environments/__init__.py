"""Where environments live: in the trainer's process (``inline``), or in processes of their own that can be killed
(``processes``).

    trainer  ──socket──────────────▶  worker      one per living environment, used again for the next
    processes.py  ──"fork"──▶  server.py  ──fork──▶  worker.py

The server is a fresh Python process without torch. It imports the environments' libraries once and forks the workers, so that
the hundredth costs milliseconds. A worker that does not answer in time is killed with all that it has started, and so is what
a worker leaves behind when it dies; nothing else notices. What crosses is JSON (processes.wire), never pickle.
"""
