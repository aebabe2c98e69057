"""``DeployArgs``: how many replicas there are, and what each may have of the cluster."""

import argparse
import inspect
from dataclasses import dataclass, fields
from typing import Self

import pagedserve.checks as checks
from pagedserve.errors import ConfigError
from pagedserve.options import add_arguments, check_options, describe, option

_AMOUNT = checks.real("a number, at least 0", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployArgs:
    """Everything that decides how replicas are deployed; checked when made.

    Raises:
        ConfigError: A value that cannot be; the message says what is accepted.
    """

    min_replicas: int = option(1, checks.count(), "Replicas that are always there.")
    max_replicas: int | None = option(
        None,
        checks.optional_count(),
        "Replicas at most: so many while there are requests for them.",
        unset="min_replicas",
    )
    target_ongoing_requests: float = option(
        32.0,
        checks.real("a number, above 0", low=0, open_low=True),
        "Requests of a replica, on average, beyond which there is one more.",
    )
    upscale_delay_s: float = option(
        30.0, _AMOUNT, "Seconds that there must be too many requests before a replica is added."
    )
    downscale_delay_s: float = option(
        600.0, _AMOUNT, "Seconds that there must be too few before one is ended."
    )
    replica_num_cpus: float = option(
        1.0, _AMOUNT, "Cores of the cluster that a replica reserves, or each of its ranks of Ray."
    )
    replica_num_gpus: float = option(0.0, _AMOUNT, "GPUs, alike.")
    ray_address: str | None = option(
        None,
        checks.optional(checks.text),
        'Ray cluster to deploy to, as "auto" or "ray-head:6379"; none starts one here.',
        unset="none",
    )
    app_name: str = option("pagedserve", checks.text, "Name of the application in the cluster.")
    update: bool = option(
        False,
        checks.flag,
        "Exchange the replicas of the application that runs for these, one after the other, and "
        "end; the server that runs goes on.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.most < self.min_replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}; it must be at least min_replicas, "
                f"{self.min_replicas}"
            )

    @property
    def most(self) -> int:
        """Replicas at most."""
        return self.max_replicas or self.min_replicas

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add an argument a field to a command line."""
        add_arguments(parser, cls, "replicas")

    @classmethod
    def from_cli_args(cls, options: argparse.Namespace) -> Self:
        """What a command line says.

        Raises:
            ConfigError: See the class.
        """
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


DeployArgs.__doc__ = f"{inspect.cleandoc(DeployArgs.__doc__ or '')}\n\n{describe(DeployArgs)}"
