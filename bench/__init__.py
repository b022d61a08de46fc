"""Benchmarks: every loss against plain PyTorch, torch.compile, PML, KeOps and faiss. Never installed with pydml."""
