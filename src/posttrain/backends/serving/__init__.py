"""Samplers that are servers: the common part of the engines http, vllm and sglang."""
