"""Model definitions, one architecture a file.

interface: what a model must provide. registry: architecture name to class. dimensions: the sizes every
decoder-only model has. llama: Llama, and Mistral. qwen2, qwen3, gemma3, gpt_oss: as named.
"""
