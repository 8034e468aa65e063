"""A box for model-written code: no network, no files of the host, no process that outlives it.

    scorer ──▶ boxes.py ──frames──▶ warden.py ──fork──▶ the boxed process: walls put up one by one, then inside.py
               (any process         (a small Python      (kernel.py, view.py, landlock.py, seccomp.py)
                or thread)           of its own)

``boxes.run`` asks a warden, a fresh Python without torch, to run a program. The warden forks a process that puts up the walls
around itself and then runs the program; its parent feeds it, reads what it prints, watches time and threads, and kills it.
Each run has a box of its own. ``layers.probe`` tries on this machine which walls can be put up and whether they hold.

Whether an answer is right is decided outside, by comparing what the program printed or returned with what was expected. What
was expected never enters the box, and neither does anything that means "passed": inside there is nothing to find, to patch or to
forge. A program that takes over everything in its process can at most say what its answer is.

Standard library only, and no torch.
"""
