"""The kernels of paged attention: device code, and the same functions in plain torch.

Shipped as ``pagedserve.kernels``.  Nothing in here imports pagedserve, and importing this
package imports neither torch nor triton.

Run from the repository root, Python also finds this folder as a top-level ``kernels``.  That
name stays importable, because transformers looks for a package of that name and takes an error
for a broken installation; the modules in here refuse it, so no function exists twice.
"""
