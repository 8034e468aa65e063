"""Plans of the training engines: a torch-free module per engine, with the engine's name."""
