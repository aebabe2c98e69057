"""Torch as if there were a GPU: tensors of the host are real, tensors of the device are fake.

A fake tensor has a shape, a dtype and a device, and no values.  `FakeGpu` runs operations on host
tensors as they are, hands those on device tensors to torch's fake mode, and notes whatever makes
the host wait for the device.  Operations over both raise, as they would on a GPU.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

GPU = torch.device("cuda", 0)
aten = torch.ops.aten

# Operations that answer with a number of the device, or in a shape that depends on its values.
_ASKING = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
}


class FakeGpu(TorchDispatchMode):
    """While it is entered there is a GPU.

    Attributes:
        waits: operations that made the host wait for the device, in order.
        made: what operations on the device gave, if somebody wants to know what lives on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._fake = FakeTensorMode(allow_non_fake_inputs=False)
        self.waits: list[str] = []
        self.made: list[weakref.ref[Tensor]] | None = None

    @contextmanager
    def running(self) -> Iterator["FakeGpu"]:
        """Enter both modes."""
        with self._fake, self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = list(tree_iter((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_fake = [isinstance(tensor, FakeTensor) for tensor in tensors]
        wanted = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
        if not any(is_fake):
            if "cuda" in wanted:
                return self._made_there(func, tensors, args, kwargs)
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if "cpu" in wanted or self._is_asking(func, args):
            return self._waited(func, tensors, args, kwargs)
        if func is aten.copy_.default and is_fake[0] != is_fake[1]:
            self.waits.append(str(func))
            return args[0]
        args, kwargs = self._with_scalars(args, kwargs)
        results = func(*args, **kwargs)
        if self.made is not None:
            given = {id(tensor) for tensor in tensors}
            fresh = (result for result in tree_iter(results) if isinstance(result, Tensor))
            self.made += [weakref.ref(tensor) for tensor in fresh if id(tensor) not in given]
        return results

    def _made_there(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Tensor:
        """A tensor of the device: made there, or copied from memory that is not pinned."""
        if not tensors:
            made: Tensor = func(*args, **kwargs)
            return made
        self.waits.append(f"{func} to the device")
        [host] = tensors
        return torch.empty(host.shape, dtype=_dtype(host, args, kwargs), device=GPU)

    def _is_asking(self, func: Any, args: Any) -> bool:
        masks = args[1] if func in (aten.index.Tensor, aten.index_put_.default) else ()
        return func in _ASKING or any(m is not None and m.dtype == torch.bool for m in masks)

    def _waited(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """What the host gets: zeros, none of which is chosen."""
        self.waits.append(str(func))
        tensor = tensors[0]
        if func in (aten._local_scalar_dense.default, aten.item.default):
            return torch.zeros((), dtype=tensor.dtype).item()
        if func is aten.is_nonzero.default:
            return False
        if func is aten.index.Tensor:
            return tensor.new_empty((0, *tensor.shape[1:]))
        if func is aten.nonzero.default:
            return tensor.new_empty((0, tensor.dim()), dtype=torch.int64)
        if func is aten.equal.default:
            return True
        assert "to" in str(func), f"{func} waits for the device"
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=_dtype(tensor, args, kwargs))

    def _with_scalars(self, args: Any, kwargs: Any) -> Any:
        """Host tensors of no dimension stand beside device tensors; any other is a mistake."""

        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
                return leaf
            assert leaf.dim() == 0, f"a host tensor {list(leaf.shape)} meets tensors of the device"
            return self._fake.from_tensor(leaf)

        return tree_map(convert, (args, kwargs))


def _dtype(tensor: Tensor, args: Any, kwargs: Any) -> torch.dtype:
    """The dtype that a copy is asked for."""
    wanted = (leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.dtype))
    return next(wanted, tensor.dtype)
