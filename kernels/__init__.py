"""The kernels of paged attention: device code, and the same functions in plain torch.

Shipped as ``pagedserve.kernels``.  Nothing in here imports pagedserve, and importing this
package imports neither torch nor triton.
"""

if __name__ == "kernels":
    raise ImportError(
        "import this package as pagedserve.kernels: found it as top-level 'kernels', "
        "which happens when the repository root is on sys.path"
    )
