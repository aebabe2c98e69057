"""``InputBuffers``: arrays that do not do are refused by name, and then nothing is written."""

from typing import Any, TypeAlias

import numpy as np
import pytest

from pagedserve import InputBuffers
from pagedserve.errors import StepError

# Without adapters and encoders there are none.
OPTIONAL = {"adapter_slots", "cross_lens"}
GroupArrays: TypeAlias = dict[str, Any]


def test_buffers_of_another_kind_are_refused_when_they_are_given(
    arrays: dict[str, Any],
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
    busy: Any, engine: Any, arrays: dict[str, Any], group_arrays: GroupArrays
) -> None:
    others: dict[str, Any] = {**arrays, **group_arrays, "adapter_slots": None}
    without = InputBuffers(**others)
    busy.schedule()
    message = "adapter_slots is missing; max_loras is not None"
    busy.refuses(StepError, message, busy.scheduler.prepare_inputs, without)
    engine.add(3)
    engine.schedule()
    engine.scheduler.prepare_inputs(without)
    assert arrays["query_start"][:2].tolist() == [0, 3]


def test_every_group_beside_the_first_needs_its_arrays(
    busy: Any, arrays: dict[str, Any], group_arrays: GroupArrays
) -> None:
    busy.schedule()
    for name in group_arrays:
        message = f"{name} has 1 arrays; the cache has 2 KV groups beside the first"
        others: dict[str, Any] = {**group_arrays, name: group_arrays[name][:1]}
        buffers = InputBuffers(**arrays, **others)
        busy.refuses(StepError, message, busy.scheduler.prepare_inputs, buffers)


def test_arrays_of_groups_are_refused_with_their_place(
    arrays: dict[str, Any], group_arrays: GroupArrays
) -> None:
    for name, (first, second) in group_arrays.items():
        bad: Any = {**group_arrays, name: [first, second.astype(np.int16)]}
        with pytest.raises(StepError, match=rf"^{name}\[1\] must be a one-dimensional contiguous"):
            InputBuffers(**arrays, **bad)


def test_buffers_frozen_later_are_refused_and_none_is_written(
    busy: Any, arrays: dict[str, Any], group_arrays: GroupArrays
) -> None:
    busy.schedule()
    beside = {
        rf"{name}\[{index}\]": array
        for name, of_groups in group_arrays.items()
        for index, array in enumerate(of_groups)
    }
    for name, array in (arrays | beside).items():
        buffers = InputBuffers(**arrays, **group_arrays)
        array.flags.writeable = False
        busy.refuses(StepError, name, busy.scheduler.prepare_inputs, buffers)
        array.flags.writeable = True
    assert all((array == -9).all() for array in (arrays | beside).values())


@pytest.mark.parametrize(
    ("first", "second"), [("token_ids", "seq_lens"), ("positions", "slot_mapping")]
)
def test_one_array_under_two_names_is_refused_and_not_written(
    busy: Any,
    arrays: dict[str, Any],
    group_arrays: GroupArrays,
    first: str,
    second: str,
) -> None:
    busy.schedule()
    for shared in (arrays[first], arrays[first][1:]):  # the array itself, and a part of it
        with pytest.raises(StepError, match=f"({first}|{second}) cannot be written"):
            busy.scheduler.prepare_inputs(InputBuffers(**arrays | {second: shared}, **group_arrays))
    assert all((array == -9).all() for array in arrays.values())


def test_short_buffers_are_refused_and_none_is_written(
    busy: Any, arrays: dict[str, Any], group_arrays: GroupArrays
) -> None:
    outputs = busy.schedule()
    num_rows = outputs.num_rows
    needed = {
        **dict.fromkeys(["token_ids", "positions", "slot_mapping"], outputs.num_batched_tokens),
        **dict.fromkeys(["sample_index", "sample_rows"], outputs.num_samples),
        **dict.fromkeys(["seq_lens", "row_handles", "adapter_slots", "cross_lens"], num_rows),
        "query_start": num_rows + 1,
        "block_tables": num_rows * outputs.max_num_blocks,
    }
    assert needed.keys() == arrays.keys()
    # The window's tables are as wide as the first group's; an encoder has no slots of tokens.
    assert outputs.table_widths == [outputs.max_num_blocks, 1]
    needed_beside = {
        "group_tables": [num_rows * width for width in outputs.table_widths],
        "group_slots": [outputs.num_batched_tokens, 0],
    }

    def is_blank() -> bool:
        everything = [*arrays.values(), *(each for many in group_arrays.values() for each in many)]
        return all(bool((array == -9).all()) for array in everything)

    for name, size in needed.items():
        buffers = InputBuffers(**arrays | {name: arrays[name][: size - 1]}, **group_arrays)
        message = f"{name} has {size - 1} elements; step 1 needs {size}"
        busy.refuses(StepError, message, busy.scheduler.prepare_inputs, buffers)
        assert is_blank()
    for name, sizes in needed_beside.items():
        for index, size in enumerate(sizes):
            if size:
                short = list(group_arrays[name])
                short[index] = short[index][: size - 1]
                others: Any = group_arrays | {name: short}
                buffers = InputBuffers(**arrays, **others)
                message = rf"{name}\[{index}\] has {size - 1} elements; step 1 needs {size}"
                busy.refuses(StepError, message, busy.scheduler.prepare_inputs, buffers)
                assert is_blank()
    fitting = {name: arrays[name][:size] for name, size in needed.items()}
    fitting_beside: Any = {
        name: [array[:size] for array, size in zip(group_arrays[name], sizes, strict=True)]
        for name, sizes in needed_beside.items()
    }
    busy.scheduler.prepare_inputs(InputBuffers(**fitting, **fitting_beside))
    written = [*fitting.values(), *(each for many in fitting_beside.values() for each in many)]
    assert not any((array == -9).any() for array in written)
    assert all((arrays[name][size:] == -9).all() for name, size in needed.items())
    for name, sizes in needed_beside.items():
        for array, size in zip(group_arrays[name], sizes, strict=True):
            assert (array[size:] == -9).all()


def test_unaligned_buffers_are_refused_by_name(arrays: dict[str, Any]) -> None:
    for name, array in arrays.items():
        memory = bytearray(array.nbytes + 1)
        unaligned = np.frombuffer(memory, array.dtype, count=array.size, offset=1)
        assert not unaligned.flags.aligned
        with pytest.raises(StepError, match=f"^{name} must be"):
            InputBuffers(**arrays | {name: unaligned})
