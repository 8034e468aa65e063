"""posttrain: reinforcement-learning post-training for language models.

Importing the package loads neither torch nor transformers; see ``posttrain.build.train`` for how a run is put together.
"""

__version__ = "0.1.0"
