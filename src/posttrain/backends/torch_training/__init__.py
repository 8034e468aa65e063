"""What every training engine on torch is made of; ``backends/train`` holds the engines, which differ in how they share the
model out over processes."""
