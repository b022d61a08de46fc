"""The Triton kernels; installed as ``pydml.triton_kernels``, because the bare name belongs to another project."""
