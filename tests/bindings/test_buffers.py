"""``InputBuffers``: arrays that do not do are refused by name, and then nothing is written."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedserve import InputBuffers
from pagedserve.errors import StepError

# Without adapters, states, windows and encoders there are none.
OPTIONAL = {
    "adapter_slots",
    "state_slots",
    "window_tables",
    "window_slots",
    "cross_lens",
    "cross_tables",
}


def test_buffers_of_another_kind_are_refused_when_they_are_given(
    arrays: dict[str, NDArray[Any]],
) -> None:
    for name, array in arrays.items():
        frozen = array.copy()
        frozen.flags.writeable = False
        other = np.int64 if array.dtype == np.int32 else np.int32
        others: list[Any] = [array.astype(other), np.repeat(array, 2)[::2], array.reshape(1, -1)]
        is_needed = name not in OPTIONAL
        for bad in [*others, [1], *[None] * is_needed]:
            with pytest.raises(StepError, match=f"^{name} must be a one-dimensional contiguous"):
                InputBuffers(**arrays | {name: bad})
        with pytest.raises(StepError, match=f"^{name} cannot be written"):
            InputBuffers(**arrays | {name: frozen})
        if is_needed:
            with pytest.raises(TypeError, match=name):
                InputBuffers(**{key: value for key, value in arrays.items() if key != name})


def test_slots_of_adapters_are_left_out_only_where_there_are_none(
    busy: Any, engine: Any, arrays: dict[str, NDArray[Any]]
) -> None:
    others: dict[str, Any] = {**arrays, "adapter_slots": None}
    without = InputBuffers(**others)
    busy.schedule()
    message = "adapter_slots is missing; max_loras is not None"
    busy.refuses(StepError, message, busy.scheduler.prepare_inputs, without)
    engine.add(3)
    engine.schedule()
    engine.scheduler.prepare_inputs(without)
    assert arrays["query_start"][:2].tolist() == [0, 3]


def test_arrays_of_windows_are_left_out_only_where_there_is_no_group(
    busy: Any, arrays: dict[str, NDArray[Any]]
) -> None:
    busy.schedule()
    message = "window_tables or window_slots is missing; window_group is not None"
    for name in ("window_tables", "window_slots"):
        others: dict[str, Any] = {**arrays, name: None}
        busy.refuses(StepError, message, busy.scheduler.prepare_inputs, InputBuffers(**others))


def test_buffers_frozen_later_are_refused_and_none_is_written(
    busy: Any, arrays: dict[str, NDArray[Any]]
) -> None:
    busy.schedule()
    for name, array in arrays.items():
        buffers = InputBuffers(**arrays)
        array.flags.writeable = False
        busy.refuses(StepError, name, busy.scheduler.prepare_inputs, buffers)
        array.flags.writeable = True
    assert all((array == -9).all() for array in arrays.values())


@pytest.mark.parametrize(
    ("first", "second"), [("token_ids", "seq_lens"), ("positions", "slot_mapping")]
)
def test_one_array_under_two_names_is_refused_and_not_written(
    busy: Any, arrays: dict[str, NDArray[Any]], first: str, second: str
) -> None:
    busy.schedule()
    for shared in (arrays[first], arrays[first][1:]):  # the array itself, and a part of it
        with pytest.raises(StepError, match=f"({first}|{second}) cannot be written"):
            busy.scheduler.prepare_inputs(InputBuffers(**arrays | {second: shared}))
    assert all((array == -9).all() for array in arrays.values())


def test_short_buffers_are_refused_and_none_is_written(
    busy: Any, arrays: dict[str, NDArray[Any]]
) -> None:
    outputs = busy.schedule()
    needed = {
        **dict.fromkeys(
            ["token_ids", "positions", "slot_mapping", "window_slots"], outputs.num_batched_tokens
        ),
        **dict.fromkeys(["sample_index", "sample_rows"], outputs.num_samples),
        **dict.fromkeys(
            ["seq_lens", "row_handles", "adapter_slots", "state_slots", "cross_lens"],
            outputs.num_rows,
        ),
        "query_start": outputs.num_rows + 1,
        "block_tables": outputs.num_rows * outputs.max_num_blocks,
        "window_tables": outputs.num_rows * outputs.max_num_blocks,
        "cross_tables": outputs.num_rows * outputs.max_num_cross_blocks,
    }
    assert needed.keys() == arrays.keys()
    for name, size in needed.items():
        buffers = InputBuffers(**arrays | {name: arrays[name][: size - 1]})
        message = f"{name} has room for {size - 1} elements; step 1 needs {size}"
        busy.refuses(StepError, message, busy.scheduler.prepare_inputs, buffers)
        assert all((array == -9).all() for array in arrays.values())
    fitting = {name: arrays[name][:size] for name, size in needed.items()}
    busy.scheduler.prepare_inputs(InputBuffers(**fitting))
    assert not any((array == -9).any() for array in fitting.values())
    assert all((arrays[name][size:] == -9).all() for name, size in needed.items())


def test_unaligned_buffers_are_refused_by_name(arrays: dict[str, NDArray[Any]]) -> None:
    for name, array in arrays.items():
        memory = bytearray(array.nbytes + 1)
        unaligned = np.frombuffer(memory, array.dtype, count=array.size, offset=1)
        assert not unaligned.flags.aligned
        with pytest.raises(StepError, match=f"^{name} must be"):
            InputBuffers(**arrays | {name: unaligned})
