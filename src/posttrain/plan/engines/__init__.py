"""What a plan knows about each training engine, a module per engine under the engine's name; free of torch."""
