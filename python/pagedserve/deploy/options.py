"""``DeployArgs``: the number of replicas, and the resources that each reserves."""

import argparse
import inspect
from dataclasses import dataclass, fields
from typing import Self

import pagedserve.checks as checks
from pagedserve.config.options import add_arguments, check_options, describe, option
from pagedserve.errors import ConfigError

_AMOUNT = checks.real("a number, at least 0", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployArgs:
    """Every option of a deployment, checked on construction.

    Raises:
        ConfigError: An invalid value; the message says what is accepted.
    """

    min_replicas: int = option(1, checks.count(), "Minimum number of replicas.", concern="replicas")
    max_replicas: int | None = option(
        None,
        checks.optional_count(),
        "Maximum number of replicas, reached under load.",
        concern="replicas",
        unset="min_replicas",
    )
    target_ongoing_requests: float = option(
        32.0,
        checks.real("a number, above 0", low=0, open_low=True),
        "Average number of requests per replica above which a replica is added.",
        concern="replicas",
    )
    upscale_delay_s: float = option(
        30.0,
        _AMOUNT,
        "Seconds that the load must stay too high before a replica is added.",
        concern="replicas",
    )
    downscale_delay_s: float = option(
        600.0,
        _AMOUNT,
        "Seconds that the load must stay too low before a replica is removed.",
        concern="replicas",
    )
    replica_num_cpus: float = option(
        1.0,
        _AMOUNT,
        "Cores of the cluster that each replica reserves, or each of its ranks started by Ray.",
        concern="replicas",
    )
    replica_num_gpus: float = option(
        0.0,
        _AMOUNT,
        "GPUs of the cluster that each replica reserves, or each of its ranks started by Ray.",
        concern="replicas",
    )
    ray_address: str | None = option(
        None,
        checks.optional(checks.text),
        'Address of the Ray cluster, as "auto" or "ray-head:6379".',
        concern="replicas",
        unset="a new cluster on this machine",
    )
    app_name: str = option(
        "pagedserve", checks.text, "Name of the application in the cluster.", concern="replicas"
    )
    update: bool = option(
        False,
        checks.flag,
        "Replace the replicas of a running application one by one, and exit; its server continues.",
        concern="replicas",
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
        """Maximum number of replicas."""
        return self.max_replicas or self.min_replicas

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Give a parser one option for each field."""
        add_arguments(parser, cls)

    @classmethod
    def from_cli_args(cls, options: argparse.Namespace) -> Self:
        """The arguments that a parser with ``add_cli_args`` found.

        Raises:
            ConfigError: See the class.
        """
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


DeployArgs.__doc__ = f"{inspect.cleandoc(DeployArgs.__doc__ or '')}\n\n{describe(DeployArgs)}"
