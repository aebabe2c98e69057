"""Paged-attention kernels: device code, and reference functions in plain torch.

Shipped as ``pagedserve.kernels``.  Nothing in here imports pagedserve, and importing this
package imports neither torch nor triton.

Run from the repository root, Python also finds this folder as a top-level ``kernels``.  That name
must stay importable, because transformers looks for a package of that name and treats an error as a
broken installation; the modules here refuse it, so that no function exists twice.
"""
