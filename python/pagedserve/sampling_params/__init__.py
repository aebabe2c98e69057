"""Sampling parameters of a request: sampling, stop conditions and output format."""

from pagedserve.sampling_params.beams import BeamSearchParams
from pagedserve.sampling_params.checks import EarlyStopping
from pagedserve.sampling_params.output_kind import RequestOutputKind
from pagedserve.sampling_params.params import SamplingParams
from pagedserve.sampling_params.processors import LogitsProcessor
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams

# The class and its name until vLLM 0.9.
GuidedDecodingParams = StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "EarlyStopping",
    "GuidedDecodingParams",
    "LogitsProcessor",
    "RequestOutputKind",
    "SamplingParams",
]
