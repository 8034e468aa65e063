"""Parts common to all training engines on torch; ``backends/train`` holds the engines, which differ in how they shard the
model over processes."""
