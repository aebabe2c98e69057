"""Image inputs of a step: features of the vision encoder, and positions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.errors import StepError
from pagedserve.inputs.prompt_images import PlacedImage, PromptImages
from pagedserve.models.forward import StepImages


@torch.inference_mode()
def image_features(model: PreTrainedModel, image: PlacedImage) -> Tensor:
    """Run a model's vision encoder on an image: ``[N, F]`` in host memory.

    Raises:
        StepError: the number of features differs from that of the prompt's image tokens.
    """
    tower: Any = model
    arguments = {name: _on_device(model, array) for name, array in image.arrays.items()}
    found = tower.get_image_features(**arguments, return_dict=True).pooler_output
    features = found if isinstance(found, Tensor) else torch.cat(list(found))
    features = features.flatten(0, -2)
    if len(features) != len(image.places):
        raise StepError(
            f"an image has {len(features)} features, and the prompt {len(image.places)} tokens "
            "for them"
        )
    return features.cpu()


def image_positions(
    model: PreTrainedModel, token_ids: Sequence[int], images: Sequence[PlacedImage]
) -> NDArray[np.int64] | None:
    """Positions ``[3, P]`` of a prompt, if the model counts time, height and width; else None.

    Args:
        model: defines the positions.
        token_ids: token ids of the prompt, P of them.
        images: images of the prompt.
    """
    base: Any = model.base_model
    if not hasattr(base, "get_rope_index"):
        return None
    types = torch.zeros(1, len(token_ids), dtype=torch.int32)
    for image in images:
        types[0, torch.from_numpy(image.places)] = 1
    grids = np.concatenate([image.arrays["image_grid_thw"] for image in images])
    positions, _ = base.get_rope_index(
        torch.tensor([token_ids]), mm_token_type_ids=types, image_grid_thw=torch.from_numpy(grids)
    )
    found: NDArray[np.int64] = positions[:, 0].numpy()
    return found


def step_images(
    rows: Mapping[int, PromptImages],
    query_start: NDArray[np.int32],
    positions: NDArray[np.int64],
    features: Mapping[bytes, Tensor],
    device: torch.device,
) -> StepImages | None:
    """Image inputs of a step; None if it has no image tokens or 3D positions.

    Args:
        rows: rows of the step whose prompts have images.
        query_start: int32 ``[R + 1]``, start of each row in the step's tokens.
        positions: int64 ``[T]``, indices of tokens in their sequences; modified for tokens after a
            prompt with other positions.
        features: features of all images with tokens in the step, by their digests.
        device: device of the model.
    """
    spans = {row: (int(query_start[row]), int(positions[query_start[row]])) for row in rows}
    places, found, counted = [], [], []
    for row, images in rows.items():
        start, first = spans[row]
        end = int(query_start[row + 1])
        last = first + end - start
        for image in images.within(first, last):
            low, high = np.searchsorted(image.places, (first, last))
            places.append(image.places[low:high] + (start - first))
            found.append(features[image.digest][low:high])
        if images.positions is None:
            continue
        if first >= images.positions.shape[1]:
            positions[start:end] += images.delta
        else:
            counted.append((slice(start, end), images.positions_within(first, last)))
    if not places and not counted:
        return None
    return StepImages(
        places=torch.from_numpy(np.concatenate([*places, np.zeros(0, np.int64)])).to(device),
        features=[part.to(device) for part in found],
        positions=_in_three(positions[: query_start[-1]], counted, device) if counted else None,
    )


def _in_three(
    positions: NDArray[np.int64],
    counted: Sequence[tuple[slice, NDArray[np.int64]]],
    device: torch.device,
) -> Tensor:
    """Positions ``[3, 1, T]``: three equal ones, except where the model counts in 3D."""
    three = np.broadcast_to(positions, (3, len(positions))).copy()
    for span, own in counted:
        three[:, span] = own
    return torch.from_numpy(three)[:, None].to(device)


def _on_device(model: PreTrainedModel, array: NDArray[np.generic]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)
