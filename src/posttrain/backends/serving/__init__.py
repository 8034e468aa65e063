"""Samplers that are servers: what the engines http, vllm and sglang have in common."""
